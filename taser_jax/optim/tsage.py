"""T-SAGE: each parameter's step size for a task follows its sensitivity to that task."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, BFloat16, Bool, Float, Int, PyTree, UInt32

from taser_jax.optim.median import lower_median
from taser_jax.optim.task_gradients import (
    Leaves,
    Report,
    check_task_gradients,
    combine,
    keep_trainable,
    sum_over_devices,
    sums,
)
from taser_jax.optim.tsage_options import (
    AverageDtype,
    BiasCorrection,
    StepScale,
    TSageConfig,
    temperature_of,
)


def noise(
    gradient: Float[Array, "*shape"], param: Float[Array, "*shape"], salt: UInt32[Array, ""]
) -> UInt32[Array, "*shape"]:
    """16 pseudo-random bits, hashed from each entry so that nothing is drawn or moved.

    Args:
        gradient: what is hashed, with the parameter.
        param: likewise.
        salt: differs by step, parameter and task.
    """

    def bits(array: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)

    mixed = bits(gradient) ^ (bits(param) * jnp.uint32(0x9E3779B1)) ^ salt
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE3D)
    return mixed >> 16


def round_at_random(
    values: Float[Array, "*shape"], random_bits: UInt32[Array, "*shape"]
) -> BFloat16[Array, "*shape"]:
    """Rounds to bfloat16 of the next smaller or larger magnitude; the mean is the value.

    Example:
        1.001 lies between bfloat16's 1 and 1.0078125: one call in 7.8 gives the larger.

    Args:
        values: finite.
        random_bits: 16 bits each.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + random_bits
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


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
        The combiner; `key` is used where the average is stored in bfloat16. `squared_norms` of the
        tasks' gradients say which task has none; without them all tasks count as having some. With
        `param_shardings`, a tree of `NamedSharding`, devices exchange sums and nothing else.

    Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
    Algorithm 1 and Equations 8 to 12.
    """
    burn_in_steps = int(config.burn_in_share * total_steps)

    def init(params: PyTree) -> TSageState:
        return _initial_state(config, keep_trainable(params, trainable), tasks)

    def update(
        updates: PyTree,
        state: TSageState,
        params: PyTree | None = None,
        *,
        key: jax.Array,
        squared_norms: Float[Array, " task"] | None = None,
        param_shardings: PyTree | None = None,
        **extra: object,
    ) -> tuple[PyTree, TSageState]:
        del extra
        leaves = check_task_gradients(updates, params, len(tasks), trainable)
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
        report = _report(
            tasks,
            weights=weights,
            task_entropy=task_entropy,
            passes=median.passes,
            medians=median.value,
            usable=~jnp.any((median.value == 0) & has_gradient),
        )
        # The old averages must be read before the step overwrites them, or they would be copied.
        report, weighing = jax.lax.optimization_barrier((report, weighing))
        salts = jax.random.bits(key, (len(leaves), len(tasks)), jnp.uint32)
        new_gradients, moved = _combined(config, weighing, leaves, factors, averages, salts=salts)
        structure = jax.tree.structure(trained)
        combined = combine(
            lambda gradients, new: new,
            updates,
            params,
            jax.tree.unflatten(structure, new_gradients),
            trainable=trainable,
        )
        average = {
            task: jax.tree.unflatten(structure, [of_leaf[t] for of_leaf in moved])
            for t, task in enumerate(tasks)
        }
        return combined, TSageState(state.step + 1, average, median.bits, report)

    return optax.GradientTransformationExtraArgs(init, update)


def _initial_state(config: TSageConfig, trained: PyTree, tasks: Sequence[str]) -> TSageState:
    """Averages, medians and the step at 0; equal weights."""
    dtype, count = jnp.dtype(config.average_dtype.value), len(tasks)
    return TSageState(
        step=jnp.zeros((), jnp.int32),
        average={
            task: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), trained) for task in tasks
        },
        median_bits=jnp.zeros((count,), jnp.int32),
        report=_report(
            tasks,
            weights=jnp.full((count,), 1.0 / count, jnp.float32),
            task_entropy=jnp.float32(math.log(count)),
            passes=jnp.int32(0),
            medians=jnp.zeros((count,), jnp.float32),
            usable=jnp.bool_(True),
        ),
    )


def _report(
    tasks: Sequence[str],
    *,
    weights: Float[Array, " task"],
    task_entropy: Float[Array, ""],
    passes: Int[Array, ""],
    medians: Float[Array, " task"],
    usable: Bool[Array, ""],
) -> Report:
    scalars = {"task_entropy": task_entropy, "median_passes": passes.astype(jnp.float32)}
    scalars |= {f"{MEDIAN}{task}": medians[t] for t, task in enumerate(tasks)}
    return Report(weights, scalars=scalars, usable=usable)


def _weighing(
    config: TSageConfig,
    median: Float[Array, " task"],
    *,
    step: Int[Array, ""],
    in_burn_in: Bool[Array, ""],
) -> _Weighing:
    """The weighing of step number `step`, counted from 0."""
    correction = jnp.float32(1)
    if config.bias_correction is BiasCorrection.ADAM:
        correction = 1.0 / (1.0 - jnp.power(jnp.float32(config.beta), step + 1))
    scale = 1.0 / len(median) if config.step_scale is StepScale.RELEASED else 1.0
    return _Weighing(
        inverse_median=1.0 / (median + _MEDIAN_EPSILON),
        sharpness=jnp.where(in_burn_in, 0.0, 1.0 / temperature_of(config)) * correction,
        factor=jnp.where(in_burn_in, 1.0, scale),
    )


def _combined(
    config: TSageConfig,
    weighing: _Weighing,
    gradients: Sequence[Float[Array, "task ..."]],
    params: Sequence[Float[Array, "..."]],
    averages: Sequence[Sequence[Float[Array, "..."]]],
    *,
    salts: UInt32[Array, "leaf task"],
) -> tuple[list[Float[Array, "..."]], list[list[Float[Array, "..."]]]]:
    """Every parameter's combined gradient, and its new averages by task."""
    by_leaf = zip(gradients, params, zip(*averages, strict=True), salts, strict=True)
    results = [
        _of_leaf(config, weighing, of_tasks, param, old, salts=row)
        for of_tasks, param, old, row in by_leaf
    ]
    # Without the barrier, the last division would be repeated wherever the gradient is used, and
    # its numerators kept until then.
    combined = jax.lax.optimization_barrier([new for new, _ in results])
    return combined, [moved for _, moved in results]


