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
from taser_jax.optim.over_devices import Leaves, total
from taser_jax.optim.sampling import sample, sample_share
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


_REPORTED = 24
"""Reported means of a large model are over samples of so many parameters that are split alike."""


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
        average: task -> moving average of its normalised sensitivities, shaped as the trainable
            parameters. Arrays of their own let a step write them, and the combined gradient, in one
            pass.
        median_bits: the last medians' bit patterns, where the next search starts.
        report: mean weights and `task_entropy` (nats), of large models over a sample (`sampling`),
            and `median_passes`, of the last step.
    """

    step: Array
    average: dict[str, Any]
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
            average={
                task: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), kept)
                for task in tasks
            },
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
        averages = [jax.tree.leaves(state.average[task]) for task in tasks]
        totals = total(
            functools.partial(_sampled_totals, config, share=sample_share(leaves)),
            stacked=(leaves,),
            plain=(factors, *averages),
            shared=(sharpness, inverse_median),
            shardings=shardings,
        )
        # The old averages are read here before a step writes over them, or they would be copied.
        totals, inverse_median = jax.lax.optimization_barrier((totals, inverse_median))
        salts = jax.random.bits(key, (len(leaves), num_tasks), jnp.uint32)

        def of_leaf(
            gradients: Any, param: Any, averages: Sequence[Any], salts: jax.Array
        ) -> tuple[jax.Array, list[jax.Array]]:
            # Written out over tasks, all of this is one loop that reads its inputs once.
            products = [gradients[t] * param for t in range(num_tasks)]
            moved = _moved(config, averages, products, inverse_median)
            parts = _softmax_parts([sharpness * score for score in moved])
            weighted = sum(part * gradients[t] for t, part in enumerate(parts))
            if config.average_dtype is AverageDtype.BFLOAT16:
                moved = [
                    round_at_random(score, noise(gradients[t], param, salts[t]))
                    for t, score in enumerate(moved)
                ]
            return factor * weighted / functools.reduce(operator.add, parts), moved

        by_leaf = zip(leaves, factors, zip(*averages, strict=True), salts, strict=True)
        found = [of_leaf(*arrays) for arrays in by_leaf]
        # Or its last division would be done again wherever the gradient is used, and the numerators
        # kept for that.
        new_gradients = jax.lax.optimization_barrier([new for new, _ in found])
        kept = keep_trainable(params, trainable)
        structure = jax.tree.structure(kept)
        combined = combine(
            lambda gradients, new: new,
            updates,
            params,
            jax.tree.unflatten(structure, new_gradients),
            trainable=trainable,
        )
        average = {
            task: jax.tree.unflatten(structure, [moved[t] for _, moved in found])
            for t, task in enumerate(tasks)
        }
        *weights, task_entropy = totals[:-1] / jnp.maximum(totals[-1], 1)
        scalars = {
            "task_entropy": task_entropy,
            "median_passes": median.passes.astype(jnp.float32),
        }
        return combined, TSageState(step, average, median.bits, Report(jnp.stack(weights), scalars))

    return optax.GradientTransformationExtraArgs(init, update)


def _moved(
    config: TSageConfig, averages: Sequence[Any], products: Any, inverse_median: Any
) -> list[jax.Array]:
    """Each task's new average, float32, from the old one and g·θ."""
    moved = []
    for t, average in enumerate(averages):
        if config.sensitivity is Sensitivity.ABSOLUTE:
            new = jnp.minimum(jnp.abs(products[t]) * inverse_median[t], _LARGEST)
        else:
            new = jnp.clip(products[t] * inverse_median[t], -_LARGEST, _LARGEST)
        moved.append(config.beta * average.astype(jnp.float32) + (1.0 - config.beta) * new)
    return moved


def _softmax_parts(scores: Sequence[jax.Array]) -> list[jax.Array]:
    """Numerators of a softmax; the largest is 1."""
    highest = functools.reduce(jnp.maximum, scores)
    return [jnp.exp(score - highest) for score in scores]


def _sampled_totals(
    config: TSageConfig,
    stacked: Leaves,
    plain: Leaves,
    sharpness: jax.Array,
    inverse_median: jax.Array,
    *,
    share: int,
) -> Float[Array, " totals"]:
    """Sums over a sample of the tasks' weights and of their entropy, and the sample's size."""
    totals = jnp.zeros((len(inverse_median) + 2,), jnp.float32)
    (gradients,), (params, *averages) = stacked, plain
    pick = functools.partial(sample, share=share, most=_REPORTED)
    others = [pick([leaf[None] for leaf in leaves]) for leaves in (params, *averages)]
    for gradient, param, *of_tasks in zip(pick(gradients), *others, strict=True):
        moved = _moved(config, [leaf[0] for leaf in of_tasks], gradient * param, inverse_median)
        parts = _softmax_parts([sharpness * score for score in moved])
        whole = functools.reduce(operator.add, parts)
        weights = [part / whole for part in parts]
        spread = functools.reduce(operator.add, map(jax.scipy.special.entr, weights))
        size = jnp.full((1,), whole.size, jnp.float32)
        totals = totals + jnp.concatenate([sums([*weights, spread]), size])
    return totals
