"""The loss of one batch as a function of the parameters, in training and in validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from taser_jax.models.batch import Batch, EncoderInput, Role, TokenGroups
from taser_jax.models.encoded import Encoded
from taser_jax.training.grad_cache import encode_in_chunks
from taser_jax.training.keys import named_key
from taser_jax.training.objective import Objective, ObjectiveConfig, StepMetrics
from taser_jax.training.passage_queue import PassageQueue
from taser_jax.training.state import Params

Loss = Callable[..., tuple[jax.Array, StepMetrics]]
"""`loss(params, batch, *, step, task=None, queue=None) -> (loss, metrics)`."""

PASSAGES = "passages"
"""Key of the batch's passage embeddings in the metrics, for the queue; only there with a queue."""


@runtime_checkable
class Encoder(Protocol):
    """A Flax module with a method `encode(tokens, role=, task=, train=) -> Encoded`.

    Attributes:
        query_tasks: tasks whose queries have a tower of their own; empty if all share one.
    """

    @property
    def query_tasks(self) -> tuple[str, ...]:
        """Tasks whose queries have a tower of their own."""

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Flax's `Module.apply`."""


def make_loss(
    model: Encoder,
    *,
    objective: Objective | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    train: bool = True,
) -> Loss:
    """The loss of one batch as a function of the parameters, to be differentiated by the caller.

    Args:
        model: the dual encoder.
        objective: what is minimised; None is `ObjectiveConfig()`.
        num_chunks: number of chunks in which queries, and passages, are encoded.
        seed: the run's seed.
        train: whether dropout and routing noise are on.

    Returns:
        `loss(params, batch, *, step, task=None, queue=None) -> (loss, metrics)`; metrics are the
        objective's. With a queue, `batch.ignore` has columns for its passages too, and the metrics
        hold the batch's passages [passages, dim] under `PASSAGES`.

    Raises:
        ConfigError: (from the returned function) `num_chunks` does not divide the batch, or the
            objective needs something that the model or the batch lacks.
    """
    objective = objective or ObjectiveConfig()

    def encode_side(
        params: Params,
        texts: EncoderInput | TokenGroups,
        *,
        role: Role,
        step: jax.Array,
        task: str | None,
    ) -> Encoded:
        def encode(params: Params, tokens: EncoderInput, key: jax.Array) -> tuple[jax.Array, Any]:
            dropout, routing = jax.random.split(key)
            encoded = model.apply(
                {"params": params},
                tokens,
                role=role,
                task=task,
                train=train,
                rngs={"dropout": dropout, "routing": routing},
                method="encode",
            )
            return encoded.embeddings, encoded.routing

        key = jax.random.fold_in(named_key(seed, f"encode {role.value}"), step)
        if not isinstance(texts, TokenGroups):
            return Encoded(*encode_in_chunks(encode, params, texts, key, num_chunks=num_chunks))
        found = [
            encode_in_chunks(
                encode, params, tokens, jax.random.fold_in(key, number), num_chunks=num_chunks
            )
            for number, tokens in enumerate(texts.groups)
        ]
        rows = jnp.concatenate([embeddings for embeddings, _ in found])
        sums = jax.tree.map(lambda *parts: sum(parts), *(routing for _, routing in found))
        return Encoded(rows[texts.place], sums)

    def loss_fn(
        params: Params,
        batch: Batch,
        *,
        step: jax.Array,
        task: str | None = None,
        queue: PassageQueue | None = None,
    ) -> tuple[jax.Array, StepMetrics]:
        queries = encode_side(params, batch.queries, role=Role.QUERY, step=step, task=task)
        passages = encode_side(params, batch.passages, role=Role.PASSAGE, step=step, task=task)
        if queue is None:
            return objective(queries, passages, batch)
        extended = dataclasses.replace(batch, ignore=queue.ignored(jnp.asarray(batch.ignore)))
        loss, metrics = objective(queries, queue.joined(passages), extended)
        return loss, metrics | {PASSAGES: passages.embeddings}

    return loss_fn
