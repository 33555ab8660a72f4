"""What all encoders have: configuration, costs, parameters with logical axes, normalisation."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from taser_jax.devices.mesh import BATCH_AXES
from taser_jax.storage.errors import check_fields
from taser_jax.storage.typed_files import Checked

Initializer = Callable[..., Any]
DTYPES = ("float32", "bfloat16")
# Fields of every Transformer that the shapes of its parameters show.
SIZES = ("vocab_size", "embed_dim", "num_layers", "num_heads", "head_dim", "mlp_dim")


class Remat(enum.Enum):
    """What the backward pass recomputes: nothing, or each block from its input."""

    NONE = "none"
    BLOCK = "block"


class Scan(enum.Enum):
    """What is one loop for the compiler: nothing, or in training the blocks that repeat.

    A loop compiles in a fraction of the time and memory, and stacks the blocks' parameters and
    gradients in every step. Its dropout draws are others.
    """

    NONE = "none"
    BLOCKS = "blocks"


def by_remat(block: type[nn.Module]) -> dict[Remat, type[nn.Module]]:
    """A block's class for each choice of `Remat`.

    Blocks of one kind and shape are traced and lowered once, wherever they stand in a stack.
    """
    return {Remat.NONE: nn.jit(block), Remat.BLOCK: nn.jit(nn.remat(block))}


class TransformerConfig(Checked):
    """Fields of all Transformer configurations; see `BertConfig` and `T5Config`."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    dtype: str
    remat: Remat
    scan: Scan

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "dtype", is_valid=DTYPES.__contains__, expected=" or ".join(DTYPES))

    @property
    def by_distance(self) -> bool:
        """Whether attention depends on distances: a program then needs a number as its length."""
        return True


def layer_names(count: int) -> str:
    """Regular expression of the names of the first blocks.

    Example:
        >>> layer_names(2)
        '(layers_0|layers_1)'
    """
    return f"({'|'.join(f'layers_{i}' for i in range(count))})"


class Activation(enum.Enum):
    """Non-linearity between the two products of a feed-forward.

    GELU is BERT's exact x·Φ(x); TASER's paper writes ReLU (Eq. 1), its code runs BERT's GELU.
    """

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SILU = "silu"


