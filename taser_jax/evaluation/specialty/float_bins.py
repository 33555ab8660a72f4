"""Log-spaced bins of non-negative numbers, found from the bits alone, and densities from them.

The leading bits of a float's pattern are its exponent and the first digits of its mantissa. Cut
after `_DIGITS` digits, they number bins, 2**_DIGITS per octave, whose edges are exact floats: a
number falls into the same bin on every device, and no logarithm is taken.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_DIGITS = 4
_MANTISSA = 23
_BIAS = 127
_FIRST_OCTAVE, _LAST_OCTAVE = -20, 20

NUM_BINS = ((_LAST_OCTAVE - _FIRST_OCTAVE) << _DIGITS) + 2
"""The first bin is of what lies below 2**-20, zero included; the last of 2**20 and above."""


# In float64: narrow bins are differences of nearly equal values.
_erf = np.vectorize(math.erf, otypes=[np.float64])


def bin_of(values: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Numbers of the bins that non-negative values fall into.

    Example:
        1 is the low edge of bin 321: one bin of small values, then 20 octaves of 16.

    Args:
        values: float32, 0 or more; not NaN.

    Returns:
        0 .. NUM_BINS - 1.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    first = (_FIRST_OCTAVE + _BIAS) << _DIGITS
    return jnp.clip((bits >> (_MANTISSA - _DIGITS)) - first + 1, 0, NUM_BINS - 1)


def bin_edges() -> Float[np.ndarray, " edges"]:
    """Edges of all bins, [NUM_BINS + 1] float64: 0, 2**-20, ..., 2**20, infinity."""
    octaves = np.arange(_FIRST_OCTAVE, _LAST_OCTAVE, dtype=np.float64)
    digits = np.arange(1 << _DIGITS) / (1 << _DIGITS)
    inner = np.outer(2.0**octaves, 1.0 + digits).reshape(-1)
    return np.concatenate([[0.0], inner, [2.0**_LAST_OCTAVE, np.inf]])


def share_below(counts: Int[np.ndarray, " bins"], value: float) -> float:
    """Share of the entries below a value; exact at an edge, as if evenly spread inside a bin."""
    edges = bin_edges()[:-1]
    cumulated = np.concatenate([[0], np.cumsum(counts[:-1])])
    return float(np.interp(value, edges, cumulated) / counts.sum())


def quantile(counts: Int[np.ndarray, " bins"], share: float) -> float:
    """The value below which a share of the entries lies, to the width of a bin.

    Inside a bin entries count as evenly spread; in the last one, as on its low edge.
    """
    edges = bin_edges()
    below = np.concatenate([[0], np.cumsum(counts)])
    wanted = share * below[-1]
    place = min(int(np.searchsorted(below, wanted, side="left")), NUM_BINS) - 1
    place = max(place, 0)
    low, high = edges[place], edges[place + 1]
    if not np.isfinite(high) or counts[place] == 0:
        return float(low)
    return float(low + (high - low) * (wanted - below[place]) / counts[place])


def kernel_density(
    counts: Int[np.ndarray, " bins"], at: Float[np.ndarray, " points"], *, bandwidth: float
) -> Float[np.ndarray, " points"]:
    """Gaussian kernel density of the entries, on a linear axis that starts at 0.

    density(x) = Σ_b (c_b/n)/(h_b − l_b) · [Φ((x − l_b)/w) − Φ((x − h_b)/w)], the density that is
    even inside each bin [l_b, h_b), smoothed; what a kernel puts below 0 is mirrored at 0. It
    integrates to the share of entries below the last bin.

    Args:
        counts: of the bins.
        at: where; 0 or more.
        bandwidth: w, the kernel's standard deviation.
    """
    edges = bin_edges()[:-1]
    heights = counts[:-1] / counts.sum() / np.diff(edges)
    # Mirroring the evaluation points is mirroring the entries.
    places = (np.stack([at, -at])[:, :, None] - edges) / (bandwidth * math.sqrt(2))
    steps = 0.5 * _erf(places)
    return ((steps[..., :-1] - steps[..., 1:]) @ heights).sum(0)
