"""T-SAGE: each parameter's step size for a task follows its sensitivity to that task."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from taser_jax.errors import ConfigError
from taser_jax.optim.median import MedianOf, MedianOver, lower_median
from taser_jax.optim.over_devices import total
from taser_jax.optim.stochastic_rounding import noise, round_at_random
from taser_jax.optim.task_gradients import (
    Report,
    check_task_gradients,
    check_tasks,
    combine,
    keep_trainable,
    sums,
)

_LARGEST = 1e30
"""Bound of a normalised sensitivity: finite also where a median is 0 and epsilon tiny."""

_REPORTED_WHOLE = 65536
_REPORTED_SHARE = 16
"""Reported means are over whole parameters up to this size, and a 16th of the larger ones' rows."""


class TemperatureSchedule(enum.Enum):
    """The softmax temperature over ANCE episodes, counted from 0.

    CONSTANT is τ = `temperature` in each. ANNEALED is the paper's Table 6: τ = 64·0.5^(a − 4) in
    episode a from the fourth on, infinite before. INFINITE weighs all tasks alike.
    """

    CONSTANT = "constant"
    ANNEALED = "annealed"
    INFINITE = "infinite"


class BurnInScale(enum.Enum):
    """The weight of every task before the sensitivities are used.

    MEAN is 1/T, a softmax of infinite temperature: the step keeps its size as burn-in ends. SUM is
    1, as in the released code: gradients are T times larger during burn-in, so that Adam's second
    moment lags behind, and clipping bites more, around its end.
    """

    MEAN = "mean"
    SUM = "sum"


class CombinedScale(enum.Enum):
    """What multiplies the weighted sum, in burn-in too.

    ONE is Algorithm 1 and Equation 8: Σ_t u_t·g_t with Σ_t u_t = 1. PER_TASK is the released code's
    1/T more. Adam hides a constant factor but for its epsilon; clipping by global norm does not: at
    the same clip norm gradients T times smaller are clipped less.
    """

    ONE = "one"
    PER_TASK = "per_task"


class BiasCorrection(enum.Enum):
    """Whether the moving average is divided by 1 − β^k after k steps.

    NONE is Algorithm 1 and the released code: the average starts at 0, has reached 0.20 of its size
    after 221 steps at β = 0.999, and acts there like a five times higher temperature. ADAM divides:
    the temperature means the same in all steps.
    """

    NONE = "none"
    ADAM = "adam"


class Sensitivity(enum.Enum):
    """What a sensitivity is, before it is divided by its median.

    ABSOLUTE is Equation 9 and the released code: |g·θ|, the change of the loss, to first order,
    when θ is taken away, whatever its direction. SIGNED is Algorithm 1 to the letter: g·θ, and the
    exact lower median of these signed values. A task then weighs less where taking θ away would
    raise its loss. Signed values lie around 0, and so does their median: it may be tiny, which
    makes weights one-hot, and where it is negative the order of the task's parameters is reversed.
    """

    ABSOLUTE = "absolute"
    SIGNED = "signed"


_MEDIANS = {
    Sensitivity.ABSOLUTE: MedianOf.MAGNITUDES,
    Sensitivity.SIGNED: MedianOf.SIGNED,
}


