"""A fixed sample of parameters' entries, to look at before, or instead of, all of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SHARE = 64
"""One of so many entries is in a sample."""

_WHOLE = 1 << 20
"""Models of fewer entries are not sampled: all of them cost as little."""

# Tiles in which accelerators keep the last two axes: less of one costs no less.
_ROWS = 8
LANES = 128
_STRETCH = 1024
"""Rows of a long array that one run of neighbours is to stand for."""

_SMALLEST = SHARE * LANES
"""Parameters of fewer entries are left out: they are many, and few of a model's entries."""


def sample_share(leaves: Sequence[Float[Array, "task ..."]]) -> int:
    """`SHARE`, or 1 where the parameters are so few that a sample would save nothing."""
    entries = sum(int(np.prod(leaf.shape[1:])) for leaf in leaves)
    return SHARE if entries >= _WHOLE else 1


def sample(
    leaves: Sequence[Float[Array, "task ..."]], *, share: int, most: int | None = None
) -> list[Float[Array, "task ..."]]:
    """About one of `share` entries of each large array, always the same ones.

    They are 128 columns of some neighbouring rows (places on an array's first axis, or on all but
    its last): of others in the next array, and of several runs of rows in a long one. Arrays of the
    same shapes give the same entries, whatever they hold.

    Example:
        Of one [2, 1024, 256] array with share 64: columns 0 to 127 of rows 0 to 31, a [2, 32, 128]
        array. The next one of that shape gives columns 128 to 255 of rows 40 to 71.

    Args:
        leaves: arrays with a leading task axis, or with any other that is kept.
        share: how many entries one stands for; 1 takes all arrays as they are.
        most: of so many arrays at most, at regular distances in the list; None is all.

    Returns:
        [task, rows, 128] an array, or the arrays.
    """
    if share == 1:
        return list(leaves)
    large = [leaf for leaf in leaves if leaf.size >= len(leaf) * _SMALLEST]
    if most is not None:
        large = large[:: -(-len(large) // most) or 1]
    return [_tiles(leaf, share, place) for place, leaf in enumerate(large)]


def _tiles(
    leaf: Float[Array, "task ..."], share: int, place: int
) -> Float[Array, "task rows lanes"]:
    columns = leaf.shape[-1]
    entries = leaf.size // len(leaf)
    wanted = entries // share
    if columns < LANES:
        row = entries // leaf.shape[1]
        flat = jnp.concatenate(_runs(leaf, max(wanted // row, 1), place), axis=1)
        flat = flat.reshape(len(leaf), -1)
        rows = flat.shape[1] // LANES
        return flat[:, : rows * LANES].reshape(len(leaf), rows, LANES)
    leaf = leaf.reshape(len(leaf), -1, columns)
    start = place % (columns // LANES) * LANES
    column = leaf[:, :, start : start + LANES]
    return jnp.concatenate(_runs(column, wanted // LANES, place), axis=1)


def _runs(leaf: Float[Array, "task rows ..."], rows: int, place: int) -> list[Array]:
    """Slices of about so many rows together; of long arrays at regular distances."""
    length = leaf.shape[1]
    number = max(length // _STRETCH, 1)
    stretch = length // number
    kept = min(max(round(rows / number / _ROWS), 1) * _ROWS, stretch)
    first = place * 5 * _ROWS % (stretch - kept + 1) // _ROWS * _ROWS
    starts = range(first, number * stretch, stretch)
    return [leaf[:, start : start + kept] for start in starts]
