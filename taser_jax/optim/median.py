"""The exact median of |gradient x parameter| over all parameters, without sorting or gathering.

The bit patterns of non-negative floats, read as integers, are ordered as the floats are. So the
median is an integer between 0 and the pattern of infinity, and "how many patterns lie below b?"
is a reduction over each parameter where it lives: sharded parameters add up their counts. One pass
over memory answers that for `THRESHOLDS` values of b at once, for every task. Counts are integers,
so the answer does not depend on the order of addition and hence not on the number of devices. Where
it is told how parameters are sharded, a pass has one exchange, or few (`over_devices`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from taser_jax.errors import ConfigError
from taser_jax.optim.over_devices import total

THRESHOLDS = 16
"""Counts a pass takes. More would narrow faster, but compute would cost more than memory."""

_INTERPOLATING_PASSES = 6
"""After so many, passes split the bracket evenly: 17-fold each, whatever the distribution."""

_ABOVE_INFINITY = 0x7F800001
_MAGNITUDE = 0x7FFFFFFF
_OCTAVE = 1 << 23
# Around the last step's median, in octaves, and around an interpolated one, in standard errors.
_WARM = np.array([1 / 128, 1 / 32, 1 / 12, 1 / 5, 0.45, 1, 2.5, 8])
_NEAR = np.array([0.05, 0.2, 0.5, 1, 1.7, 3, 9])
_EVEN = THRESHOLDS - 2 * len(_NEAR)


class MedianOver(enum.Enum):
    """Which entries count: all of them (the paper), or those that are not zero."""

    ALL = "all"
    NONZERO = "nonzero"


class MedianOf(enum.Enum):
    """What is ordered: magnitudes, or the values with their signs."""

    MAGNITUDES = "magnitudes"
    SIGNED = "signed"


class Median(NamedTuple):
    """Medians of all tasks.

    Attributes:
        value: the lower medians.
        bits: their bit patterns; the next step's guess.
        passes: passes over memory it took.
    """

    value: Float[Array, " task"]
    bits: Int[Array, " task"]
    passes: Int[Array, ""]


class _Bracket(NamedTuple):
    low: jax.Array
    high: jax.Array
    below_low: jax.Array
    below_high: jax.Array
    passes: jax.Array


def lower_median(
    values: Sequence[Float[Array, "task ..."]],
    *,
    factors: Sequence[Float[Array, "..."]] | None = None,
    guess: Int[Array, " task"] | None = None,
    over: MedianOver = MedianOver.ALL,
    of: MedianOf = MedianOf.MAGNITUDES,
    shardings: Sequence[NamedSharding] | None = None,
) -> Median:
    """The lower median of |values| (or |values·factors|) of each task, over all arrays together.

    Of n entries it is entry (n − 1) // 2 of the sorted ones, as in `torch.median`, bit for bit.
    A bracket around it is narrowed pass by pass: the first pass looks around the guess (a good one
    is what the median was a step ago), later ones around the place where a locally even
    distribution would have it, and from the seventh on at evenly spaced places, so that no
    distribution takes more than 15. Smooth ones take four to six. Products are taken again in every
    pass: that costs no memory. With signs, one or two passes more count what is negative; then the
    magnitudes of the median's side are searched.

    Example:
        4, 0, −1, 9 -> 1 (the lower of the middle two of 0, 1, 4, 9); over what is not zero -> 4;
        signed -> 0 (of −1, 0, 4, 9), and over what is not zero -> 4.

    Args:
        values: arrays with a leading task axis.
        factors: arrays without it, multiplied in.
        guess: bit patterns to look around; 0 has no guess. None is all 0.
        over: which entries count. A task without any has median 0.
        of: magnitudes or signed values.
        shardings: of the arrays without their task axis, which no device splits; on one mesh.

    Returns:
        Medians; of magnitudes, 0 or above. Where a task has a NaN its median means nothing.

    Raises:
        ConfigError: no entries, or more than 2³² − 1 a task.
    """
    entries = sum(int(np.prod(leaf.shape[1:])) for leaf in values)
    if not 0 < entries < 2**32:
        raise ConfigError(
            f"{entries} trainable parameters",
            where="median of sensitivities",
            expected="1 to 4,294,967,295",
            fix="train at least one parameter, and fewer than four billion",
        )
    num_tasks = len(values[0])
    guess = jnp.zeros((num_tasks,), jnp.int32) if guess is None else guess

    def count_below(thresholds: jax.Array, is_negative: jax.Array | None = None) -> jax.Array:
        # Tied to the loop's state, or the compiler would compute all products once and keep them.
        stacked, plain, limits = jax.lax.optimization_barrier(
            ((tuple(values),), () if factors is None else (tuple(factors),), thresholds)
        )
        shared = (limits, is_negative)
        return total(_counts, stacked=stacked, plain=plain, shared=shared, shardings=shardings)

    size = jnp.full((num_tasks,), entries, jnp.uint32)
    zeros = jnp.zeros((num_tasks,), jnp.uint32)
    if of is MedianOf.SIGNED:
        return _signed(count_below, size=size, guess=guess, over=over)
    if over is MedianOver.NONZERO:
        zeros = count_below(jnp.ones((num_tasks, 1), jnp.int32))[:, 0]
    nonzero = size - zeros
    rank = jnp.where(nonzero > 0, zeros + (jnp.maximum(nonzero, 1) - 1) // 2, 0)
    bits, passes = _select(count_below, rank=rank, size=size, guess=guess)
    return Median(_to_float(bits), bits, passes)


def _counts(
    values: tuple[Sequence[jax.Array], ...],
    factors: tuple[Sequence[jax.Array], ...],
    thresholds: jax.Array,
    is_negative: jax.Array | None,
) -> list[jax.Array]:
    """Each array's counts, [task, thresholds]."""
    (leaves,) = values
    if factors:
        leaves = [leaf * factor for leaf, factor in zip(leaves, *factors, strict=True)]
    return [_count_below(_bits(leaf, is_negative), thresholds) for leaf in leaves]


