"""The exact median of |gradient x parameter| over all parameters, without sorting or gathering.

The bit patterns of non-negative floats, read as integers, are ordered as the floats are. So the
median is an integer between 0 and the pattern of infinity, and "how many patterns lie below b?"
is a reduction over each parameter where it lives: sharded parameters add up their counts. One pass
over memory answers that for several values of b at once, for every task. Counts are integers, so
the answer does not depend on the order of addition and hence not on the number of devices. If
parameters' shardings are given, a pass takes one exchange or a few (`sum_over_devices`).
"""

from __future__ import annotations

import enum
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PyTree, UInt32

from taser_jax.devices.partitioning import parameter_path
from taser_jax.optim.task_gradients import Leaves, keep_trainable, sum_over_devices
from taser_jax.storage.errors import ConfigError

THRESHOLDS = 16
"""Counts per pass. More would narrow faster, but arithmetic would take longer than memory."""

ABOVE_INFINITY = 0x7F800001
"""Larger than the pattern of any number; only NaNs lie above."""

_INTERPOLATING_PASSES = 6
"""Later passes split the bracket into 17 even parts, for any distribution."""

_OCTAVE = 1 << 23
# Around a guess, in octaves; around an interpolated place, in standard errors.
_WARM = np.array([1 / 128, 1 / 32, 1 / 12, 1 / 5, 0.45, 1, 2.5, 8])
_NEAR = np.array([0.05, 0.2, 0.5, 1, 1.7, 3, 9])
_EVEN = THRESHOLDS - 2 * len(_NEAR)

Counts = Callable[[Int[Array, "row thresholds"]], UInt32[Array, "row thresholds"]]
"""How many of each row's integers lie below each of the row's thresholds."""


class _Bracket(NamedTuple):
    low: jax.Array
    high: jax.Array
    below_low: jax.Array
    below_high: jax.Array
    passes: jax.Array


