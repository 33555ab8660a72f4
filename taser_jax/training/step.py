"""One training step and one evaluation step, for any dual encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from taser_jax.batch import Batch, Role, Tokens
from taser_jax.errors import ConfigError
from taser_jax.expert_use import RoutingStatistics, expert_shares, input_information
from taser_jax.training.grad_cache import encode_in_chunks
from taser_jax.training.keys import named_key
from taser_jax.training.losses import contrastive_loss
from taser_jax.training.routing_losses import (
    EntropyKind,
    RoutingRegularizer,
    regularization,
    routing_entropy,
)
from taser_jax.training.state import Params, TrainState

StepMetrics = dict[str, jax.Array]
"""Scalars by name; `finite` is a bool, the others are float32."""


@runtime_checkable
class Encoder(Protocol):
    """A Flax module with a method `encode(tokens, role=, task=, train=) -> Encoded`.

    `Encoded` has `embeddings` (float32, [batch, dim]) and `routing` (`RoutingStatistics` or None).
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

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature {self.temperature}",
                where="ObjectiveConfig",
                expected="a positive number; it divides the similarities",
                fix="1.0 is DPR's and TASER's",
            )


def make_train_step(
    model: Encoder,
    optimizer: optax.GradientTransformation,
    *,
    objective: ObjectiveConfig | None = None,
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
        objective: temperature and regulariser; None is `ObjectiveConfig()`.
        num_chunks: queries, and passages, are encoded in so many chunks (`grad_cache`).
        seed: the run's seed.
        schedule: step -> learning rate, only reported.
        trainable: tree of bool shaped as the parameters; where False no gradient is computed.
        state_shardings: where the new state lives. None leaves it to the compiler, which on a mesh
            may choose otherwise than the state came, and then compiles a second time.

    Returns:
        `step(state, batch, *, task=None) -> (state, metrics)`; `state` is donated, `task` is
        static and goes to `encode`. A batch that carries its task's name, `{task: batch}`, says
        the same. Metrics: `loss`, those of `make_loss`, those of
        `apply_gradients`, and `learning_rate` where a schedule is given.
    """
    loss_fn = make_loss(model, objective=objective, num_chunks=num_chunks, seed=seed, train=True)

    def train_step(
        state: TrainState, batch: Batch | Mapping[str, Batch], *, task: str | None = None
    ) -> tuple[TrainState, StepMetrics]:
        if not isinstance(batch, Batch):
            ((task, batch),) = batch.items()

        def loss_of(params: Params) -> tuple[jax.Array, StepMetrics]:
            return loss_fn(_freeze(params, trainable), batch, step=state.step, task=task)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        key = jax.random.fold_in(named_key(seed, "optimizer"), state.step)
        new_state, update_metrics = apply_gradients(
            state, gradients, optimizer=optimizer, losses=loss, key=key
        )
        metrics = {"loss": loss} | metrics | update_metrics
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        return new_state, metrics

    out_shardings = None if state_shardings is None else (state_shardings, None)
    return jax.jit(
        train_step, donate_argnums=0, static_argnames="task", out_shardings=out_shardings
    )


def make_eval_step(
    model: Encoder, *, objective: ObjectiveConfig | None = None, num_chunks: int = 1
) -> Callable[..., StepMetrics]:
    """The jitted evaluation of one batch: no dropout, no routing noise, no regulariser.

    Args:
        model: the dual encoder.
        objective: its temperature is used.
        num_chunks: as in training; bounds memory.

    Returns:
        `step(params, batch, *, task=None) -> metrics`, those of `make_loss`; `nll` is DPR's
        validation loss of this batch.
    """
    plain = dataclasses.replace(objective or ObjectiveConfig(), regularizer=None)
    loss_fn = make_loss(model, objective=plain, num_chunks=num_chunks, seed=0, train=False)

    def eval_step(params: Params, batch: Batch, *, task: str | None = None) -> StepMetrics:
        return loss_fn(params, batch, step=jnp.zeros((), jnp.int32), task=task)[1]

    return jax.jit(eval_step, static_argnames="task")


def make_loss(
    model: Encoder,
    *,
    objective: ObjectiveConfig | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    train: bool = True,
) -> Callable[..., tuple[jax.Array, StepMetrics]]:
    """The loss of one batch as a function of the parameters, to be differentiated by the caller.

    Args:
        model: the dual encoder.
        objective: temperature and regulariser; None is `ObjectiveConfig()`.
        num_chunks: queries, and passages, are encoded in so many chunks.
        seed: the run's seed.
        train: whether dropout and routing noise are on.

    Returns:
        `loss(params, batch, *, step, task=None) -> (loss, metrics)`. Metrics: `nll`, `accuracy`,
        `mean_rank`, `mrr`; where the model routes by learning, `routing/entropy` (per input),
        `routing/mutual_information` and `routing/<side>/expert_<i>_share`; `regularization`
        where it is on.

    Raises:
        ConfigError: (from the returned function) `num_chunks` does not divide the batch, or a
            regulariser is set and the model has no learned routing.
    """
    objective = objective or ObjectiveConfig()

    def encode_side(
        params: Params, tokens: Tokens, *, role: Role, step: jax.Array, task: str | None
    ) -> tuple[jax.Array, RoutingStatistics | None]:
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
        return encode_in_chunks(encode, params, tokens, key, num_chunks=num_chunks)

    def loss_fn(
        params: Params, batch: Batch, *, step: jax.Array, task: str | None = None
    ) -> tuple[jax.Array, StepMetrics]:
        queries, query_routing = encode_side(
            params, batch.queries, role=Role.QUERY, step=step, task=task
        )
        passages, passage_routing = encode_side(
            params, batch.passages, role=Role.PASSAGE, step=step, task=task
        )
        result = contrastive_loss(
            queries,
            passages,
            positive_index=jnp.asarray(batch.positive_index),
            ignore=jnp.asarray(batch.ignore),
            temperature=objective.temperature,
        )
        rank = result.rank.astype(jnp.float32)
        loss = result.loss
        metrics = {
            "nll": result.loss,
            "accuracy": result.accuracy,
            "mean_rank": jnp.mean(rank),
            "mrr": jnp.mean(1.0 / rank),
        }
        if query_routing is not None and passage_routing is not None:
            metrics |= _routing_metrics(query_routing, passage_routing)
            if objective.regularizer is not None:
                term = regularization(objective.regularizer, query_routing, passage_routing)
                loss, metrics["regularization"] = loss + term, term
        elif objective.regularizer is not None:
            raise ConfigError(
                "an entropy regulariser is set, but the model has no learned routing",
                where="ObjectiveConfig.regularizer",
                expected="sequence or token routing, or no regulariser",
                fix="set ROUTING to one of these, or the regulariser to None",
            )
        return loss, metrics

    return loss_fn


def apply_gradients(
    state: TrainState,
    gradients: Any,
    *,
    optimizer: optax.GradientTransformation,
    losses: jax.Array,
    key: jax.Array,
) -> tuple[TrainState, StepMetrics]:
    """Updates the state, or leaves it untouched where a loss or gradient is not finite.

    Args:
        state: the state the gradients were taken at.
        gradients: shaped as the parameters, or with a leading task axis where the optimizer
            starts with a multi-task combiner.
        optimizer: optax chain; gets `losses` and `key` if it takes extra arguments.
        losses: the loss, or one loss a task.
        key: for combiners that draw.

    Returns:
        The new state, and `grad_norm` (global, before clipping; one that overflows float32
        counts as not finite), `param_norm` (before the update) and `finite`.
    """
    grad_norm = optax.global_norm(gradients)
    finite = jnp.isfinite(grad_norm) & jnp.all(jnp.isfinite(losses))
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradients, state.opt_state, state.params, losses=losses, key=key
    )
    updated = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
    )
    new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    param_norm = optax.global_norm(state.params)
    return new_state, {"grad_norm": grad_norm, "param_norm": param_norm, "finite": finite}


def _freeze(params: Params, trainable: Any | None) -> Params:
    if trainable is None:
        return params
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else jax.lax.stop_gradient(leaf), params, trainable
    )


def _routing_metrics(queries: RoutingStatistics, passages: RoutingStatistics) -> StepMetrics:
    sides = {"query": queries, "passage": passages}
    entropies = [routing_entropy(side, EntropyKind.PER_INPUT) for side in sides.values()]
    metrics = {
        "routing/entropy": jnp.mean(jnp.stack(entropies)),
        "routing/mutual_information": jnp.mean(input_information(queries, passages)),
    }
    for name, side in sides.items():
        for expert, share in enumerate(expert_shares(side).mean(0)):
            metrics[f"routing/{name}/expert_{expert}_share"] = share
    return metrics