def activate(x: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """Applies the activation, computed in float32, with the dtype of `x`.

    The exact GELU uses erf: `jax.nn.gelu(approximate=False)` uses erfc, which takes a considerable
    part of a small encoder's training step on a CPU.
    """
    if activation is Activation.RELU:
        return jax.nn.relu(x)
    wide = x.astype(jnp.float32)
    if activation is Activation.SILU:
        return jax.nn.silu(wide).astype(x.dtype)
    if activation is Activation.GELU_TANH:
        return jax.nn.gelu(wide, approximate=True).astype(x.dtype)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... embed"],
    scale: Float[Array, "... #embed"],
    bias: Float[Array, "... #embed"],
    *,
    epsilon: float,
) -> Float[Array, "... embed"]:
    """(x − mean) / sqrt(var + ε) · scale + bias over the last axis, reduced in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(variance + epsilon)
    return (normalised * scale + bias).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def float32_einsum(
    equation: str, left: Float[Array, "..."], right: Float[Array, "..."]
) -> Float[Array, "..."]:
    """A product of two arrays in float32, whose gradients are products in the arrays' own dtype.

    Differentiated by default, a bfloat16 product with a float32 result multiplies its float32
    cotangent with float32 copies of its operands: twice the memory traffic of attention scores,
    for digits that bfloat16 gradients lose. Here the cotangent is rounded first, like those of all
    other products. In float32 nothing changes.

    Args:
        equation: einsum equation of two operands, in which every index appears twice.
        left: first operand.
        right: second operand.
    """
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _float32_einsum_forward(
    equation: str, left: Array, right: Array
) -> tuple[Array, tuple[Array, Array]]:
    return float32_einsum(equation, left, right), (left, right)


def _float32_einsum_backward(
    equation: str, operands: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    left, right = operands
    inputs, _, output = equation.partition("->")
    left_indices, _, right_indices = inputs.partition(",")
    cotangent = cotangent.astype(left.dtype)
    return (
        jnp.einsum(f"{output},{right_indices}->{left_indices}", cotangent, right),
        jnp.einsum(f"{output},{left_indices}->{right_indices}", cotangent, left),
    )


float32_einsum.defvjp(_float32_einsum_forward, _float32_einsum_backward)


def rows_product(
    x: Float[Array, "*batch inner"], kernel: Float[Array, "inner outer"]
) -> Float[Array, "*batch outer"]:
    """x·kernel in the dtype of `x`, as a product of two matrices whatever the leading axes.

    With several leading axes XLA's CPU backend computes the kernel's gradient from transposed
    copies, at half the speed.
    """
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ kernel if x.dtype == jnp.float32 else _product(rows, kernel.astype(x.dtype))
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


@jax.custom_vjp
def _product(
    rows: Float[Array, "rows inner"], kernel: Float[Array, "inner outer"]
) -> Float[Array, "rows outer"]:
    return _rounded_product("ri,io->ro", rows, kernel)


def _product_forward(rows: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(rows, kernel), (rows, kernel)


def _product_backward(operands: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    rows, kernel = operands
    return (
        _rounded_product("ro,io->ri", cotangent, kernel),
        _rounded_product("ri,ro->io", rows, cotangent),
    )


_product.defvjp(_product_forward, _product_backward)


def _rounded_product(equation: str, left: Array, right: Array) -> Array:
    """A bfloat16 product, rounded from float32.

    XLA's CPU backend multiplies bfloat16 as such, which is faster on processors with avx512_bf16,
    only where the result is float32; otherwise it multiplies float32 copies. Other platforms add up
    in float32 and round within the product.
    """

    def rounded(left: Array, right: Array) -> Array:
        wide = jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)
        return wide.astype(left.dtype)

    return jax.lax.platform_dependent(
        left, right, cpu=rounded, default=functools.partial(jnp.einsum, equation)
    )


def masked_scores(
    scores: Float[Array, "batch heads *queries keys"], mask: Bool[Array, "batch keys"]
) -> Float[Array, "batch heads *queries keys"]:
    """Lowers the scores of padding so far that softmax gives them zero weight."""
    mask = mask.reshape(mask.shape[0], *(1,) * (scores.ndim - 2), mask.shape[1])
    return jnp.where(mask, scores, jnp.finfo(scores.dtype).min)


def softmax_mean(
    scores: Float[Array, "batch heads queries keys"],
    values: Float[Array, "batch heads keys kv"],
    *,
    dropout: Callable[[jax.Array], jax.Array],
) -> Float[Array, "batch heads queries kv"]:
    """Σ_k dropout(softmax(scores))_k · value_k, divided by the softmax's sum at the end.

    The division is then of kv numbers per query, and the softmax's gradient sums over kv instead of
    keys. The largest score is subtracted, which changes only the range.

    Args:
        scores: float32.
        values: their dtype is that of the product and the result.
        dropout: dropout of the weights.
    """
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - highest)
    dropped = dropout(weights).astype(values.dtype)
    mean = float32_einsum("bhqk,bhkd->bhqd", dropped, values) / weights.sum(-1, keepdims=True)
    return mean.astype(values.dtype)


def copies(initializer: Initializer) -> Initializer:
    """An initialiser for [experts, ...] that gives every expert the same values.

    TASER starts each expert as an exact copy of one feed-forward (released code,
    `init_moe_from_pretrained_mapping`: no noise).
    """

    def initialize(
        key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32
    ) -> jax.Array:
        return jnp.broadcast_to(initializer(key, shape[1:], dtype), shape)

    return initialize


def parameter(
    module: nn.Module,
    name: str,
    initializer: Initializer,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
) -> Float[Array, "..."]:
    """A float32 parameter of `module` with named axes; an axis named None is never sharded."""
    initializer = nn.with_logical_partitioning(initializer, axes)
    # Flax returns the array; mypy sees the type of its box.
    return cast(jax.Array, module.param(name, initializer, shape, jnp.float32))


class Affine(nn.Module):
    """Holds the `kernel` and `bias` of x·kernel + bias with their logical axes, in float32.

    Attributes:
        shape: shape of the kernel.
        axes: logical axis name of each of its axes.
        inputs: axes of the kernel that a product sums over; the bias has the others.
        kernel_init: initialiser of the kernel; the bias starts at zero.
        has_bias: False for no parameter; the bias is then 0.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: tuple[int, ...]
    kernel_init: Initializer
    has_bias: bool = True

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns (kernel, bias)."""
        outputs = [axis for axis in range(len(self.shape)) if axis not in self.inputs]
        shape = tuple(self.shape[axis] for axis in outputs)
        axes = tuple(self.axes[axis] for axis in outputs)
        kernel = parameter(self, "kernel", self.kernel_init, self.shape, self.axes)
        if not self.has_bias:
            return kernel, jnp.zeros(shape)
        return kernel, parameter(self, "bias", nn.initializers.zeros, shape, axes)


class LayerNormParameters(nn.Module):
    """Holds `scale` (ones) and `bias` (zeros) of a layer normalisation.

    Attributes:
        shape: [embed], or [experts, embed] for one normalisation per expert.
        axes: logical axis names.
        has_bias: False for no parameter; the bias is then 0.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    has_bias: bool = True

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns (scale, bias)."""
        scale = parameter(self, "scale", nn.initializers.ones, self.shape, self.axes)
        if not self.has_bias:
            return scale, jnp.zeros(self.shape)
        return scale, parameter(self, "bias", nn.initializers.zeros, self.shape, self.axes)


def split_over_batch(
    activations: Float[Array, "batch *features"],
) -> Float[Array, "batch *features"]:
    """Splits the first axis over the devices that share a batch, and no other axis.

    Otherwise the compiler may split activations as `fsdp` splits kernels and then exchange
    activations, which are many times larger than the kernels it would have to gather. Without a
    mesh (`jax.set_mesh`), or if the batch is not divisible, nothing changes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Inside `jax.shard_map` the rows at hand are those of one device already.
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    axes = tuple(axis for axis in BATCH_AXES if axis in free)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if parts == 1 or activations.shape[0] % parts:
        return activations
    return jax.lax.with_sharding_constraint(activations, PartitionSpec(axes))


def mean_over_tokens(
    hidden: Float[Array, "batch length embed"], mask: Bool[Array, "batch length"]
) -> Float[Array, "batch embed"]:
    """Mean of hidden states over real tokens, in float32; 0 if there are none."""
    weight = mask[..., None].astype(jnp.float32)
    total = (hidden.astype(jnp.float32) * weight).sum(1)
    return total / jnp.maximum(weight.sum(1), 1.0)
