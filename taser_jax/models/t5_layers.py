"""T5's configuration and the layers of its blocks, which have no biases.

RMSNorm, relative positions, attention and feed-forward.

Parameters have T5X's names. Query, key and value kernels are [embed, heads, kv] and `out` is
[heads, kv, embed], where T5X joins heads and kv into one axis.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from msgspec import Meta

from taser_jax.models import layers
from taser_jax.models.stack import Remat, Scan
from taser_jax.storage.errors import check_fields
from taser_jax.storage.typed_files import Natural, Positive, Rate

# Collection of the masked scores that decoders sow.
ATTENTION = "attention"

_ATTENTION_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
_FEED_FORWARD_INIT = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_POSITION_INIT = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")

_FEED_FORWARDS = (("relu",), ("gelu", "linear"))
# T5X's names of the activations in a feed-forward. T5's GELU is the tanh approximation.
MLP_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda x: layers.activate(x, layers.Activation.RELU),
    "gelu": lambda x: layers.activate(x, layers.Activation.GELU_TANH),
    "linear": lambda x: x,
}


class T5Initialization(enum.Enum):
    """Initial scale of parameters, with equal outputs.

    RESCALED divides token embeddings and every attention's `out` by 100, and the feed-forward's
    `wi` and `wo` by 10 (of T5 1.1 `wi_1`, not the gate `wi_0`, which is inside a GELU). The
    residual stream is then a hundredth everywhere, and RMSNorm cancels this: the outputs are equal
    up to its ε. It was designed for float16. At an equal Adam learning rate these parameters move
    100 or 10 times as fast relative to their size; TACO-DR was trained this way
    (`t5-base-scaled`).
    """

    STANDARD = "standard"
    RESCALED = "rescaled"


class PositionBias(enum.Enum):
    """Whether a stack's blocks share a table of relative positions or have one each (umT5)."""

    SHARED = "shared"
    PER_LAYER = "per_layer"


@dataclasses.dataclass(frozen=True)
class T5Config(layers.TransformerConfig):
    """Sizes and numerics of T5; the defaults are t5-base.

    Example:
        >>> t5_1_1_base = T5Config(mlp_dim=2048, mlp_activations=("gelu", "linear"))

    Attributes:
        vocab_size: rows of the token table, which encoder and decoder share.
        embed_dim: width of the hidden states.
        num_layers: blocks of the encoder.
        num_decoder_layers: blocks of the decoder; 0 for an encoder alone.
        num_heads: number of attention heads.
        head_dim: width of a head; heads·head_dim need not be `embed_dim`.
        mlp_dim: inner width of the feed-forward.
        mlp_activations: ("relu",) for T5, ("gelu", "linear") for T5 1.1.
        num_buckets: buckets of relative positions.
        max_distance: distance from which all positions share a bucket.
        position_bias: whether blocks share the table of relative positions.
        dropout_rate: dropout everywhere: embeddings, attention probabilities, feed-forward,
            outputs.
        rms_norm_epsilon: epsilon of all normalisations.
        dtype: dtype of activations, "float32" or "bfloat16"; parameters, softmax and normalisation
            statistics and returned embeddings are always float32.
        remat: rematerialisation.
        scan: whether a training step's blocks are one loop for the compiler.
        initialization: see `T5Initialization`; also applied to pretrained weights on loading.
    """

    vocab_size: Positive = 32128
    embed_dim: Positive = 768
    num_layers: Positive = 12
    num_decoder_layers: Natural = 12
    num_heads: Positive = 12
    head_dim: Positive = 64
    mlp_dim: Positive = 3072
    mlp_activations: tuple[str, ...] = ("relu",)
    num_buckets: Annotated[int, Meta(ge=4, multiple_of=2)] = 32
    max_distance: int = 128
    position_bias: PositionBias = PositionBias.SHARED
    dropout_rate: Rate = 0.1
    rms_norm_epsilon: float = 1e-6
    dtype: str = "float32"
    remat: Remat = Remat.NONE
    scan: Scan = Scan.NONE
    initialization: T5Initialization = T5Initialization.STANDARD

    def __post_init__(self) -> None:
        super().__post_init__()
        quarter = f"more than a quarter of the {self.num_buckets} buckets"
        check_fields(
            self, "max_distance", is_valid=lambda n: n > self.num_buckets // 4, expected=quarter
        )
        # Other files know no others, and RESCALED's equal outputs need a kernel outside the GELU.
        expected = " or ".join(map(str, _FEED_FORWARDS))
        is_known = _FEED_FORWARDS.__contains__
        check_fields(self, "mlp_activations", is_valid=is_known, expected=expected)


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

    config: T5Config
    deterministic: bool

    def _heads_kernel(self, name: str, embed: int) -> Float[Array, "embed heads kv"]:
        kernel_init = _query_init(self.config.head_dim) if name == "query" else _ATTENTION_INIT
        shape = (embed, self.config.num_heads, self.config.head_dim)
        return layers.Kernel(shape, ("embed", "heads", "kv"), kernel_init, name=name)()

    def _out_kernel(self, embed: int) -> Float[Array, "heads kv embed"]:
        shape, axes = (self.config.num_heads, self.config.head_dim, embed), ("heads", "kv", "embed")
        return layers.Kernel(shape, axes, _ATTENTION_INIT, inputs=2, name="out")()

    def _dropout(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return layers.Dropout(self.config.dropout_rate, deterministic=self.deterministic)(x)


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
        joined = self.config.num_heads * self.config.head_dim

        def heads(name: str) -> Float[Array, "batch heads length kv"]:
            kernel = self._heads_kernel(name, embed).reshape(embed, joined)
            split = layers.rows_product(hidden, kernel)
            split = split.reshape(*hidden.shape[:2], self.config.num_heads, self.config.head_dim)
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
        probability = self._dropout(
            jnp.ones((hidden.shape[0], self.config.num_heads, 1), hidden.dtype)
        )
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
        config: sizes, dropout of the inner states and activations, one per kernel.
        deterministic: True disables dropout.
    """

    config: T5Config
    deterministic: bool

    @nn.compact
    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Applies the feed-forward, before residual and dropout."""
        embed, parts = x.shape[-1], []
        for i, activation in enumerate(self.config.mlp_activations):
            name = "wi" if len(self.config.mlp_activations) == 1 else f"wi_{i}"
            kernel = self._kernel(name, (embed, self.config.mlp_dim), ("embed", "mlp"))
            parts.append(MLP_ACTIVATIONS[activation](layers.rows_product(x, kernel)))
        inner = functools.reduce(operator.mul, parts)
        inner = layers.Dropout(self.config.dropout_rate, deterministic=self.deterministic)(inner)
        kernel = self._kernel("wo", (self.config.mlp_dim, embed), ("mlp", "embed"))
        return layers.rows_product(inner, kernel)

    def _kernel(
        self, name: str, shape: tuple[int, int], axes: tuple[str, str]
    ) -> Float[Array, "inputs outputs"]:
        return layers.Kernel(shape, axes, _FEED_FORWARD_INIT, name=name)()