class AverageDtype(enum.Enum):
    """How the moving average is stored.

    BFLOAT16 halves its memory. It is rounded at random: to the nearest, a 0.1% change (1 − β)
    would always round away.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclasses.dataclass(frozen=True)
class TSageConfig:
    """T-SAGE as in the paper's Algorithm 1, with absolute values (its Equation 9).

    Attributes:
        sensitivity: absolute or signed.
        beta: share of the old moving average that is kept. (Equation 11 has β and 1 − β the other
            way round; Table 4, where 0.999 is best and 0 means no momentum, fits this.)
        temperature: τ of the softmax over tasks.
        temperature_schedule: whether τ depends on the episode.
        episode: the ANCE episode of this training, from 0.
        burn_in_share: share of the run's steps with equal weights; the average is updated then too.
        burn_in_scale: what these weights are.
        combined_scale: what multiplies the combined gradient.
        bias_correction: of the moving average.
        average_dtype: how the moving average is stored.
        median_over: which entries the median is of. `NONZERO` is not in the paper; it is for small
            models, most of whose parameters are rows of the vocabulary that a batch does not touch.
        median_epsilon: added to the median's magnitude, as in the released code.
    """

    sensitivity: Sensitivity = Sensitivity.ABSOLUTE
    beta: float = 0.999
    temperature: float = 2.0
    temperature_schedule: TemperatureSchedule = TemperatureSchedule.CONSTANT
    episode: int = 0
    burn_in_share: float = 0.1
    burn_in_scale: BurnInScale = BurnInScale.MEAN
    combined_scale: CombinedScale = CombinedScale.ONE
    bias_correction: BiasCorrection = BiasCorrection.NONE
    average_dtype: AverageDtype = AverageDtype.FLOAT32
    median_over: MedianOver = MedianOver.ALL
    median_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        problems = {
            "beta": not 0 <= self.beta < 1,
            "temperature": not self.temperature > 0,
            "episode": self.episode < 0,
            "burn_in_share": not 0 <= self.burn_in_share <= 1,
            "median_epsilon": not self.median_epsilon > 0,
        }
        for name, is_wrong in problems.items():
            if is_wrong:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}",
                    where="TSageConfig",
                    expected="0 <= beta < 1; temperature, median_epsilon > 0; "
                    "0 <= burn_in_share <= 1; episode >= 0",
                    fix=f"correct {name}; the paper has beta 0.999, temperature 2, share 0.1",
                )


def temperature_of(config: TSageConfig) -> float:
    """τ of the configured episode; `math.inf` where all tasks weigh the same.

    Example:
        ANNEALED: episodes 3, 4, 5, 6 -> inf, 64, 32, 16.
    """
    if config.temperature_schedule is TemperatureSchedule.INFINITE:
        return math.inf
    if config.temperature_schedule is TemperatureSchedule.ANNEALED:
        return 64 * 0.5 ** (config.episode - 4) if config.episode >= 4 else math.inf
    return config.temperature


class TSageState(NamedTuple):
    """State of T-SAGE.

    Attributes:
        step: steps done.
        average: moving average of the normalised sensitivities, [tasks, *shape] a parameter.
        median_bits: the last medians' bit patterns, where the next search starts.
        report: mean weights and `task_entropy` (nats), over a sample of large parameters, and
            `median_passes`, of the last step.
    """

    step: Array
    average: Any
    median_bits: Array
    report: Report


def tsage(
    config: TSageConfig,
    *,
    tasks: Sequence[str],
    total_steps: int,
    trainable: Any | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t u_t ⊙ g_t of TACO-DR's Algorithm 1.

    In each step, for each task t and each trainable parameter θ:
        I′_t = |g_t·θ|, then I′_t ← I′_t / (median over all parameters of I′_t)
        I_t ← β·I_t + (1 − β)·I′_t
        u = softmax over t of I_t/τ
    and in the first ⌊burn_in_share · total_steps⌋ steps u_t = 1/T. The median is exact and the
    lower one. Weights act before clipping and Adam, so a task's gradient enters Adam's moments
    weighted; Σ_t u_t = 1 makes the combined gradient an average, not a sum, of the tasks'.

    Example:
        Two parameters θ = (1, 2), two tasks, β = 0, τ = 1, no burn-in. g_1 = (1, 2) and
        g_2 = (3, 1) give |gθ| of (1, 4) and (3, 2), lower medians 1 and 2, so I = (1, 4) and
        (1.5, 1). The first parameter's weights are softmax(1, 1.5) = (0.3775, 0.6225), the second's
        softmax(4, 1) = (0.9526, 0.0474), and the combined gradient is
        (0.3775·1 + 0.6225·3, 0.9526·2 + 0.0474·1) = (2.2449, 1.9526).

    Args:
        config: numbers and options; each option says what it does to the step.
        tasks: names, in the order of the task axis.
        total_steps: steps of the run, for the burn-in.
        trainable: tree of bool shaped as the parameters; frozen ones have no average and no part in
            the median. None trains all.

    Returns:
        The combiner; `key` is used where the average is stored in bfloat16. With
        `param_shardings`, a tree of `NamedSharding`, devices exchange sums and nothing else.

    Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
    Algorithm 1 and Equations 8 to 12.
    """
    tasks = check_tasks(tasks)
    num_tasks = len(tasks)
    dtype = jnp.dtype(config.average_dtype.value)
    burn_in_steps = int(config.burn_in_share * total_steps)
    inverse_temperature = 1.0 / temperature_of(config)
    burn_in_factor = num_tasks if config.burn_in_scale is BurnInScale.SUM else 1
    scale = 1.0 / num_tasks if config.combined_scale is CombinedScale.PER_TASK else 1.0

    def init(params: Any) -> TSageState:
        kept = keep_trainable(params, trainable)
        return TSageState(
            step=jnp.zeros((), jnp.int32),
            average=jax.tree.map(lambda leaf: jnp.zeros((num_tasks, *leaf.shape), dtype), kept),
            median_bits=jnp.zeros((num_tasks,), jnp.int32),
            report=Report(
                weights=jnp.full((num_tasks,), 1.0 / num_tasks, jnp.float32),
                scalars={
                    "task_entropy": jnp.float32(math.log(num_tasks)),
                    "median_passes": jnp.float32(0),
                },
            ),
        )

    def update(
        updates: Any,
        state: TSageState,
        params: Any | None = None,
        *,
        losses: Any,
        key: Any,
        param_shardings: Any | None = None,
        **extra: Any,
    ) -> tuple[Any, TSageState]:
        del extra
        leaves = check_task_gradients(updates, params, losses, tasks, trainable)
        factors = jax.tree.leaves(keep_trainable(params, trainable))
        shardings = None
        if param_shardings is not None:
            shardings = jax.tree.leaves(keep_trainable(param_shardings, trainable))
        median = lower_median(
            leaves,
            factors=factors,
            guess=state.median_bits,
            over=config.median_over,
            of=_MEDIANS[config.sensitivity],
            shardings=shardings,
        )
        epsilon = jnp.copysign(jnp.float32(config.median_epsilon), median.value)
        inverse_median = 1.0 / (median.value + epsilon)
        step = state.step + 1
        correction = jnp.float32(1)
        if config.bias_correction is BiasCorrection.ADAM:
            correction = 1.0 / (1.0 - jnp.power(jnp.float32(config.beta), step))
        in_burn_in = state.step < burn_in_steps
        sharpness = jnp.where(in_burn_in, 0.0, inverse_temperature) * correction
        factor = jnp.where(in_burn_in, burn_in_factor * scale, scale)

        def parts_of(
            gradients: Any, param: Any, average: Any, *, sharpness: Any, inverse_median: Any
        ) -> list[jax.Array]:
            # Written out over tasks, all of this is one loop that reads its inputs once.
            return _softmax_parts(
                [
                    sharpness * _moved(config, average[t], gradients[t], param, inverse_median[t])
                    for t in range(num_tasks)
                ]
            )

        def of_leaf(gradients: Any, param: Any, average: Any) -> jax.Array:
            parts = parts_of(
                gradients, param, average, sharpness=sharpness, inverse_median=inverse_median
            )
            weighted = sum(part * gradients[t] for t, part in enumerate(parts))
            return factor * weighted / functools.reduce(operator.add, parts)

        kept = keep_trainable(params, trainable)
        combined = combine(of_leaf, updates, params, kept, state.average, trainable=trainable)
        averages = jax.tree.leaves(state.average)
        salts = jax.random.bits(key, (len(leaves),), jnp.uint32)
        new_leaves = []
        for place, (gradients, param, average) in enumerate(
            zip(leaves, factors, averages, strict=True)
        ):
            wide = inverse_median.reshape(-1, *(1,) * param.ndim)
            moved = _moved(config, average, gradients, param, wide)
            if config.average_dtype is AverageDtype.BFLOAT16:
                moved = round_at_random(moved, noise(gradients, param, salts[place]))
            new_leaves.append(moved)
        average = jax.tree.unflatten(jax.tree.structure(state.average), new_leaves)

        def sampled(
            stacked: Any, plain: Any, sharpness: jax.Array, inverse_median: jax.Array
        ) -> list[jax.Array]:
            return [
                _totals(parts_of(*arrays, sharpness=sharpness, inverse_median=inverse_median))
                for arrays in zip(
                    map(_sample, stacked[0]),
                    (_sample(param[None])[0] for param in plain[0]),
                    map(_sample, stacked[1]),
                    strict=True,
                )
            ]

        totals = total(
            sampled,
            stacked=(leaves, averages),
            plain=(factors,),
            shared=(sharpness, inverse_median),
            shardings=shardings,
        )
        *weights, task_entropy = totals[:-1] / totals[-1]
        scalars = {
            "task_entropy": task_entropy,
            "median_passes": median.passes.astype(jnp.float32),
        }
        return combined, TSageState(step, average, median.bits, Report(jnp.stack(weights), scalars))

    return optax.GradientTransformationExtraArgs(init, update)


