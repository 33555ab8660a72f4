"""The exact median of |gradient x parameter| over all parameters, without sorting or gathering.

The bit patterns of non-negative floats, read as integers, are ordered as the floats are. So the
median is an integer between 0 and the pattern of infinity, and "how many patterns lie below b?"
is a reduction over each parameter where it lives: sharded parameters add up their counts. One pass
over memory answers that for several values of b at once, for every task. Counts are integers, so
the answer does not depend on the order of addition and hence not on the number of devices. Where
it is told how parameters are sharded, a pass has one exchange, or few (`over_devices`).

Large models are sampled first: the same search in one of 64 entries says where to look, costs
little, and spares one or two of the passes over all entries.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from taser_jax.errors import ConfigError
from taser_jax.optim.over_devices import Leaves, joined, total
from taser_jax.optim.sampling import LANES, sample, sample_share
from taser_jax.optim.selection import ABOVE_INFINITY, around_guess, around_sample, select

_MAGNITUDE = 0x7FFFFFFF


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
        passes: passes over all entries that it took; those over a sample do not count.
    """

    value: Float[Array, " task"]
    bits: Int[Array, " task"]
    passes: Int[Array, ""]


_CountBelow = Callable[..., jax.Array]
"""(thresholds [task, any], is_negative=None) -> counts."""


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
    A bracket around it is narrowed pass by pass (`selection.select`). The first pass looks around a
    sample's median, or around the guess where entries are too few for a sample; a good guess is
    what the median was a step ago. Smooth distributions take three to five passes with a sample and
    four to six without, none more than 15. Products are taken again in every pass: that costs no
    memory. With signs, one or two passes more count what is negative; then the magnitudes of the
    median's side are searched.

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
    plain = () if factors is None else (tuple(factors),)

    def count_below(thresholds: jax.Array, is_negative: jax.Array | None = None) -> jax.Array:
        # Tied to the loop's state, or the compiler would compute all products once and keep them.
        leaves, others, limits = jax.lax.optimization_barrier((tuple(values), plain, thresholds))
        shared = (limits, is_negative)
        return total(_counts, stacked=(leaves,), plain=others, shared=shared, shardings=shardings)

    search = _Search(
        count_below=count_below,
        count_in_sample=_sample_counter(values, plain, shardings),
        guess=jnp.zeros((num_tasks,), jnp.int32) if guess is None else guess & _MAGNITUDE,
    )
    size = jnp.full((num_tasks,), entries, jnp.uint32)
    zeros = jnp.zeros((num_tasks,), jnp.uint32)
    if of is MedianOf.SIGNED:
        return _signed(search, size=size, over=over)
    if over is MedianOver.NONZERO:
        zeros = count_below(jnp.ones((num_tasks, 1), jnp.int32))[:, 0]
    nonzero = size - zeros
    rank = jnp.where(nonzero > 0, zeros + (jnp.maximum(nonzero, 1) - 1) // 2, 0)
    bits, passes = search(rank=rank, size=size)
    return Median(_to_float(bits), bits, passes)


class _Search(NamedTuple):
    """How to find the pattern of a rank: in a sample first, where there is one."""

    count_below: _CountBelow
    count_in_sample: _CountBelow | None
    guess: jax.Array

    def __call__(
        self, *, rank: jax.Array, size: jax.Array, is_negative: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Patterns and passes; with `is_negative` among each task's side of 0."""
        first = around_guess(self.guess)
        if self.count_in_sample is not None:
            first = around_sample(
                functools.partial(self.count_in_sample, is_negative=is_negative),
                rank=rank,
                size=size,
                guess=self.guess,
            )
        count_below = functools.partial(self.count_below, is_negative=is_negative)
        return select(count_below, rank=rank, size=size, first=first)


def _sample_counter(
    values: Sequence[jax.Array], plain: Leaves, shardings: Sequence[NamedSharding] | None
) -> _CountBelow | None:
    share, num_tasks = sample_share(values), len(values[0])
    if share == 1:
        return None

    def sampled(values: Leaves, factors: Leaves) -> jax.Array:
        (products,) = (sample(leaves, share=share) for leaves in values)
        for leaves in factors:
            others = sample([leaf[None] for leaf in leaves], share=share)
            products = [leaf * other for leaf, other in zip(products, others, strict=True)]
        # A device may hold small parameters only.
        nothing = jnp.zeros((num_tasks, 0, LANES))
        return jnp.concatenate([nothing, *products], axis=1)

    part = joined(sampled, stacked=(values,), plain=plain, shardings=shardings)

    def count_below(thresholds: jax.Array, is_negative: jax.Array | None = None) -> jax.Array:
        shared = (thresholds, is_negative)
        return total(_counts, stacked=(part.arrays,), shared=shared, shardings=part.shardings)

    return count_below


def _counts(
    values: Leaves, factors: Leaves, thresholds: jax.Array, is_negative: jax.Array | None
) -> UInt32[Array, "task thresholds"]:
    """Of all arrays together."""
    (products,) = values
    for leaves in factors:
        products = [leaf * factor for leaf, factor in zip(products, leaves, strict=True)]
    counts = [_count_below(_bits(product, is_negative), thresholds) for product in products]
    columns = zip(*counts, strict=True)
    return jnp.stack([functools.reduce(operator.add, column) for column in columns], axis=1)


def _signed(search: _Search, *, size: jax.Array, over: MedianOver) -> Median:
    """Which side of 0 the median is on, then the one of that rank among its side's magnitudes."""
    ones = jnp.ones((len(size), 1), jnp.int32)
    ends = jnp.concatenate([ones, ones * ABOVE_INFINITY], axis=1)
    below_zero = jnp.ones((len(size),), bool)
    zeros, on_side = search.count_below(ends, below_zero).T
    sides = jnp.stack([on_side, size - on_side])
    counted, passes = sides, 1
    if over is MedianOver.NONZERO:
        counted = sides - jnp.stack([zeros, search.count_below(ones, ~below_zero)[:, 0]])
        passes = 2
    negative, number = counted[0], counted[0] + counted[1]
    rank = (jnp.maximum(number, 1) - 1) // 2
    is_negative = rank < negative
    # Magnitudes of negative values are in the opposite order, behind the zeros that do not count.
    place = jnp.where(is_negative, negative - 1 - rank, rank - negative)
    side, kept = (jnp.where(is_negative, pair[0], pair[1]) for pair in (sides, counted))
    rank = jnp.where(number > 0, side - kept + place, 0)
    bits, taken = search(rank=rank, size=side, is_negative=is_negative)
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
