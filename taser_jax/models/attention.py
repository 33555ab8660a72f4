"""Multi-head self-attention over padded sequences, with a choice of kernel."""

from __future__ import annotations

import enum
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.models.dropout import Dropout
from taser_jax.models.layers import (
    Affine,
    float32_einsum,
    masked_scores,
    rows_product,
    softmax_mean,
)


class AttentionKernel(enum.Enum):
    """Implementations of softmax(q·kᵀ/√d)·v; their values agree to rounding.

    EINSUM moves the heads into the batch dimension before the products, and can drop attention
    probabilities. DOT_PRODUCT is `jax.nn.dot_product_attention`; CUDNN is the same with cuDNN's
    flash attention (NVIDIA GPUs, bfloat16), which needs even numbers of queries and keys;
    otherwise, as with [CLS] pooling's one query, CUDNN is DOT_PRODUCT. These two have no attention
    dropout: while it is active (training with `attention_dropout_rate` > 0) EINSUM replaces them.

    On CPUs EINSUM trains a small encoder no slower than DOT_PRODUCT, hence the default.
    """

    EINSUM = "einsum"
    DOT_PRODUCT = "dot_product"
    CUDNN = "cudnn"


def _einsum_attention(
    query: Float[Array, "batch queries heads kv"],
    key: Float[Array, "batch keys heads kv"],
    value: Float[Array, "batch keys heads kv"],
    mask: Bool[Array, "batch keys"],
    dropout: Dropout,
) -> Float[Array, "batch queries heads kv"]:
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query = query * (1.0 / math.sqrt(query.shape[-1]))
    logits = float32_einsum("bhqd,bhkd->bhqk", query, key)
    attended = softmax_mean(masked_scores(logits, mask), value, dropout=dropout)
    return jnp.swapaxes(attended, 1, 2)


class SelfAttention(nn.Module):
    """softmax(q·kᵀ/√d)·v over `num_heads` heads, projected back to `embed` (Vaswani et al., 2017).

    Attributes:
        num_heads: heads.
        head_dim: width d of a head.
        dropout_rate: share of attention probabilities dropped in training.
        kernel: see `AttentionKernel`.
        kernel_init: initialiser of the four projections.
        deterministic: True disables dropout.
    """

    num_heads: int
    head_dim: int
    dropout_rate: float
    kernel: AttentionKernel
    kernel_init: nn.initializers.Initializer
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        queries: Float[Array, "batch queries embed"],
        keys: Float[Array, "batch keys embed"],
        *,
        mask: Bool[Array, "batch keys"],
    ) -> Float[Array, "batch queries embed"]:
        """Attends from `queries` to `keys`.

        Args:
            queries: hidden states of the positions to compute.
            keys: hidden states of all positions.
            mask: True at real tokens of `keys`.

        Returns:
            The attended values, projected, before residual and normalisation.
        """
        embed = keys.shape[-1]
        query = self._heads("query", queries)
        key, value = self._heads("key", keys), self._heads("value", keys)

        dropping = self.dropout_rate > 0 and not self.deterministic
        if dropping or self.kernel is AttentionKernel.EINSUM:
            dropout = Dropout(self.dropout_rate, deterministic=self.deterministic)
            attended = _einsum_attention(query, key, value, mask, dropout)
        elif self.kernel is AttentionKernel.CUDNN and not (query.shape[1] % 2 or key.shape[1] % 2):
            # A mask would need a bias for every query and key. Texts are padded at their ends, so
            # lengths are enough; a text without tokens gets length 1, or its softmax would be NaN.
            attended = jax.nn.dot_product_attention(
                query,
                key,
                value,
                key_value_seq_lengths=jnp.maximum(mask.sum(-1, dtype=jnp.int32), 1),
                implementation="cudnn",
            )
        else:
            attended = jax.nn.dot_product_attention(
                query, key, value, mask=mask[:, None, None, :], implementation="xla"
            )

        heads = (self.num_heads, self.head_dim)
        kernel, bias = Affine(
            (*heads, embed),
            ("heads", "kv", "embed"),
            (embed,),
            ("embed",),
            self.kernel_init,
            name="out",
        )()
        attended = attended.reshape(*attended.shape[:2], math.prod(heads))
        kernel = kernel.reshape(math.prod(heads), embed)
        return rows_product(attended, kernel) + bias.astype(attended.dtype)

    def _heads(
        self, name: str, x: Float[Array, "batch length embed"]
    ) -> Float[Array, "batch length heads kv"]:
        heads = (self.num_heads, self.head_dim)
        embed = x.shape[-1]
        kernel, bias = Affine(
            (embed, *heads),
            ("embed", "heads", "kv"),
            heads,
            ("heads", "kv"),
            self.kernel_init,
            name=name,
        )()
        projected = rows_product(x, kernel.reshape(embed, math.prod(heads)))
        projected = projected.reshape(*x.shape[:2], *heads)
        return projected + bias.astype(x.dtype)
