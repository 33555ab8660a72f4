"""Selects the integer of a given rank by counting how many lie below thresholds.

The integers are bit patterns of non-negative floats, from 0 to infinity's, and are ordered like the
floats. One pass over them answers "how many lie below b?" for `THRESHOLDS` values of b, which
narrows a bracket around the wanted integer. The caller holds and counts the integers; this module
only chooses thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

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
