"""Dropout whose mask is hashed from positions: nothing to draw, store or gather."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from taser_jax.errors import ConfigError

_WORDS = 2


class Dropout(nn.Module):
    """y = x / (1 − rate) where an entry is kept, and 0 where it is not.

    As `flax.linen.Dropout`, with the same random stream, "dropout", one key a call. Only this key
    is random bits from a counter-based generator: masks of whole activations from it cost a TPU
    more than what they mask, and its compiler minutes.

    Attributes:
        rate: share of the entries that are dropped; 0 drops none and draws nothing.
        deterministic: True where nothing is dropped.
    """

    rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Drops, in training."""
        if not 0 <= self.rate < 1:
            raise ConfigError(f"rate {self.rate}", where="dropout", expected="0 <= rate < 1")
        if self.deterministic or self.rate == 0:
            return x
        words = jax.random.key_data(self.make_rng("dropout"))
        return drop(x, words.ravel()[:_WORDS], rate=self.rate)


def drop(
    x: Float[Array, "*shape"], salt: UInt32[Array, " words"], *, rate: float
) -> Float[Array, "*shape"]:
    """x·mask / (1 − rate); the backward pass hashes the mask again in place of keeping it.

    Args:
        x: what is dropped from.
        salt: two random words, of this call only.
        rate: share of the entries that are dropped.
    """
    return _drop(rate, x, salt)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _drop(rate: float, x: jax.Array, salt: jax.Array) -> jax.Array:
    scaled = x * jnp.asarray(1.0 / (1.0 - rate), x.dtype)
    return jnp.where(kept(x.shape, salt, rate=rate), scaled, jnp.zeros((), x.dtype))


def _forward(rate: float, x: jax.Array, salt: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _drop(rate, x, salt), salt


def _backward(rate: float, salt: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return _drop(rate, cotangent, salt), None


_drop.defvjp(_forward, _backward)


def kept(
    shape: tuple[int, ...], salt: UInt32[Array, " words"], *, rate: float
) -> Bool[Array, "..."]:
    """Which entries of an array are kept, as a function of each one's position.

    Positions, counted in row-major order, are multiplied by an odd number, shifted by the first
    word and put through the finaliser of MurmurHash3 with the second word in its middle. The entry
    is dropped where the 32 bits, as a number, are below rate·2³². So the mask is the same on any
    mesh, and it repeats only 2³² entries later.

    Args:
        shape: of the array.
        salt: two random words.
        rate: share of the entries that are dropped.
    """
    position = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        # The shape of one axis until they are added: most of the arithmetic is done on vectors.
        counter = jax.lax.iota(jnp.uint32, size) * np.uint32(stride * 0x9E3779B1 % 2**32)
        position = position[..., None] + counter
    mixed = position + salt[0]
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13) ^ salt[1]) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    return mixed >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
