"""The loss of one batch as a function of the parameters, in training and in validation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from taser_jax.batch import Batch, Role, Tokens
from taser_jax.encoded import Encoded, static_task
from taser_jax.training.grad_cache import encode_in_chunks
from taser_jax.training.keys import named_key
from taser_jax.training.objective import Objective, ObjectiveConfig, StepMetrics
from taser_jax.training.state import Params

Loss = Callable[..., tuple[jax.Array, StepMetrics]]
"""`loss(params, batch, *, step, task=None) -> (loss, metrics)`."""


@runtime_checkable
class Encoder(Protocol):
    """A Flax module with a method `encode(tokens, role=, task=, train=) -> Encoded`.

    Attributes:
        query_tasks: tasks whose queries it encodes apart; empty where all tasks run alike.
    """

    @property
    def query_tasks(self) -> tuple[str, ...]:
        """See above."""

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
        num_chunks: queries, and passages, are encoded in so many chunks.
        seed: the run's seed.
        train: whether dropout and routing noise are on.

    Returns:
        `loss(params, batch, *, step, task=None) -> (loss, metrics)`; metrics are the objective's.

    Raises:
        ConfigError: (from the returned function) `num_chunks` does not divide the batch, or the
            objective needs what the model does not have.
    """
    objective = objective or ObjectiveConfig()

    def encode_side(
        params: Params, tokens: Tokens, *, role: Role, step: jax.Array, task: str | None
    ) -> Encoded:
        def encode(params: Params, tokens: Tokens, key: jax.Array) -> tuple[jax.Array, Any]:
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
        return Encoded(*encode_in_chunks(encode, params, tokens, key, num_chunks=num_chunks))

    def loss_fn(
        params: Params, batch: Batch, *, step: jax.Array, task: str | None = None
    ) -> tuple[jax.Array, StepMetrics]:
        queries = encode_side(params, batch.queries, role=Role.QUERY, step=step, task=task)
        passages = encode_side(params, batch.passages, role=Role.PASSAGE, step=step, task=task)
        return objective(queries, passages, batch)

    return loss_fn


def make_eval_step(
    model: Encoder, *, objective: ObjectiveConfig | None = None, num_chunks: int = 1
) -> Callable[..., StepMetrics]:
    """The jitted evaluation of one batch on labels alone: no dropout, no routing noise.

    Args:
        model: the dual encoder.
        objective: its temperature is used.
        num_chunks: as in training; bounds memory.

    Returns:
        `step(params, batch, *, task=None) -> metrics`, those of the objective; `nll` is DPR's
        validation loss of this batch.
    """
    plain = ObjectiveConfig(temperature=(objective or ObjectiveConfig()).temperature)
    loss_fn = make_loss(model, objective=plain, num_chunks=num_chunks, train=False)

    @functools.partial(jax.jit, static_argnames="name")
    def jitted(params: Params, batch: Batch, *, name: str | None) -> StepMetrics:
        return loss_fn(params, batch, step=jnp.zeros((), jnp.int32), task=name)[1]

    def eval_step(params: Params, batch: Batch, *, task: str | None = None) -> StepMetrics:
        return jitted(params, batch, name=static_task(model.query_tasks, task))

    return eval_step
