"""Dropout whose mask is hashed from positions, so that nothing is drawn, stored or gathered."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from taser_jax.devices.mesh import current_shard
from taser_jax.storage.errors import ConfigError

_WORDS = 2
# An odd number: multiplying by it spreads neighbouring positions over 32 bits.
_SPREAD = 0x9E3779B1


class Dropout(nn.Module):
    """y = x / (1 − rate) where an entry is kept, and 0 where it is dropped.

    Like `flax.linen.Dropout` it takes one key per call from the random stream "dropout". Only this
    key comes from a counter-based generator: generating whole masks that way costs a TPU more than
    the masked computation, and its compiler minutes.

    Attributes:
        rate: share of dropped entries; with 0 nothing is drawn.
        deterministic: True disables dropout.
    """

    rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Applies dropout in training."""
        if not 0 <= self.rate < 1:
            raise ConfigError(f"rate {self.rate}", where="dropout", expected="0 <= rate < 1")
        if self.deterministic or self.rate == 0:
            return x
        words = jax.random.key_data(self.make_rng("dropout")).ravel()[:_WORDS]
        shard = current_shard()
        if shard is not None:
            # `kept` adds the first word to each position: moving it counts positions from the start
            # of the whole batch.
            words = words.at[0].add(shard.first_position(x.size) * np.uint32(_SPREAD))
        return drop(x, words, self.rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def drop(
    x: Float[Array, "*shape"], salt: UInt32[Array, " words"], rate: float
) -> Float[Array, "*shape"]:
    """x·mask / (1 − rate); the backward pass hashes the mask again instead of storing it.

    Args:
        x: the array.
        salt: two random words, for this call only.
        rate: share of dropped entries.
    """
    scaled = x * jnp.asarray(1.0 / (1.0 - rate), x.dtype)
    return jnp.where(kept(x.shape, salt, rate=rate), scaled, jnp.zeros((), x.dtype))


def _forward(x: jax.Array, salt: jax.Array, rate: float) -> tuple[jax.Array, jax.Array]:
    return drop(x, salt, rate), salt


def _backward(rate: float, salt: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return drop(cotangent, salt, rate), None


drop.defvjp(_forward, _backward)


def kept(
    shape: tuple[int, ...], salt: UInt32[Array, " words"], *, rate: float
) -> Bool[Array, "..."]:
    """The kept entries of an array, as a function of their positions.

    Row-major positions are multiplied by an odd number, shifted by the first word and passed
    through the finaliser of MurmurHash3 with the second word in its middle. An entry is dropped if
    the resulting 32-bit number is below rate·2³². The mask is therefore the same on any mesh, and
    repeats only after 2³² entries.

    Args:
        shape: shape of the array.
        salt: two random words.
        rate: share of dropped entries.
    """
    position = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        # One axis at a time until they are added: most of the arithmetic is on vectors.
        counter = jax.lax.iota(jnp.uint32, size) * np.uint32(stride * _SPREAD % 2**32)
        position = position[..., None] + counter
    mixed = position + salt[0]
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13) ^ salt[1]) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    return mixed >= np.uint32(min(round(rate * 2**32), 2**32 - 1))
