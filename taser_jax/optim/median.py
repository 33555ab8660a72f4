"""The exact median of |gradient x parameter| over all parameters, without sorting or gathering.

The bit patterns of non-negative floats, read as integers, are ordered as the floats are. So the
median is an integer between 0 and the pattern of infinity, and "how many patterns lie below b?"
is a reduction over each parameter where it lives: sharded parameters add up their counts. One pass
over memory answers that for several values of b at once, for every task. Counts are integers, so
the answer does not depend on the order of addition and hence not on the number of devices. If
parameters' shardings are given, a pass takes one exchange or a few (`over_devices`).
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, UInt32

from taser_jax.optim.over_devices import Leaves, total
from taser_jax.optim.selection import select
from taser_jax.storage.errors import ConfigError

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
    A bracket around it is narrowed pass by pass (`selection.select`). The first pass searches
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
        raise ConfigError(
            f"{entries} trainable parameters",
            where="median of sensitivities",
            expected="1 to 4,294,967,295",
            fix="train at least one parameter, and fewer than four billion",
        )
    num_tasks = len(values[0])
    plain = () if factors is None else (tuple(factors),)

    def count_below(thresholds: jax.Array) -> jax.Array:
        # Tied to the loop's state, or the compiler would compute all products once and keep them.
        leaves, others, limits = jax.lax.optimization_barrier((tuple(values), plain, thresholds))
        return total(
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
