"""Layers of T5's blocks: RMSNorm, relative positions, attention, feed-forward, without biases.

Parameters have T5X's names. Query, key and value kernels are [embed, heads, kv] and `out` is
[heads, kv, embed], where T5X joins heads and kv into one axis.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models import layers

# Collection of the masked scores that decoders sow.
ATTENTION = "attention"

_ATTENTION_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_FEED_FORWARD_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_POSITION_INIT = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")

# T5X's names of the activations in a feed-forward. T5's GELU is the tanh approximation.
MLP_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda x: layers.activate(x, layers.Activation.RELU),
    "gelu": lambda x: layers.activate(x, layers.Activation.GELU_TANH),
    "linear": lambda x: x,
}


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · scale, computed in float32 (Zhang and Sennrich, 2019)."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Normalises the last axis."""
        scale = layers.parameter(self, "scale", nn.initializers.ones, x.shape[-1:], ("embed",))
        wide = x.astype(jnp.float32)
        mean_square = jnp.square(wide).mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


def relative_position_bucket(
    distance: Int[np.ndarray, "*shape"], *, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "*shape"]:
    """Bucket of a key's position minus its query's, in both directions (Raffel et al., 2020).

    Half of the buckets are for keys to the right. In each half, the lower half has one distance per
    bucket; the others grow logarithmically up to `max_distance`, and larger distances share the
    last.

    Example:
        With 32 buckets up to 128: 0, -1, -7, -8, -16, -128 have buckets 0, 1, 7, 8, 10, 15 and
        1, 8, 128 have 17, 24, 31.
    """
    half = num_buckets // 2
    exact = half // 2
    steps = np.abs(distance)
    # float32 and its epsilon, as in T5X, so that every distance has the same bucket.
    ratio = np.maximum(steps, 1).astype(np.float32) / np.float32(exact) + np.finfo(np.float32).eps
    growth = np.log(ratio) / np.log(max_distance / exact) * (half - exact)
    far = np.minimum(exact + growth.astype(np.int32), half - 1)
    return (distance > 0) * half + np.where(steps < exact, steps, far)


