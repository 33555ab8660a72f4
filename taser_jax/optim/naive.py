"""The plain multi-task gradient: the sum, or mean, of the tasks'."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from taser_jax.optim.task_gradients import (
    Report,
    check_task_gradients,
    check_tasks,
    combine,
    weighted_sum,
)


class Reduction(enum.Enum):
    """Whether tasks' gradients are added up or averaged."""

    SUM = "sum"
    MEAN = "mean"


@dataclasses.dataclass(frozen=True)
class NaiveConfig:
    """The sum of the tasks' losses, as TACO-DR's naive multi-task baseline.

    Attributes:
        reduction: SUM is the released code's; MEAN divides by the number of tasks.
    """

    reduction: Reduction = Reduction.SUM


class NaiveState(NamedTuple):
    """Only the report, which never changes."""

    report: Report


def naive(
    config: NaiveConfig, *, tasks: Sequence[str], trainable: Any | None = None
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t g_t, the gradient of the summed losses.

    Example:
        g_1 = (1, 2), g_2 = (3, −1) -> (4, 1); MEAN: (2, 0.5).

    Args:
        config: sum or mean.
        tasks: names, in the order of the task axis.
        trainable: tree of bool; frozen parameters get gradient 0.
    """
    tasks = check_tasks(tasks)
    weight = 1.0 / len(tasks) if config.reduction is Reduction.MEAN else 1.0
    weights = jnp.full((len(tasks),), weight, jnp.float32)

    def init(params: Any) -> NaiveState:
        del params
        return NaiveState(Report(weights, {"task_entropy": jnp.float32(math.log(len(tasks)))}))

    def update(
        updates: Any, state: NaiveState, params: Any | None = None, *, losses: Any, **extra: Any
    ) -> tuple[Any, NaiveState]:
        del extra
        check_task_gradients(updates, params, losses, tasks, trainable)
        combined = combine(
            lambda gradients: weighted_sum(weights, gradients),
            updates,
            params,
            trainable=trainable,
        )
        return combined, state

    return optax.GradientTransformationExtraArgs(init, update)
