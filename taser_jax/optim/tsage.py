"""T-SAGE: each parameter's step size for a task follows its sensitivity to that task."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from taser_jax.optim.median import MedianOver, lower_median
from taser_jax.optim.task_gradients import (
    Leaves,
    Report,
    keep_trainable,
    no_report,
    sum_over_devices,
    sums,
    with_frozen,
)
from taser_jax.storage.typed_files import Checked, Natural, PositiveNumber, Rate, Share


class TemperatureSchedule(enum.Enum):
    """The softmax temperature over ANCE episodes, counted from 0.

    CONSTANT: τ = `temperature` in every episode. ANNEALED, the paper's Table 6: τ = 64·0.5^(a − 4)
    in episodes a ≥ 4, and infinite before. INFINITE: all tasks have equal weights.
    """

    CONSTANT = "constant"
    ANNEALED = "annealed"
    INFINITE = "infinite"


class StepScale(enum.Enum):
    """The sum of a parameter's weights: during burn-in, and after it.

    PAPER (Algorithm 1, Equation 8): 1 in every step, so that steps keep their size when burn-in
    ends. RELEASED is the code: 1, then 1/T. Adam cancels a constant factor except for its epsilon
    and for a while after burn-in; clipping by global norm cuts smaller gradients less often.
    """

    PAPER = "paper"
    RELEASED = "released"


class BiasCorrection(enum.Enum):
    """Whether the moving average is divided by 1 − β^k after k steps.

    NONE is Algorithm 1 and the released code: the average starts at 0. At β = 0.999 it is 0.20 of
    its final size after 221 steps, which acts like a temperature five times as high. ADAM divides,
    so that the temperature has the same effect in all steps.
    """

    NONE = "none"
    ADAM = "adam"

    def divisor(self, beta: ArrayLike, steps: ArrayLike) -> ArrayLike:
        """What the average is divided by after a number of steps."""
        return 1.0 - beta**steps if self is BiasCorrection.ADAM else 1.0


@dataclasses.dataclass(frozen=True)
class TSageConfig(Checked):
    """T-SAGE as in the paper's Algorithm 1, with absolute values (its Equation 9).

    Attributes:
        beta: share of the old moving average that is kept. (Equation 11 swaps β and 1 − β, but
            Table 4, where 0.999 is best and 0 means no momentum, fits this reading.)
        temperature: τ of the softmax over tasks.
        temperature_schedule: whether τ depends on the episode.
        episode: the ANCE episode of this training, counted from 0; set it to run one episode by
            hand (`taser pipeline ance` sets it).
        burn_in_share: share of the run's steps with equal weights; the average is updated in them
            too.
        step_scale: size of the combined gradient; set RELEASED to reproduce the released code.
        bias_correction: bias correction of the moving average.
        median_over: the entries that the median is taken over. `NONZERO` is not in the paper; it is
            for small models, most of whose parameters are vocabulary rows that a batch does not
            touch.
    """

    RANGE_FIX: ClassVar[str] = "the paper has beta 0.999, temperature 2, burn_in_share 0.1"

    beta: Rate = 0.999
    temperature: PositiveNumber = 2.0
    temperature_schedule: TemperatureSchedule = TemperatureSchedule.CONSTANT
    episode: Natural = 0
    burn_in_share: Share = 0.1
    step_scale: StepScale = StepScale.PAPER
    bias_correction: BiasCorrection = BiasCorrection.NONE
    median_over: MedianOver = MedianOver.ALL


def temperature_of(config: TSageConfig) -> float:
    """τ of the configured episode; `math.inf` if all tasks have equal weights.

    Example:
        ANNEALED: episodes 3, 4, 5, 6 -> inf, 64, 32, 16.
    """
    if config.temperature_schedule is TemperatureSchedule.INFINITE:
        return math.inf
    if config.temperature_schedule is TemperatureSchedule.ANNEALED:
        return 64 * 0.5 ** (config.episode - 4) if config.episode >= 4 else math.inf
    return config.temperature


MEDIAN = "median/"
"""Prefix of the medians' names in a report; the task follows."""

# As in the released code.
_MEDIAN_EPSILON = 1e-12
_LARGEST = 1e30
"""Bound of a normalised sensitivity: finite also where a median is 0 and epsilon tiny."""

_SHARE = 64
_REPORTED = 24
_WHOLE = 1 << 20
_LARGE = 1 << 13
"""For models with `_WHOLE` or more entries, reported means are over every `_SHARE`-th row of about
`_REPORTED` parameters with `_LARGE` or more entries."""


