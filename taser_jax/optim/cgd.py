"""CGD (common gradient descent): tasks whose gradients help the others get larger weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from taser_jax.optim.task_gradients import (
    Report,
    check_task_gradients,
    check_tasks,
    entropy,
    gram_matrix,
    weighted_gradients,
)
from taser_jax.storage.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class CgdConfig:
    """CGD with the settings that TACO-DR compares with.

    Attributes:
        loss_exponent: power of both losses in the common gain; 0.25 in TACO-DR's scripts, 0.5 in
            CGD's paper, where it stands for the gradients' sizes.
        temperature: τ, the inverse of the weights' step size; 100 in TACO-DR's scripts.
        weight_floor: smallest weight; 1e-5 in the official code. As there, clamped weights are not
            normalised again until the next step.
        size_adjustment: C of the official code: a gain for task j counts in proportion to
            exp(C/√n_j), and weights start from these shares, so that small tasks are not drowned
            out. With 0, as in TACO-DR, all tasks count the same.
        task_sizes: n, the training queries of each task by name; needed if C is not 0.
    """

    loss_exponent: float = 0.25
    temperature: float = 100.0
    weight_floor: float = 0.0
    size_adjustment: float = 0.0
    task_sizes: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and 0 <= self.weight_floor < 1 and self.loss_exponent >= 0):
            raise ConfigError(
                f"temperature {self.temperature}, weight floor {self.weight_floor}, "
                f"loss exponent {self.loss_exponent}",
                where="CgdConfig",
                expected="temperature > 0, 0 <= weight_floor < 1, loss_exponent >= 0",
                fix="TACO-DR's are 100, 0 and 0.25",
            )


class CgdState(NamedTuple):
    """Logarithms of the tasks' weights, and the report of the last step."""

    log_weights: Array
    report: Report


def cgd(
    config: CgdConfig, *, tasks: Sequence[str], trainable: PyTree[bool] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t w_t·g_t with weights that grow with a task's contribution to all tasks.

    r_i = Σ_j (ℓ_i·ℓ_j)^p · cos(g_i, g_j), over all tasks, i itself included; then
    w ← softmax(log w + r/τ), from 1/T at the start, and the new w is used at once.
    With a size adjustment C, s = T·softmax over tasks of C/√n multiplies the j-th term of r, and w
    starts from s/T. (The official code has s/T in r as well: its step size is T/τ.)

    Example:
        ℓ = (4, 1), p = 0.5, τ = 1, g_1 = (3, 4), g_2 = (0, 2). Cosines: 1, 0.8, 1.
        r = (4 + 2·0.8, 2·0.8 + 1) = (5.6, 2.6), w = softmax(5.6, 2.6) = (0.9526, 0.0474), the
        gradient is (2.8577, 3.9051).

    Args:
        config: exponent, temperature, floor, adjustment for sizes.
        tasks: names, in the order of the task axis.
        trainable: tree of bool; the cosines exclude frozen parameters.

    Source: Piratla et al. 2022, "Focus on the Common Good: Group Distributional Robustness
    Follows", Algorithm 1, with cosines over all parameters; sizes as in its official code.

    Raises:
        ConfigError: C is not 0, and a size is missing or not positive.
    """
    tasks = check_tasks(tasks)
    num_tasks = len(tasks)
    shares = _size_shares(config, tasks)

    def init(params: PyTree) -> CgdState:
        del params
        weights = jnp.asarray(shares)
        return CgdState(jnp.log(weights), Report(weights, {"task_entropy": entropy(weights)}))

    def update(
        updates: PyTree,
        state: CgdState,
        params: PyTree | None = None,
        *,
        losses: jax.typing.ArrayLike,
        **extra: object,
    ) -> tuple[PyTree, CgdState]:
        del extra
        products = gram_matrix(check_task_gradients(updates, params, losses, tasks, trainable))
        norms = jnp.sqrt(jnp.diagonal(products))
        inverse = jnp.where(norms > 0, 1.0 / jnp.where(norms > 0, norms, 1.0), 0.0)
        # A regulariser may make a loss negative; it then counts as 0.
        powers = jnp.maximum(losses, 0.0) ** config.loss_exponent
        gains = powers * inverse
        common = gains * jnp.sum(products * gains * num_tasks * shares, axis=1)
        log_weights = jax.nn.log_softmax(state.log_weights + common / config.temperature)
        if config.weight_floor:
            log_weights = jnp.maximum(log_weights, math.log(config.weight_floor))
        weights = jnp.exp(log_weights)
        combined = weighted_gradients(weights, updates, params, trainable=trainable)
        report = Report(weights, {"task_entropy": entropy(weights)})
        return combined, CgdState(log_weights, report)

    return optax.GradientTransformationExtraArgs(init, update)


def _size_shares(config: CgdConfig, tasks: Sequence[str]) -> Float[np.ndarray, " task"]:
    """exp(C/√n) of each task, as shares."""
    sizes = np.ones(len(tasks))
    if config.size_adjustment:
        given = config.task_sizes or {}
        if not all(given.get(task, 0) > 0 for task in tasks):
            raise ConfigError(
                f"sizes {dict(given)}",
                where="CgdConfig.task_sizes",
                expected=f"the number of training queries of each of {', '.join(tasks)}",
                fix="give every task a size, or size_adjustment = 0",
            )
        sizes = np.array([given[task] for task in tasks], np.float64)
    raised = config.size_adjustment / np.sqrt(sizes)
    powers = np.exp(raised - raised.max())
    return (powers / powers.sum()).astype(np.float32)