def _of_leaf(
    config: TSageConfig,
    weighing: _Weighing,
    gradients: Float[Array, "task ..."],
    param: Float[Array, "..."],
    averages: Sequence[Float[Array, "..."]],
    *,
    salts: UInt32[Array, " task"],
) -> tuple[Float[Array, "..."], list[Float[Array, "..."]]]:
    """One parameter's combined gradient, and its new averages by task."""
    # Unrolled over tasks, this compiles to one loop that reads its inputs once.
    products = [gradients[t] * param for t in range(len(averages))]
    moved = _moved(config, averages, products, weighing.inverse_median)
    parts = _softmax_parts([weighing.sharpness * score for score in moved])
    weighted = sum(part * gradients[t] for t, part in enumerate(parts))
    if config.average_dtype is AverageDtype.BFLOAT16:
        moved = [
            round_at_random(score, noise(gradients[t], param, salts[t]))
            for t, score in enumerate(moved)
        ]
    return weighing.factor * weighted / functools.reduce(operator.add, parts), moved


def _moved(
    config: TSageConfig,
    averages: Sequence[Float[Array, "..."]],
    products: Sequence[Float[Array, "..."]],
    inverse_median: Float[Array, " task"],
) -> list[Float[Array, "..."]]:
    """Each task's new average, float32, from the old one and g·θ."""
    moved = []
    for t, average in enumerate(averages):
        new = jnp.minimum(jnp.abs(products[t]) * inverse_median[t], _LARGEST)
        moved.append(config.beta * average.astype(jnp.float32) + (1.0 - config.beta) * new)
    return moved


def _softmax_parts(scores: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
    """Numerators of a softmax; the largest is 1."""
    highest = functools.reduce(jnp.maximum, scores)
    return [jnp.exp(score - highest) for score in scores]


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
        products = [rows(gradient) * rows(param) for gradient in of_tasks]
        moved = _moved(config, [rows(average) for average in old], products, inverse_median)
        parts = _softmax_parts([sharpness * score for score in moved])
        whole = functools.reduce(operator.add, parts)
        weights = [part / whole for part in parts]
        spread = functools.reduce(operator.add, map(jax.scipy.special.entr, weights))
        size = jnp.full((1,), whole.size, jnp.float32)
        totals = totals + jnp.concatenate([sums([*weights, spread]), size])
    return totals