class TSageState(NamedTuple):
    """State of T-SAGE.

    Attributes:
        step: steps done.
        average: task -> moving average of its normalised sensitivities, shaped as the trainable
            parameters. Separate arrays per task let a step write them and the combined gradient in
            one pass.
        median_bits: the last medians' bit patterns, where the next search starts.
        report: of the last step: mean weights and `task_entropy` (nats), for large models over a
            sample of their entries; `median_passes`; `median/<task>`.
    """

    step: Array
    average: dict[str, PyTree]
    median_bits: Array
    report: Report


class _Weighing(NamedTuple):
    """The numbers that a step weights every parameter's gradients with.

    Attributes:
        inverse_median: 1 over the median sensitivity.
        sharpness: multiplies averages before their softmax; 0 gives equal weights.
        factor: multiplies the weighted sum.
    """

    inverse_median: Float[Array, " task"]
    sharpness: Float[Array, ""]
    factor: Float[Array, ""]


def tsage(
    config: TSageConfig,
    *,
    tasks: Sequence[str],
    total_steps: int,
    trainable: PyTree[bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t u_t ⊙ g_t of TACO-DR's Algorithm 1.

    In each step, for each task t and each trainable parameter θ:
        I′_t = |g_t·θ|, then I′_t ← I′_t / (median over all parameters of I′_t)
        I_t ← β·I_t + (1 − β)·I′_t
        u = softmax over t of I_t/τ
    and in the first ⌊burn_in_share · total_steps⌋ steps u_t = 1/T. The median is exact and the
    lower one. Weights act before clipping and Adam, so a task's gradient enters Adam's moments
    weighted; Σ_t u_t = 1 makes the combined gradient an average, not a sum, of the tasks'. Where a
    task has gradients and their median is 0, sensitivities cannot be divided by it: the report's
    `median/<task>` is 0 and `usable` is False. A task without any gradient is insensitive to all
    parameters, so its divisor does not matter.

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
        trainable: tree of bool shaped as the parameters; frozen ones have no average and do not
            count in the median. None trains all.

    Returns:
        The combiner. `squared_norms` of the tasks' gradients say which task has none; without them
        all tasks count as having some. With `param_shardings`, a tree of `NamedSharding`, devices
        exchange sums and nothing else.

    Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
    Algorithm 1 and Equations 8 to 12.
    """
    burn_in_steps = int(config.burn_in_share * total_steps)
    medians = [f"{MEDIAN}{task}" for task in tasks]

    def init(params: PyTree) -> TSageState:
        trained, count = keep_trainable(params, trainable), len(tasks)
        zeros = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.float32))
        report = no_report(count, "task_entropy", "median_passes", *medians)
        report = report._replace(usable=jnp.bool_(True))
        average = {task: zeros(trained) for task in tasks}
        return TSageState(jnp.zeros((), jnp.int32), average, jnp.zeros((count,), jnp.int32), report)

    def update(
        updates: PyTree,
        state: TSageState,
        params: PyTree | None = None,
        *,
        squared_norms: Float[Array, " task"] | None = None,
        param_shardings: PyTree | None = None,
        **extra: object,
    ) -> tuple[PyTree, TSageState]:
        del extra
        leaves = jax.tree.leaves(keep_trainable(updates, trainable))
        trained = keep_trainable(params, trainable)
        factors = jax.tree.leaves(trained)
        shardings = None
        if param_shardings is not None:
            shardings = jax.tree.leaves(keep_trainable(param_shardings, trainable))
        median = lower_median(
            leaves,
            factors=factors,
            guess=state.median_bits,
            over=config.median_over,
            shardings=shardings,
        )
        weighing = _weighing(
            config, median.value, step=state.step, in_burn_in=state.step < burn_in_steps
        )
        averages = [jax.tree.leaves(state.average[task]) for task in tasks]
        weights, task_entropy = _mean_weights(
            config, weighing, leaves, factors, averages, shardings=shardings
        )
        has_gradient = True if squared_norms is None else squared_norms > 0
        passes = median.passes.astype(jnp.float32)
        scalars = {"task_entropy": task_entropy, "median_passes": passes}
        scalars |= {name: median.value[t] for t, name in enumerate(medians)}
        report = Report(weights, scalars, ~jnp.any((median.value == 0) & has_gradient))
        # The old averages must be read before the step overwrites them, or they would be copied.
        report, weighing = jax.lax.optimization_barrier((report, weighing))
        by_leaf = zip(leaves, factors, zip(*averages, strict=True), strict=True)
        results = [_of_leaf(config, weighing, *leaf) for leaf in by_leaf]
        # Without the barrier, the last division would be repeated wherever the gradient is used,
        # and its numerators kept until then.
        new = jax.lax.optimization_barrier([gradient for gradient, _ in results])
        structure = jax.tree.structure(trained)
        combined = with_frozen(jax.tree.unflatten(structure, new), params)
        average = {
            task: jax.tree.unflatten(structure, [moved[t] for _, moved in results])
            for t, task in enumerate(tasks)
        }
        return combined, TSageState(state.step + 1, average, median.bits, report)

    return optax.GradientTransformationExtraArgs(init, update)


def _weighing(
    config: TSageConfig,
    median: Float[Array, " task"],
    *,
    step: Int[Array, ""],
    in_burn_in: Bool[Array, ""],
) -> _Weighing:
    """The weighing of step number `step`, counted from 0."""
    correction = 1.0 / config.bias_correction.divisor(jnp.float32(config.beta), step + 1)
    scale = 1.0 / len(median) if config.step_scale is StepScale.RELEASED else 1.0
    return _Weighing(
        inverse_median=1.0 / (median + _MEDIAN_EPSILON),
        sharpness=jnp.where(in_burn_in, 0.0, 1.0 / temperature_of(config)) * correction,
        factor=jnp.where(in_burn_in, 1.0, scale),
    )


def _of_leaf(
    config: TSageConfig,
    weighing: _Weighing,
    gradients: Float[Array, "task ..."],
    param: Float[Array, "..."],
    averages: Sequence[Float[Array, "..."]],
) -> tuple[Float[Array, "..."], list[Float[Array, "..."]]]:
    """One parameter's combined gradient, and its new averages by task."""
    # Unrolled over tasks, this compiles to one loop that reads its inputs once.
    moved, parts = _softmax_parts(config, averages, gradients, param, *weighing[:2])
    weighted = sum(part * gradients[t] for t, part in enumerate(parts))
    return weighing.factor * weighted / functools.reduce(operator.add, parts), moved


def _softmax_parts(
    config: TSageConfig,
    averages: Sequence[Float[Array, "..."]],
    gradients: Sequence[Float[Array, "..."]] | Float[Array, "task ..."],
    param: Float[Array, "..."],
    inverse_median: Float[Array, " task"],
    sharpness: Float[Array, ""],
) -> tuple[list[Float[Array, "..."]], list[Float[Array, "..."]]]:
    """Each task's new average, and the numerators of the softmax over these; the largest is 1."""
    moved = []
    for t, average in enumerate(averages):
        new = jnp.minimum(jnp.abs(gradients[t] * param) * inverse_median[t], _LARGEST)
        moved.append(config.beta * average + (1.0 - config.beta) * new)
    scores = [sharpness * average for average in moved]
    highest = functools.reduce(jnp.maximum, scores)
    return moved, [jnp.exp(score - highest) for score in scores]


def _mean_weights(
    config: TSageConfig,
    weighing: _Weighing,
    gradients: Sequence[Float[Array, "task ..."]],
    params: Sequence[Float[Array, "..."]],
    averages: Sequence[Sequence[Float[Array, "..."]]],
    *,
    shardings: Sequence[NamedSharding] | None,
) -> tuple[Float[Array, " task"], Float[Array, ""]]:
    """Mean weights and their mean entropy; of large models over some rows of some parameters."""
    sizes = [param.size for param in params]
    places, every = list(range(len(sizes))), 1
    if sum(sizes) >= _WHOLE:
        large = [place for place, size in enumerate(sizes) if size >= _LARGE]
        places, every = large[:: -(-len(large) // _REPORTED) or 1], _SHARE
    totals = sum_over_devices(
        functools.partial(_reported_totals, config, every=every),
        stacked=([gradients[place] for place in places],),
        plain=tuple([each[place] for place in places] for each in (params, *averages)),
        shared=(weighing.inverse_median, weighing.sharpness),
        shardings=shardings and [shardings[place] for place in places],
    )
    *weights, task_entropy = totals[:-1] / jnp.maximum(totals[-1], 1)
    return jnp.stack(weights), task_entropy


def _reported_totals(
    config: TSageConfig,
    stacked: Leaves,
    plain: Leaves,
    inverse_median: Float[Array, " task"],
    sharpness: Float[Array, ""],
    *,
    every: int,
) -> Float[Array, " totals"]:
    """Sums of the tasks' weights and of their entropy over some rows, and the number of entries."""

    def rows(leaf: Float[Array, "..."]) -> Float[Array, "..."]:
        return leaf if every == 1 else leaf.reshape(-1, leaf.shape[-1])[::every]

    (gradients,), (params, *averages) = stacked, plain
    totals = jnp.zeros((len(averages) + 2,), jnp.float32)
    for of_tasks, param, *old in zip(gradients, params, *averages, strict=True):
        before, now = ([rows(each) for each in leaves] for leaves in (old, of_tasks))
        _, parts = _softmax_parts(config, before, now, rows(param), inverse_median, sharpness)
        whole = functools.reduce(operator.add, parts)
        weights = [part / whole for part in parts]
        spread = functools.reduce(operator.add, map(jax.scipy.special.entr, weights))
        size = jnp.full((1,), whole.size, jnp.float32)
        totals = totals + jnp.concatenate([sums([*weights, spread]), size])
    return totals
