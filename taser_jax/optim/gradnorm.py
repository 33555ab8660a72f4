"""GradNorm: trains the tasks' loss weights so that all tasks learn at the same pace."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from taser_jax.devices.parameter_rules import parameter_path, parameter_paths
from taser_jax.optim.task_gradients import (
    Report,
    check_task_gradients,
    check_tasks,
    entropy,
    keep_trainable,
    squared_norms,
    weighted_gradients,
)
from taser_jax.storage.errors import ConfigError, check_fields

_SMALLEST_LOSS = 1e-6


@dataclasses.dataclass(frozen=True)
class GradNormConfig:
    """GradNorm as in Chen et al.; TACO-DR's paper does not give its settings.

    Attributes:
        alpha: how strongly slow tasks are favoured; 1.5 in the paper's experiments on NYUv2.
        learning_rate: learning rate of the weights' own Adam; 0.025 in the paper.
        layers: regular expression of the paths of the parameters whose gradient norms are used (the
            paper uses the last shared layer, to save time). None uses all trainable parameters.
    """

    alpha: float = 1.5
    learning_rate: float = 0.025
    layers: str | None = None

    def __post_init__(self) -> None:
        fix = "the paper's is 0.025"
        check_fields(
            self, "learning_rate", is_valid=lambda x: x >= 0, expected="0 or more", fix=fix
        )


class GradNormState(NamedTuple):
    """State of GradNorm.

    Attributes:
        step: steps done.
        weights: w, one per task; their sum is the number of tasks.
        first_losses: the losses of the first step.
        inner: state of the weights' Adam.
        report: the weights that the last step used.
    """

    step: Array
    weights: Array
    first_losses: Array
    inner: PyTree
    report: Report


def gradnorm(
    config: GradNormConfig, *, tasks: Sequence[str], trainable: PyTree[bool] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t w_t·g_t with weights trained on the tasks' gradient norms.

    With G_t = ‖w_t·g_t‖ over the chosen parameters, Ḡ their mean over tasks, and
    r_t = (ℓ_t/ℓ_t(0)) / (its mean over tasks), the weights minimise Σ_t |G_t − Ḡ·r_t^α| by gradient
    descent, with Ḡ·r_t^α held constant: the gradient for w_t is sign(G_t − Ḡ·r_t^α)·‖g_t‖. They
    have an Adam of their own and are then scaled to add up to T. A step uses the weights of the
    step before. A weight that would fall below 0 becomes 0, and its own gradient can raise it
    again; if all weights would, none changes. Losses below 1e-6 count as 1e-6 in r, because the
    first loss is a divisor.

    Example:
        ‖g‖ = (4, 2), w = (1, 1), ℓ = ℓ(0): r = (1, 1), Ḡ = 3, gradients of w (+4, −2). Adam's first
        step moves each by its rate, 0.025: (0.975, 1.025), which add up to 2 already.

    Args:
        config: numbers, and the parameters whose norms are used.
        tasks: names, in the order of the task axis.
        trainable: tree of bool; the norms exclude frozen parameters.

    Raises:
        ConfigError: (from `init` and `update`) `layers` matches no trainable parameter.

    Source: Chen et al. 2018, "GradNorm: Gradient Normalization for Adaptive Loss Balancing in Deep
    Multitask Networks", Equations 1 and 2 and Algorithm 1.
    """
    tasks = check_tasks(tasks)
    num_tasks = len(tasks)
    inner = optax.adam(config.learning_rate)

    def init(params: PyTree) -> GradNormState:
        _chosen(keep_trainable(params, trainable), config.layers)
        weights = jnp.ones((num_tasks,), jnp.float32)
        return GradNormState(
            step=jnp.zeros((), jnp.int32),
            weights=weights,
            first_losses=jnp.ones((num_tasks,), jnp.float32),
            inner=inner.init(weights),
            report=Report(weights, {"task_entropy": jnp.float32(math.log(num_tasks))}),
        )

    def update(
        updates: PyTree,
        state: GradNormState,
        params: PyTree | None = None,
        *,
        losses: jax.typing.ArrayLike,
        **extra: object,
    ) -> tuple[PyTree, GradNormState]:
        del extra
        check_task_gradients(updates, params, losses, tasks, trainable)
        norms = jnp.sqrt(squared_norms(_chosen(keep_trainable(updates, trainable), config.layers)))
        # A loss can be exactly 0, where a softmax saturates, and below 0 with a regulariser.
        losses = jnp.maximum(losses, _SMALLEST_LOSS)
        first_losses = jnp.where(state.step == 0, losses, state.first_losses)
        paces = losses / first_losses
        paces = paces / jnp.mean(paces)
        weighted_norms = state.weights * norms
        targets = jnp.mean(weighted_norms) * paces**config.alpha
        slopes = jnp.sign(weighted_norms - targets) * norms
        steps, inner_state = inner.update(slopes, state.inner)
        weights = jnp.maximum(state.weights + steps, 0.0)
        whole = jnp.sum(weights)
        scaled = weights * num_tasks / jnp.where(whole > 0, whole, 1.0)
        # If all were 0, no gradient could raise one again.
        weights = jnp.where(whole > 0, scaled, state.weights)
        combined = weighted_gradients(state.weights, updates, params, trainable=trainable)
        report = Report(state.weights, {"task_entropy": entropy(state.weights)})
        new_state = GradNormState(state.step + 1, weights, first_losses, inner_state, report)
        return combined, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _chosen(tree: PyTree, layers: str | None) -> list[PyTree]:
    """Leaves whose whole path the expression matches."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    try:
        kept = [
            leaf
            for path, leaf in paths
            if layers is None or re.fullmatch(layers, parameter_path(path))
        ]
    except re.error as error:
        raise ConfigError(
            f"{layers!r} is no regular expression: {error}", where="GradNormConfig.layers"
        ) from error
    if not kept:
        raise ConfigError(
            f"{layers!r} matches no trainable parameter",
            where="GradNormConfig.layers",
            expected="parameters such as " + ", ".join(parameter_paths(tree)[:3]),
            fix="correct the expression, or None for all",
        )
    return kept