def _moved(
    config: TSageConfig,
    average: jax.Array,
    gradient: jax.Array,
    param: jax.Array,
    inverse_median: Any,
) -> jax.Array:
    product = gradient * param
    if config.sensitivity is Sensitivity.ABSOLUTE:
        sensitivity = jnp.minimum(jnp.abs(product) * inverse_median, _LARGEST)
    else:
        sensitivity = jnp.clip(product * inverse_median, -_LARGEST, _LARGEST)
    return config.beta * average.astype(jnp.float32) + (1.0 - config.beta) * sensitivity


def _softmax_parts(scores: Sequence[jax.Array]) -> list[jax.Array]:
    """Numerators of a softmax; the largest is 1."""
    highest = functools.reduce(jnp.maximum, scores)
    return [jnp.exp(score - highest) for score in scores]


def _sample(array: jax.Array) -> jax.Array:
    """The middle rows of a large parameter, [tasks, rows, ...]: all would cost a step."""
    rows = array.shape[1] if array.ndim > 1 else 1
    if array.size <= len(array) * _REPORTED_WHOLE or rows < 2 * _REPORTED_SHARE:
        return array
    kept = rows // _REPORTED_SHARE
    start = (rows - kept) // 2
    return jax.lax.slice_in_dim(array, start, start + kept, axis=1)


def _totals(parts: Sequence[jax.Array]) -> Float[Array, " totals"]:
    """Sums over a parameter of the tasks' weights and of their entropy, and its size."""
    whole = functools.reduce(operator.add, parts)
    weights = [part / whole for part in parts]
    spread = functools.reduce(operator.add, map(jax.scipy.special.entr, weights))
    size = jnp.full((1,), parts[0].size, jnp.float32)
    return jnp.concatenate([sums([*weights, spread]), size])
