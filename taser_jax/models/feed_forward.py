"""The feed-forward sublayer: one (shared blocks) or one per expert (specialised blocks)."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.models.dropout import Dropout
from taser_jax.models.layers import (
    Activation,
    Affine,
    Initializer,
    LayerNormParameters,
    activate,
    copies,
    layer_norm,
    rows_product,
)

Parameters = dict[str, jax.Array]


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
        mlp = self.mlp_dim
        wi, bi = Affine(
            (*lead, embed, mlp),
            (*axes, "embed", "mlp"),
            (*lead, mlp),
            (*axes, "mlp"),
            kernel_init,
            name="wi",
        )()
        wo, bo = Affine(
            (*lead, mlp, embed),
            (*axes, "mlp", "embed"),
            (*lead, embed),
            (*axes, "embed"),
            kernel_init,
            name="wo",
        )()
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