class RelativePositionBias(nn.Module):
    """A learned number for each head and bucket of distances, added to attention scores."""

    num_heads: int
    num_buckets: int
    max_distance: int

    @nn.compact
    def __call__(self, length: int) -> Float[Array, "heads length length"]:
        """Bias of each query (axis 1) and key (axis 2), float32."""
        shape = (self.num_heads, self.num_buckets)
        table = layers.parameter(self, "rel_embedding", _POSITION_INIT, shape, ("heads", None))
        buckets = relative_position_bucket(
            np.arange(1 - length, length),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        by_distance = jnp.take(table, buckets, axis=1)
        # Repeating a vector with a period one longer than the rows shifts each row by one. This
        # gives all rows without an index, whose gradient would be a scatter.
        period = jnp.pad(by_distance, ((0, 0), (0, 1)))
        rows = jnp.tile(period, (1, length))[:, : length * (2 * length - 1)]
        return rows.reshape(self.num_heads, length, 2 * length - 1)[:, :, length - 1 :]


def _query_init(head_dim: int) -> layers.Initializer:
    def initialize(
        key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
    ) -> jax.Array:
        return _ATTENTION_INIT(key, shape, dtype) / math.sqrt(head_dim)

    return initialize


class _Projections(nn.Module):
    """The four kernels and the dropout that all kinds of attention have.

    T5 does not divide scores by √kv; the query's initialiser includes the factor.
    """

    num_heads: int
    head_dim: int
    dropout_rate: float
    deterministic: bool

    def _heads_kernel(self, name: str, embed: int) -> Float[Array, "embed heads kv"]:
        kernel_init = _query_init(self.head_dim) if name == "query" else _ATTENTION_INIT
        shape = (embed, self.num_heads, self.head_dim)
        return layers.Kernel(shape, ("embed", "heads", "kv"), kernel_init, name=name)()

    def _out_kernel(self, embed: int) -> Float[Array, "heads kv embed"]:
        shape, axes = (self.num_heads, self.head_dim, embed), ("heads", "kv", "embed")
        return layers.Kernel(shape, axes, _ATTENTION_INIT, inputs=2, name="out")()

    def _dropout(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return layers.Dropout(self.dropout_rate, deterministic=self.deterministic)(x)


class SelfAttention(_Projections):
    """softmax(q·kᵀ + position bias)·v, projected back."""

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch length embed"],
        *,
        mask: Bool[Array, "batch length"],
        position_bias: Float[Array, "heads length length"],
    ) -> Float[Array, "batch length embed"]:
        """Attends from each position to all real positions."""
        embed = hidden.shape[-1]
        joined = self.num_heads * self.head_dim

        def heads(name: str) -> Float[Array, "batch heads length kv"]:
            kernel = self._heads_kernel(name, embed).reshape(embed, joined)
            split = layers.rows_product(hidden, kernel)
            split = split.reshape(*hidden.shape[:2], self.num_heads, self.head_dim)
            return jnp.swapaxes(split, 1, 2)

        query, key, value = heads("query"), heads("key"), heads("value")
        scores = layers.float32_einsum("bhqd,bhkd->bhqk", query, key)
        scores = layers.masked_scores(scores + position_bias, mask)
        attended = layers.softmax_mean(scores, value, dropout=self._dropout)
        attended = jnp.swapaxes(attended, 1, 2).reshape(*hidden.shape[:2], joined)
        kernel = self._out_kernel(embed).reshape(joined, embed)
        return layers.rows_product(attended, kernel)


class FirstSelfAttention(_Projections):
    """A decoder's self-attention at its first position, which sees only itself.

    The single probability is always 1, so the parameters of query and key are unused and get zero
    gradients; they exist because checkpoints have them.
    """

    @nn.compact
    def __call__(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        """Value and output projections, with dropout of the one probability."""
        embed = hidden.shape[-1]
        for unused in ("query", "key"):
            self._heads_kernel(unused, embed)
        kernel = self._heads_kernel("value", embed).astype(hidden.dtype)
        probability = self._dropout(jnp.ones((hidden.shape[0], self.num_heads, 1), hidden.dtype))
        value = probability * jnp.einsum("be,ehd->bhd", hidden, kernel)
        return jnp.einsum("bhd,hde->be", value, self._out_kernel(embed).astype(hidden.dtype))


class FirstCrossAttention(_Projections):
    """A decoder's attention to the encoder from its first position.

    A single query needs no keys and values per token: q·(Wₖ h) = (Wₖᵀ q)·h and
    Σ p (Wᵥ h) = Wᵥ Σ p h. The products with the encoder's states then have `heads` rows instead of
    heads·kv, which saves about a seventh of T5-base's arithmetic.
    """

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch embed"],
        encoded: Float[Array, "batch length encoded"],
        *,
        mask: Bool[Array, "batch length"],
    ) -> Float[Array, "batch embed"]:
        """Attends to the real tokens of `encoded`."""
        embed, dtype = hidden.shape[-1], hidden.dtype
        query_kernel = self._heads_kernel("query", embed).astype(dtype)
        key_kernel = self._heads_kernel("key", encoded.shape[-1]).astype(dtype)
        value_kernel = self._heads_kernel("value", encoded.shape[-1]).astype(dtype)
        query = jnp.einsum("be,ehd->bhd", hidden, query_kernel)
        query = jnp.einsum("bhd,ehd->bhe", query, key_kernel)
        scores = layers.masked_scores(layers.float32_einsum("bhe,ble->bhl", query, encoded), mask)
        # Stored only if the caller asks for this collection, as MoMA's FidAtt does.
        self.sow(ATTENTION, "scores", scores)
        probabilities = jax.nn.softmax(scores, axis=-1)
        probabilities = self._dropout(probabilities).astype(dtype)
        mean = jnp.einsum("bhl,ble->bhe", probabilities, encoded)
        value = jnp.einsum("bhe,ehd->bhd", mean, value_kernel)
        return jnp.einsum("bhd,hde->be", value, self._out_kernel(embed).astype(dtype))


class FeedForward(nn.Module):
    """Π activationᵢ(x·wiᵢ)·wo: one `wi` in T5, `wi_0` (gate) and `wi_1` in T5 1.1.

    Attributes:
        mlp_dim: inner width.
        activations: keys of `MLP_ACTIVATIONS`, one per kernel.
        dropout_rate: dropout of the inner states.
        deterministic: True disables dropout.
    """

    mlp_dim: int
    activations: tuple[str, ...]
    dropout_rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Applies the feed-forward, before residual and dropout."""
        embed, parts = x.shape[-1], []
        for i, activation in enumerate(self.activations):
            name = "wi" if len(self.activations) == 1 else f"wi_{i}"
            kernel = self._kernel(name, (embed, self.mlp_dim), ("embed", "mlp"))
            parts.append(MLP_ACTIVATIONS[activation](layers.rows_product(x, kernel)))
        inner = functools.reduce(operator.mul, parts)
        inner = layers.Dropout(self.dropout_rate, deterministic=self.deterministic)(inner)
        kernel = self._kernel("wo", (self.mlp_dim, embed), ("mlp", "embed"))
        return layers.rows_product(inner, kernel)

    def _kernel(
        self, name: str, shape: tuple[int, int], axes: tuple[str, str]
    ) -> Float[Array, "inputs outputs"]:
        return layers.Kernel(shape, axes, _FEED_FORWARD_INIT, name=name)()
