"""Layers of BERT's blocks: self-attention, and a feed-forward that is plain or one per expert."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from taser_jax.models.bert_config import AttentionKernel, BertConfig
from taser_jax.models.layers import (
    Affine,
    Dropout,
    activate,
    copies,
    float32_einsum,
    layer_norm,
    masked_scores,
    rows_product,
    softmax_mean,
)
from taser_jax.storage.progress import logger

Parameters = dict[str, jax.Array]
_log_once = functools.cache(logger.info)


def rotate(
    x: Float[Array, "batch length heads kv"], theta: float
) -> Float[Array, "batch length heads kv"]:
    """Turns the pairs (x_i, x_{i + kv/2}) of position p by the angle p·theta^(−2i/kv).

    Products of a query and a key then depend on the difference of their positions alone.

    Example:
        Of width 2, (1, 0) at position 1 becomes (cos 1, sin 1), whatever theta.

    Args:
        x: queries or keys, from position 0.
        theta: base.

    Source: Su et al., 2021, with the pairs of Hugging Face's implementations.
    """
    length, width = x.shape[1], x.shape[-1]
    # float32 throughout, as there: at distant positions the rounding shows.
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = np.float32(1.0) / np.float32(theta) ** exponents
    angles = (np.arange(length, dtype=np.float32)[:, None] * frequencies)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _einsum_attention(
    query: Float[Array, "batch queries heads kv"],
    key: Float[Array, "batch keys heads kv"],
    value: Float[Array, "batch keys heads kv"],
    mask: Bool[Array, "batch keys"],
    bias: Float[Array, "#heads queries keys"] | None,
    dropout: Dropout,
) -> Float[Array, "batch queries heads kv"]:
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    query = query * (1.0 / math.sqrt(query.shape[-1]))
    logits = float32_einsum("bhqd,bhkd->bhqk", query, key)
    if bias is not None:
        logits += bias
    attended = softmax_mean(masked_scores(logits, mask), value, dropout=dropout)
    return jnp.swapaxes(attended, 1, 2)


class SelfAttention(nn.Module):
    """softmax(q·kᵀ/√d)·v over heads, projected back to `embed` (Vaswani et al., 2017).

    Attributes:
        config: sizes, dropout, kernel and initialiser.
        deterministic: True disables dropout.
        theta: base of rotary positions; None for none.
    """

    config: BertConfig
    deterministic: bool
    theta: float | None = None

    @nn.compact
    def __call__(
        self,
        queries: Float[Array, "batch queries embed"],
        keys: Float[Array, "batch keys embed"],
        *,
        mask: Bool[Array, "batch keys"],
        bias: Float[Array, "#heads queries keys"] | None = None,
    ) -> Float[Array, "batch queries embed"]:
        """Attends from `queries` to `keys`.

        Args:
            queries: hidden states of the first positions, which are computed.
            keys: hidden states of all positions.
            mask: True at real tokens of `keys`.
            bias: added to the scores.

        Returns:
            The attended values, projected, before residual and normalisation.
        """
        config, embed = self.config, keys.shape[-1]
        query = self._heads("query", queries)
        key, value = self._heads("key", keys), self._heads("value", keys)
        if self.theta is not None:
            query, key = rotate(query, self.theta), rotate(key, self.theta)

        dropping = config.attention_dropout_rate > 0 and not self.deterministic
        is_even = not (query.shape[1] % 2 or key.shape[1] % 2)
        by_cudnn = config.attention is AttentionKernel.CUDNN
        if by_cudnn and (jax.default_backend() != "gpu" or query.dtype != jnp.bfloat16):
            _log_once("attention: einsum, since cuDNN's kernel needs an NVIDIA GPU and bfloat16")
            by_cudnn = False
        if by_cudnn and is_even and bias is None and not dropping:
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
            if by_cudnn and dropping:
                _log_once("attention: einsum while training, since cuDNN's kernel has no dropout")
            dropout = Dropout(config.attention_dropout_rate, deterministic=self.deterministic)
            attended = _einsum_attention(query, key, value, mask, bias, dropout)

        heads = (config.num_heads, config.head_dim)
        kernel, out_bias = self._affine("out", (*heads, embed), ("heads", "kv", "embed"), (0, 1))
        attended = attended.reshape(*attended.shape[:2], math.prod(heads))
        kernel = kernel.reshape(math.prod(heads), embed)
        return rows_product(attended, kernel) + out_bias.astype(attended.dtype)

    def _heads(
        self, name: str, x: Float[Array, "batch length embed"]
    ) -> Float[Array, "batch length heads kv"]:
        embed, heads = x.shape[-1], (self.config.num_heads, self.config.head_dim)
        kernel, bias = self._affine(name, (embed, *heads), ("embed", "heads", "kv"), (0,))
        projected = rows_product(x, kernel.reshape(embed, math.prod(heads)))
        return projected.reshape(*x.shape[:2], *heads) + bias.astype(x.dtype)

    def _affine(
        self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], inputs: tuple[int, ...]
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        init, has_bias = self.config.kernel_init, self.config.traits.biases
        return Affine(shape, axes, inputs, init, has_bias, name=name)()


class FeedForward(nn.Module):
    """LN(h + W₂·gelu(W₁·h + b₁) + b₂), including the output normalisation (post-LN BERT).

    With `Traits.pre_norm` it is h + W₂·gelu(W₁·LN(h)), and `Traits.gated` multiplies the inner
    states by V·LN(h).

    With `num_experts`, every parameter, the LayerNorm's too, has a leading expert axis (as in
    TASER's released code; the paper does not specify whether LayerNorm is replicated). A call
    either selects one expert by a Python integer, so that nothing else is computed, or passes
    gates.

    Attributes:
        config: sizes, dropout, activation and initialiser; experts start as exact copies.
        deterministic: True disables dropout.
        num_experts: None for one plain feed-forward.
    """

    config: BertConfig
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
        dropout = Dropout(self.config.dropout_rate, deterministic=self.deterministic)
        if gates is None:
            if self.num_experts is not None:
                parameters = {name: value[expert] for name, value in parameters.items()}
            branch = self._branch(hidden, parameters, None)
            scale, bias = parameters["scale"], parameters["norm_bias"]
        else:
            group = slice(first_expert, first_expert + gates.shape[-1])
            parameters = {name: value[group] for name, value in parameters.items()}
            branch = self._gated_branch(hidden, parameters, gates)
            scale, bias = gates @ parameters["scale"], gates @ parameters["norm_bias"]
        output = hidden + dropout(branch)
        if self.config.traits.pre_norm:
            return output
        return layer_norm(output, scale, bias, epsilon=self.config.layer_norm_epsilon)

    def _parameters(self, embed: int) -> Parameters:
        lead: tuple[int, ...] = ()
        axes: tuple[str, ...] = ()
        kernel_init = self.config.kernel_init
        if self.num_experts is not None:
            lead, axes, kernel_init = (self.num_experts,), ("expert",), copies(kernel_init)

        def affine(name: str, inputs: tuple[str, int], outputs: tuple[str, int]) -> Affine:
            shape, names = (*lead, inputs[1], outputs[1]), (*axes, inputs[0], outputs[0])
            has_bias = self.config.traits.biases
            return Affine(shape, names, (len(lead),), kernel_init, has_bias, name=name)

        wi, bi = affine("wi", ("embed", embed), ("mlp", self.config.mlp_dim))()
        wo, bo = affine("wo", ("mlp", self.config.mlp_dim), ("embed", embed))()
        shape, names, has_bias = (*lead, embed), (*axes, "embed"), self.config.traits.norm_biases
        ones = nn.initializers.ones
        scale, norm_bias = Affine(shape, names, (), ones, has_bias, "scale", name="layer_norm")()
        products = {"wi": wi, "bi": bi, "wo": wo, "bo": bo}
        if self.config.traits.gated:
            wg, bg = affine("wi_gate", ("embed", embed), ("mlp", self.config.mlp_dim))()
            products |= {"wg": wg, "bg": bg}
        return {**products, "scale": scale, "norm_bias": norm_bias}

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
        total = jnp.zeros_like(hidden)
        for expert in range(gates.shape[-1]):
            chosen = {name: value[expert] for name, value in parameters.items()}
            gate = gates[..., expert, None].astype(hidden.dtype)
            if self.deterministic:
                total += jax.lax.cond(
                    jnp.any(gate != 0),
                    self._branch,
                    lambda h, *_: jnp.zeros_like(h),
                    hidden,
                    chosen,
                    gate,
                )
            else:
                total += self._branch(hidden, chosen, gate)
        return total

    def _branch(
        self,
        hidden: Float[Array, "batch length embed"],
        parameters: Parameters,
        gate: Float[Array, "batch #length 1"] | None,
    ) -> Float[Array, "batch length embed"]:
        """The residual branch of one expert, times its gate."""
        config, names = self.config, ("scale", "norm_bias")
        products = {k: v.astype(hidden.dtype) for k, v in parameters.items() if k not in names}
        if config.traits.pre_norm:
            scale, norm_bias = (parameters[name] for name in names)
            hidden = layer_norm(hidden, scale, norm_bias, epsilon=config.layer_norm_epsilon)
        inner = activate(rows_product(hidden, products["wi"]) + products["bi"], config.activation)
        if config.traits.gated:
            inner *= rows_product(hidden, products["wg"]) + products["bg"]
        output = rows_product(inner, products["wo"]) + products["bo"]
        return output if gate is None else output * gate
