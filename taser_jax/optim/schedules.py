"""Learning-rate schedules: step -> rate, as optax takes them."""

from __future__ import annotations

import enum

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from taser_jax.storage.errors import ConfigError


class ScheduleKind(enum.Enum):
    """The shape after warm-up."""

    LINEAR = "linear"
    CONSTANT = "constant"


def make_schedule(
    kind: ScheduleKind,
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    floor: float = 1e-7,
) -> optax.Schedule:
    """Linear warm-up from 0, then linear decay to a floor or a constant rate.

    With peak η, warm-up W and total T, the update made at step s (counted from 0) uses
    η·s/W for s < W, and from there η·max(floor, (T − s)/(T − W)) or η. DPR and TASER use the
    linear one (floor 1e-7), whose first update therefore has rate 0 where there is a warm-up.

    Example:
        η=1, W=2, T=6, linear: 0, 0.5, 1, 0.75, 0.5, 0.25, then the floor.

    Args:
        kind: linear or constant.
        learning_rate: peak η.
        total_steps: T, steps of the run.
        warmup_steps: W.
        floor: smallest share of the peak after warm-up.

    Returns:
        The schedule.

    Raises:
        ConfigError: a negative number, or a warm-up that is longer than the run.
    """
    if learning_rate < 0 or floor < 0:
        raise ConfigError(
            f"learning rate {learning_rate}, floor {floor}",
            where="learning-rate schedule",
            expected="numbers that are not negative",
            fix="set LEARNING_RATE to the peak rate, for example 2e-5",
        )
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        raise ConfigError(
            f"{warmup_steps} warm-up steps in a run of {total_steps} steps",
            where="learning-rate schedule",
            expected="0 <= WARMUP_STEPS <= TRAIN_STEPS",
            fix="shorten the warm-up (about 5 % of the run is common) or train longer",
        )

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        if kind is ScheduleKind.CONSTANT:
            after = jnp.ones_like(step)
        else:
            after = jnp.maximum(floor, (total_steps - step) / max(1, total_steps - warmup_steps))
        return learning_rate * jnp.where(step < warmup_steps, step / max(1, warmup_steps), after)

    return schedule