def _signed(
    count_below: Callable[..., jax.Array], *, size: jax.Array, guess: jax.Array, over: MedianOver
) -> Median:
    """Which side of 0 the median is on, then the one of that rank among its side's magnitudes."""
    ones = jnp.ones((len(size), 1), jnp.int32)
    ends = jnp.concatenate([ones, ones * _ABOVE_INFINITY], axis=1)
    below_zero = jnp.ones((len(size),), bool)
    zeros, on_side = count_below(ends, below_zero).T
    sides = jnp.stack([on_side, size - on_side])
    counted, passes = sides, 1
    if over is MedianOver.NONZERO:
        counted = sides - jnp.stack([zeros, count_below(ones, ~below_zero)[:, 0]])
        passes = 2
    negative, number = counted[0], counted[0] + counted[1]
    rank = (jnp.maximum(number, 1) - 1) // 2
    is_negative = rank < negative
    # Magnitudes of negative values are in the opposite order, behind the zeros that do not count.
    place = jnp.where(is_negative, negative - 1 - rank, rank - negative)
    side, kept = (jnp.where(is_negative, pair[0], pair[1]) for pair in (sides, counted))
    bits, taken = _select(
        lambda thresholds: count_below(thresholds, is_negative),
        rank=jnp.where(number > 0, side - kept + place, 0),
        size=side,
        guess=guess & _MAGNITUDE,
    )
    bits = jnp.where(number > 0, jnp.where(is_negative, bits | ~_MAGNITUDE, bits), 0)
    return Median(_to_float(bits), bits, taken + passes)


def _to_float(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(
    values: Float[Array, "task ..."], is_negative: Bool[Array, " task"] | None = None
) -> Int[Array, "task ..."]:
    """Bit patterns without the sign; ordered as magnitudes are, denormals included.

    With `is_negative`, values of the other side than each task's are above all others.
    """
    patterns = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    magnitudes = patterns & _MAGNITUDE
    if is_negative is None:
        return magnitudes
    wanted = is_negative.reshape(-1, *(1,) * (values.ndim - 1))
    return jnp.where((patterns < 0) == wanted, magnitudes, _MAGNITUDE)


def _count_below(
    bits: Int[Array, "task *shape"], thresholds: Int[Array, "task thresholds"]
) -> UInt32[Array, "task thresholds"]:
    """How many of each task's patterns lie below each threshold."""
    axes = tuple(range(1, bits.ndim))
    per_threshold = jnp.expand_dims(thresholds.T, tuple(axis + 1 for axis in axes))
    is_below = tuple((bits < limit).astype(jnp.uint32) for limit in per_threshold)
    # One reduction with many results reads memory once. Sums of their own would read it each time.
    counts = jax.lax.reduce(
        is_below,
        (np.uint32(0),) * len(is_below),
        lambda left, right: tuple(a + b for a, b in zip(left, right, strict=True)),
        axes,
    )
    return jnp.stack(counts, axis=1)


def _select(
    count_below: Callable[[jax.Array], jax.Array],
    *,
    rank: jax.Array,
    size: jax.Array,
    guess: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The pattern with `rank` patterns before it in sorted order, and the passes taken.

    Throughout, count_below(low) <= rank < count_below(high): the pattern is in [low, high).
    """

    def is_open(bracket: _Bracket) -> jax.Array:
        return jnp.any(bracket.high - bracket.low > 1)

    def narrow(bracket: _Bracket) -> _Bracket:
        first = jnp.where((guess > 0)[:, None], _around_guess(guess), _evenly(bracket, THRESHOLDS))
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
        # A task that is done has thresholds at its answer, which change nothing.
        thresholds = jnp.maximum(thresholds, bracket.low[:, None])
        counts = count_below(thresholds)
        not_above = counts <= rank[:, None]

        def highest(array: jax.Array, kept: jax.Array) -> jax.Array:
            return jnp.maximum(kept, jnp.max(jnp.where(not_above, array, 0), axis=1))

        def lowest(array: jax.Array, kept: jax.Array) -> jax.Array:
            return jnp.minimum(kept, jnp.min(jnp.where(not_above, kept[:, None], array), axis=1))

        return _Bracket(
            low=highest(thresholds, bracket.low),
            high=lowest(thresholds, bracket.high),
            below_low=highest(counts, bracket.below_low),
            below_high=lowest(counts, bracket.below_high),
            passes=bracket.passes + 1,
        )

    start = _Bracket(
        low=jnp.zeros_like(guess),
        high=jnp.full_like(guess, _ABOVE_INFINITY),
        below_low=jnp.zeros_like(size),
        below_high=size,
        passes=jnp.int32(0),
    )
    end = jax.lax.while_loop(is_open, narrow, start)
    return end.low, end.passes


def _around_guess(guess: jax.Array) -> jax.Array:
    offsets = np.concatenate([-_WARM[::-1], _WARM]) * _OCTAVE
    # The sum may leave int32: as float it saturates, and a threshold need not be exact.
    return _to_int(guess.astype(jnp.float32)[:, None] + offsets.astype(np.float32))


def _interpolated(bracket: _Bracket, rank: jax.Array) -> jax.Array:
    """Evenly spaced ones and some where a locally even distribution has the rank."""
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
