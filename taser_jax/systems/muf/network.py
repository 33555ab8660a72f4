"""DPR-MUF's ensemble: small networks that map a specialist's query embeddings to new ones."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from taser_jax.storage.errors import ConfigError

Params: TypeAlias = PyTree
"""{"layers_0": {"kernel": [in, out], "bias": [out]}, ...}; members add a leading axis."""


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
    """Sizes of an ensemble.

    Attributes:
        members: networks that differ in initialisation, order of queries and sub-batches.
        hidden_dims: widths of the hidden layers, each followed by a ReLU. The released code has
            two of 512; the paper's "2-layer" network, taken literally, has one.
    """

    members: int = 20
    hidden_dims: tuple[int, ...] = (512, 512)

    def __post_init__(self) -> None:
        if self.members < 2 or not all(width > 0 for width in self.hidden_dims):
            raise ConfigError(
                f"{self.members} members, hidden layers of {self.hidden_dims}",
                where="EnsembleConfig",
                expected="two members or more (one cannot disagree), widths of at least 1",
            )

    def layer_dims(self, dim: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each layer, for embeddings of `dim` numbers."""
        return tuple(itertools.pairwise((dim, *self.hidden_dims, dim)))

    def parameters(self, dim: int) -> int:
        """Parameters of one member."""
        return sum(inputs * outputs + outputs for inputs, outputs in self.layer_dims(dim))

    def training_flops(self, dim: int, *, queries: int, passages: int) -> float:
        """Matrix-product FLOPs of one member's step: forward, and twice that backward."""
        products = sum(inputs * outputs for inputs, outputs in self.layer_dims(dim))
        return 6.0 * queries * (products + passages * dim)


def init_members(key: jax.Array, *, dim: int, config: EnsembleConfig, members: int) -> Params:
    """Parameters of the first members of an ensemble; member i's depend on the key and i alone.

    Weights and biases are drawn from U(−1/√in, 1/√in), PyTorch's default for linear layers.

    Args:
        key: key of the whole ensemble.
        dim: width of the embeddings.
        config: sizes; its own number of members is not used.
        members: how many.
    """

    def layer(key: jax.Array, inputs: int, outputs: int) -> Params:
        bound = 1 / math.sqrt(inputs)
        kernel, bias = jax.random.split(key)
        return {
            "kernel": jax.random.uniform(kernel, (inputs, outputs), minval=-bound, maxval=bound),
            "bias": jax.random.uniform(bias, (outputs,), minval=-bound, maxval=bound),
        }

    def member(number: Array) -> Params:
        own = jax.random.fold_in(key, number)
        return {
            f"layers_{place}": layer(jax.random.fold_in(own, place), *sizes)
            for place, sizes in enumerate(config.layer_dims(dim))
        }

    return jax.vmap(member)(jnp.arange(members))


def apply_member(
    params: Params, queries: Float[Array, "queries dim"]
) -> Float[Array, "queries dim"]:
    """U = f(v): linear layers with ReLUs between them; no residual, dropout or normalisation.

    Products are float32 at `Precision.HIGHEST`: at a low temperature, the rounding of TPUs
    would look like disagreement.
    """
    hidden = queries.astype(jnp.float32)
    for place in range(len(params)):
        layer = params[f"layers_{place}"]
        product = jnp.matmul(hidden, layer["kernel"], precision=jax.lax.Precision.HIGHEST)
        hidden = product + layer["bias"]
        if place < len(params) - 1:
            hidden = jax.nn.relu(hidden)
    return hidden


@jax.jit
def apply_members(
    params: Params, queries: Float[Array, "queries dim"]
) -> Float[Array, "members queries dim"]:
    """Every member's embeddings of the same queries."""
    return jax.vmap(apply_member, in_axes=(0, None))(params, queries)
