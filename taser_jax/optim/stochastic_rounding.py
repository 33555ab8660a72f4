"""Stochastic rounding to bfloat16, which keeps changes below half a bit on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, UInt32


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
