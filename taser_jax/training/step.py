"""One training step and one evaluation step, for any dual encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from taser_jax.batch import Batch, Role, Tokens
from taser_jax.training.grad_cache import encode_in_chunks
from taser_jax.training.keys import named_key
from taser_jax.training.losses import contrastive_loss
from taser_jax.training.routing_losses import (
    RoutingRegularizer,
    RoutingSums,
    expert_shares,
    mutual_information,
    regularization,
    routing_entropy,
    EntropyKind,
)
from taser_jax.training.state import Params, TrainState

StepMetrics = dict[str, jax.Array]
"""Scalars by name; `finite` is a bool, the others are float32."""


class Encoder(Protocol):
    """A Flax module with a method `encode(tokens, role=, task=, train=) -> Encoded`.

    `Encoded` has `embeddings` (float32, [batch, dim]) and `routing` (`RoutingSums` or None).
    """

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Flax's `Module.apply`."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised.

    Attributes:
        temperature: divides the similarities.
        regularizer: entropy of learned routing; None adds nothing.
    """

    temperature: float = 1.0
    regularizer: RoutingRegularizer | None = None


def make_train_step(
    model: Encoder,
    optimizer: optax.GradientTransformation,
    *,
    objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 (frozen, so shared safely)
    num_chunks: int = 1,
    seed: int = 0,
    schedule: optax.Schedule | None = None,
    trainable: Any | None = None,
    state_shardings: TrainState | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The jitted training step.

    Dropout and routing draws are functions of (seed, side, `state.step`), whatever came before.
    A loss or gradient norm that is not finite leaves the whole state, its step included, as it
    was, and says so in the metric `finite`.

    Args:
        model: the dual encoder.
        optimizer: optax chain; extra arguments `losses` and `key` are offered to it.
        objective: temperature and regulariser.
        num_chunks: queries, and passages, are encoded in so many chunks (`grad_cache`).
        seed: the run's seed.
        schedule: step -> learning rate, reported as a metric.
        trainable: tree of bool shaped as the parameters; where False no gradient is computed.
        state_shardings: where the new state lives; None leaves it to the compiler.

    Returns:
        `step(state, batch, *, task=None) -> (state, metrics)`; `state` is donated, `task` is
        static and is passed to `encode`.
    """
    loss_fn = make_loss(model, objective=objective, num_chunks=num_chunks, seed=seed)

    def train_step(
        state: TrainState, batch: Batch, *, task: str | None = None
    ) -> tuple[TrainState, StepMetrics]:
        def loss_of(params: Params) -> tuple[jax.Array, StepMetrics]:
            return loss_fn(_freeze(params, trainable), batch, step=state.step, task=task)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        key = jax.random.fold_in(named_key(seed, "optimizer"), state.step)
        new_state, update_metrics = apply_gradients(
            state, gradients, optimizer=optimizer, losses=loss, key=key
        )
        if schedule is not None:
            rate = jnp.asarray(schedule(state.step), jnp.float32)
            update_metrics["learning_rate"] = rate
        return new_state, metrics | update_metrics

    out_shardings = None if state_shardings is None else (state_shardings, None)
    return jax.jit(
        train_step, donate_argnums=0, static_argnames="task", out_shardings=out_shardings
    )


def make_eval_step(
    model: Encoder, *, objective: ObjectiveConfig = ObjectiveConfig(), num_chunks: int = 1  # noqa: B008 (frozen, so shared safely)
) -> Callable[..., StepMetrics]:
    """The jitted evaluation of one batch: no dropout, no routing noise, no regulariser.

    Args:
        model: the dual encoder.
        objective: its temperature is used.
        num_chunks: as in training; bounds memory.

    Returns:
        `step(params, batch, *, task=None) -> metrics`: `nll` (DPR's dev loss), `accuracy`,
        `mean_rank`, `mrr`, and routing metrics where the model routes.
    """
    plain = ObjectiveConfig(temperature=objective.temperature)
    loss_fn = make_loss(model, objective=plain, num_chunks=num_chunks, seed=0, train=False)

    def eval_step(params: Params, batch: Batch, *, task: str | None = None) -> StepMetrics:
        step = jnp.zeros((), jnp.int32)
        _, metrics = loss_fn(params, batch, step=step, task=task)
        return {"nll": metrics.pop("loss")} | metrics

    return jax.jit(eval_step, static_argnames="task")