def select(
    count_below: Counts,
    *,
    rank: UInt32[Array, " row"],
    size: UInt32[Array, " row"],
    guess: Int[Array, " row"],
) -> tuple[Int[Array, " row"], Int[Array, ""]]:
    """The integer with `rank` integers before it in sorted order, for each row.

    The bracket [low, high) always satisfies count_below(low) <= rank < count_below(high). The first
    pass has thresholds around the guess, the next ones around the place that linear interpolation
    gives, and from the seventh pass on they are evenly spaced, so that no distribution takes more
    than 15 passes.

    Args:
        count_below: one pass.
        rank: below `size`.
        size: how many integers there are, NaNs' patterns not counted.
        guess: the integers that are expected; 0 is no guess.

    Returns:
        The integers, and the number of passes.
    """
    first = _around_guess(guess)

    def is_open(bracket: _Bracket) -> jax.Array:
        return jnp.any(bracket.high - bracket.low > 1)

    def narrow(bracket: _Bracket) -> _Bracket:
        later = jnp.where(
            bracket.passes < _INTERPOLATING_PASSES,
            _interpolated(bracket, rank),
            _evenly(bracket, THRESHOLDS),
        )
        thresholds = jnp.where(bracket.passes == 0, first, later)
        every = bracket.low[:, None] + 1 + np.arange(THRESHOLDS, dtype=np.int32)
        is_short = bracket.high - bracket.low <= THRESHOLDS + 1
        thresholds = jnp.where(is_short[:, None], every, thresholds)
        thresholds = jnp.clip(thresholds, bracket.low[:, None] + 1, bracket.high[:, None] - 1)
        # A row that is done has thresholds at its answer, which change nothing.
        thresholds = jnp.maximum(thresholds, bracket.low[:, None])
        counts = count_below(thresholds)
        not_above = counts <= rank[:, None]

        def highest(array: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.maximum(old, jnp.max(jnp.where(not_above, array, 0), axis=1))

        def lowest(array: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.minimum(old, jnp.min(jnp.where(not_above, old[:, None], array), axis=1))

        return _Bracket(
            low=highest(thresholds, bracket.low),
            high=lowest(thresholds, bracket.high),
            below_low=highest(counts, bracket.below_low),
            below_high=lowest(counts, bracket.below_high),
            passes=bracket.passes + 1,
        )

    end = jax.lax.while_loop(is_open, narrow, _everything(size))
    return end.low, end.passes


def _around_guess(guess: Int[Array, " row"]) -> Int[Array, "row thresholds"]:
    """Thresholds of the first pass: around the guess, or evenly spaced if it is 0."""
    offsets = np.concatenate([-_WARM[::-1], _WARM]) * _OCTAVE
    # The sum may leave int32: as float it saturates, and a threshold need not be exact.
    near = _to_int(guess.astype(jnp.float32)[:, None] + offsets.astype(np.float32))
    everywhere = _evenly(_everything(jnp.zeros_like(guess, jnp.uint32)), THRESHOLDS)
    return jnp.where((guess > 0)[:, None], near, everywhere)


def _everything(size: jax.Array) -> _Bracket:
    nothing = jnp.zeros(len(size), jnp.int32)
    return _Bracket(
        low=nothing,
        high=jnp.full_like(nothing, ABOVE_INFINITY),
        below_low=jnp.zeros_like(size),
        below_high=size,
        passes=jnp.int32(0),
    )


def _interpolated(bracket: _Bracket, rank: jax.Array) -> jax.Array:
    """Some evenly spaced thresholds, and some around the place that interpolation gives."""
    width = (bracket.high - bracket.low).astype(jnp.float32)
    inside = jnp.maximum(bracket.below_high - bracket.below_low, 1).astype(jnp.float32)
    share = ((rank - bracket.below_low).astype(jnp.float32) + 0.5) / inside
    place = bracket.low + _to_int(width * share)
    # Half the root of the count is the standard error of the rank; a density that changes over an
    # octave bends the interpolation.
    error = jnp.maximum(width * (0.5 / jnp.sqrt(inside) + width / (8 * _OCTAVE)), 1.0)
    offsets = np.concatenate([-_NEAR[::-1], _NEAR]).astype(np.float32)
    steps = error[:, None] * offsets
    steps = _to_int(jnp.where(steps > 0, jnp.ceil(steps), jnp.floor(steps)))
    steps = jnp.clip(steps, (bracket.low - place)[:, None], (bracket.high - place)[:, None])
    near = place[:, None] + steps
    return jnp.concatenate([_evenly(bracket, _EVEN), near], axis=1)


def _evenly(bracket: _Bracket, number: int) -> jax.Array:
    part = (bracket.high - bracket.low) // (number + 1)
    return bracket.low[:, None] + part[:, None] * np.arange(1, number + 1, dtype=np.int32)


def _to_int(values: jax.Array) -> jax.Array:
    return jnp.clip(values, 128 - 2.0**31, 2.0**31 - 128).astype(jnp.int32)


_MAGNITUDE = 0x7FFFFFFF


class MedianOver(enum.Enum):
    """The entries that the median is taken over: all (the paper), or those that are not zero."""

    ALL = "all"
    NONZERO = "nonzero"


class Median(NamedTuple):
    """Medians of all tasks.

    Attributes:
        value: the lower medians.
        bits: their bit patterns; the next step's guess.
        passes: number of passes over all entries.
    """

    value: Float[Array, " task"]
    bits: Int[Array, " task"]
    passes: Int[Array, ""]


def lower_median(
    values: Sequence[Float[Array, "task ..."]],
    *,
    factors: Sequence[Float[Array, "..."]] | None = None,
    guess: Int[Array, " task"] | None = None,
    over: MedianOver = MedianOver.ALL,
    shardings: Sequence[NamedSharding] | None = None,
) -> Median:
    """The lower median of |values| (or |values·factors|) of each task, over all arrays together.

    Of n entries it is entry (n − 1) // 2 of the sorted ones, as in `torch.median`, bit for bit.
    A bracket around it is narrowed pass by pass (`select`). The first pass searches
    around the guess, best the previous step's median. Smooth distributions take four to six passes,
    none more than 15. Every pass recomputes the products, which saves memory.

    Example:
        4, 0, −1, 9 -> 1 (the lower of the middle two of 0, 1, 4, 9); over nonzero entries -> 4.

    Args:
        values: arrays with a leading task axis.
        factors: arrays without the task axis, multiplied in.
        guess: bit patterns to search around; 0 means no guess, and None means 0 for every task.
        over: which entries count. The median of a task without any is 0.
        shardings: shardings of the arrays without their task axis, which is not split; on one mesh.

    Returns:
        Medians, 0 or above. The median of a task with a NaN is meaningless.

    Raises:
        ConfigError: no entries, or more than 2³² − 1 per task.
    """
    entries = sum(int(np.prod(leaf.shape[1:])) for leaf in values)
    if not 0 < entries < 2**32:
        problem = f"{entries} trainable parameters: T-SAGE takes 1 to 4,294,967,295"
        raise ConfigError(problem, where="OptimizerConfig.updates", fix="train fewer, or one")
    num_tasks = len(values[0])
    plain = () if factors is None else (tuple(factors),)

    def count_below(thresholds: jax.Array) -> jax.Array:
        # Tied to the loop's state, or the compiler would compute all products once and keep them.
        leaves, others, limits = jax.lax.optimization_barrier((tuple(values), plain, thresholds))
        return sum_over_devices(
            _counts, stacked=(leaves,), plain=others, shared=(limits,), shardings=shardings
        )

    size = jnp.full((num_tasks,), entries, jnp.uint32)
    zeros = jnp.zeros((num_tasks,), jnp.uint32)
    if over is MedianOver.NONZERO:
        zeros = count_below(jnp.ones((num_tasks, 1), jnp.int32))[:, 0]
    nonzero = size - zeros
    rank = jnp.where(nonzero > 0, zeros + (jnp.maximum(nonzero, 1) - 1) // 2, 0)
    guess = jnp.zeros((num_tasks,), jnp.int32) if guess is None else guess & _MAGNITUDE
    bits, passes = select(count_below, rank=rank, size=size, guess=guess)
    return Median(jax.lax.bitcast_convert_type(bits, jnp.float32), bits, passes)


def _counts(
    values: Leaves, factors: Leaves, thresholds: jax.Array
) -> UInt32[Array, "task thresholds"]:
    """Counts over all arrays together."""
    (products,) = values
    for leaves in factors:
        products = [leaf * factor for leaf, factor in zip(products, leaves, strict=True)]
    counts = [_count_below(_bits(product), thresholds) for product in products]
    columns = zip(*counts, strict=True)
    return jnp.stack([functools.reduce(operator.add, column) for column in columns], axis=1)


def _bits(values: Float[Array, "task ..."]) -> Int[Array, "task ..."]:
    """Bit patterns without the sign; ordered as magnitudes are, denormals included."""
    patterns = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    return patterns & _MAGNITUDE


def _count_below(
    bits: Int[Array, "task *shape"], thresholds: Int[Array, "task thresholds"]
) -> Sequence[UInt32[Array, " task"]]:
    """How many of each task's patterns lie below each threshold, one threshold after another."""
    axes = tuple(range(1, bits.ndim))
    per_threshold = jnp.expand_dims(thresholds.T, tuple(axis + 1 for axis in axes))
    is_below = tuple((bits < limit).astype(jnp.uint32) for limit in per_threshold)
    # One reduction with many results reads memory once. Sums of their own would read it each time.
    return jax.lax.reduce(
        is_below,
        (np.uint32(0),) * len(is_below),
        lambda left, right: tuple(a + b for a, b in zip(left, right, strict=True)),
        axes,
    )


_TOKEN_TABLE = re.compile(r"(?:.*/)?(?:embeddings/token|token_embedder)/embedding")


def check_median(
    params: PyTree, *, tokens: Mapping[str, int], trainable: PyTree[bool] | None = None
) -> None:
    """Rejects batches so small that the median over all parameters would always be 0.

    A batch of n tokens touches at most n rows of the token table, so at least (V − n)·d of the P
    trained parameters have no gradient; where that is more than half of them the lower median is 0.

    Example:
        Two blocks of MiniLM: V = 30,522, d = 384, P = 15.5 million. 1,280 tokens leave 11.2
        million parameters without a gradient.

    Args:
        params: parameters, arrays or abstract.
        tokens: task -> tokens in a batch of it, padding included.
        trainable: tree of bool shaped as the parameters; None trains all.

    Raises:
        ConfigError: naming the first such task.
    """
    trained = keep_trainable(params, trainable)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    total = sum(leaf.size for _, leaf in leaves)
    tables = [leaf for path, leaf in leaves if _TOKEN_TABLE.fullmatch(parameter_path(path))]
    for task, number in tokens.items():
        # One more row is that of a T5 decoder's start token.
        untouched = sum(max(leaf.shape[0] - number - 1, 0) * leaf.shape[1] for leaf in tables)
        if untouched > (total - 1) // 2:
            raise ConfigError(
                f"{untouched:,} of {total:,} parameters have no gradient in any batch of {task}, "
                f"which has {number:,} tokens at most: T-SAGE cannot divide by their median of 0",
                where="TSageConfig.median_over = 'all'",
                fix="set it to 'nonzero', raise TaskBatchingConfig.total, or freeze the tokens",
            )
