"""Layers of BERT's blocks: self-attention, and a feed-forward that is plain or one per expert."""

from __future__ import annotations

import enum
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.models.dropout import Dropout
from taser_jax.models.layers import (
    Activation,
    Affine,
    Initializer,
    LayerNormParameters,
    activate,
    copies,
    float32_einsum,
    layer_norm,
    masked_scores,
    rows_product,
    softmax_mean,
)

Parameters = dict[str, jax.Array]


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
        axes = ("heads", "kv", "embed")
        kernel, bias = Affine((*heads, embed), axes, (0, 1), self.kernel_init, name="out")()
        attended = attended.reshape(*attended.shape[:2], math.prod(heads))
        kernel = kernel.reshape(math.prod(heads), embed)
        return rows_product(attended, kernel) + bias.astype(attended.dtype)

    def _heads(
        self, name: str, x: Float[Array, "batch length embed"]
    ) -> Float[Array, "batch length heads kv"]:
        heads = (self.num_heads, self.head_dim)
        embed = x.shape[-1]
        axes = ("embed", "heads", "kv")
        kernel, bias = Affine((embed, *heads), axes, (0,), self.kernel_init, name=name)()
        projected = rows_product(x, kernel.reshape(embed, math.prod(heads)))
        projected = projected.reshape(*x.shape[:2], *heads)
        return projected + bias.astype(x.dtype)


class FeedForward(nn.Module):
    """LN(h + W₂·gelu(W₁·h + b₁) + b₂), including the output normalisation (post-LN BERT).

    With `num_experts`, every parameter, the LayerNorm's too, has a leading expert axis (as in
    TASER's released code; the paper does not specify whether LayerNorm is replicated). A call
    either selects one expert by a Python integer, so that nothing else is computed, or passes
    gates.

    Attributes:
        mlp_dim: inner width.
        activation: the non-linearity.
        dropout_rate: share of the branch's outputs dropped in training.
        epsilon: epsilon of the layer normalisation.
        kernel_init: initialiser of both kernels; experts start as exact copies.
        deterministic: True disables dropout.
        num_experts: None for one plain feed-forward.
    """

    mlp_dim: int
    activation: Activation
    dropout_rate: float
    epsilon: float
    kernel_init: Initializer
    deterministic: bool
    num_experts: int | None = None

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch length embed"],
        *,
        expert: int | None = None,
        first_expert: int = 0,
        gates: Float[Array, "batch #length group"] | None = None,
    ) -> Float[Array, "batch length embed"]:
        """Applies the sublayer.

        Args:
            hidden: output of the attention sublayer.
            expert: the one expert to run.
            first_expert: first expert of the group that `gates` refers to.
            gates: weight of each expert of the group for every sequence (length 1) or token;
                one-hot in value, their gradients are the router's.

        Returns:
            The block's output.
        """
        embed = hidden.shape[-1]
        parameters = self._parameters(embed)
        dropout = Dropout(self.dropout_rate, deterministic=self.deterministic)
        if gates is None:
            if self.num_experts is not None:
                parameters = {name: value[expert] for name, value in parameters.items()}
            branch = _branch(hidden, parameters, None, activation=self.activation)
            scale, bias = parameters["scale"], parameters["norm_bias"]
        else:
            group = slice(first_expert, first_expert + gates.shape[-1])
            parameters = {name: value[group] for name, value in parameters.items()}
            branch = self._gated_branch(hidden, parameters, gates)
            scale, bias = gates @ parameters["scale"], gates @ parameters["norm_bias"]
        return layer_norm(hidden + dropout(branch), scale, bias, epsilon=self.epsilon)

    def _parameters(self, embed: int) -> Parameters:
        lead: tuple[int, ...] = ()
        axes: tuple[str, ...] = ()
        kernel_init = self.kernel_init
        if self.num_experts is not None:
            lead, axes, kernel_init = (self.num_experts,), ("expert",), copies(kernel_init)

        def affine(name: str, inputs: tuple[str, int], outputs: tuple[str, int]) -> Affine:
            shape, names = (*lead, inputs[1], outputs[1]), (*axes, inputs[0], outputs[0])
            return Affine(shape, names, (len(lead),), kernel_init, name=name)

        wi, bi = affine("wi", ("embed", embed), ("mlp", self.mlp_dim))()
        wo, bo = affine("wo", ("mlp", self.mlp_dim), ("embed", embed))()
        norm = LayerNormParameters((*lead, embed), (*axes, "embed"), name="layer_norm")
        scale, norm_bias = norm()
        return {"wi": wi, "bi": bi, "wo": wo, "bo": bo, "scale": scale, "norm_bias": norm_bias}

    def _gated_branch(
        self,
        hidden: Float[Array, "batch length embed"],
        parameters: Parameters,
        gates: Float[Array, "batch #length group"],
    ) -> Float[Array, "batch length embed"]:
        """Σ_e gate_e · FFN_e(h), with shapes that do not depend on the choice.

        Training computes every expert of the group. With I = 2 in a third of the blocks this is
        about a fifth more arithmetic than one expert, and needs no sorting or gathering over
        devices. Inference skips experts that no input of the batch chose, which removes the excess
        once routing follows the role (a batch has one role).
        """
        branch = functools.partial(_branch, activation=self.activation)
        total = jnp.zeros_like(hidden)
        for expert in range(gates.shape[-1]):
            chosen = {name: value[expert] for name, value in parameters.items()}
            gate = gates[..., expert, None].astype(hidden.dtype)
            if self.deterministic:
                total += jax.lax.cond(
                    jnp.any(gate != 0),
                    branch,
                    lambda h, *_: jnp.zeros_like(h),
                    hidden,
                    chosen,
                    gate,
                )
            else:
                total += branch(hidden, chosen, gate)
        return total


def _branch(
    hidden: Float[Array, "batch length embed"],
    parameters: Parameters,
    gate: Float[Array, "batch #length 1"] | None,
    *,
    activation: Activation,
) -> Float[Array, "batch length embed"]:
    wi, bi, wo, bo = (parameters[name].astype(hidden.dtype) for name in ("wi", "bi", "wo", "bo"))
    output = rows_product(activate(rows_product(hidden, wi) + bi, activation), wo) + bo
    return output if gate is None else output * gate
