"""What all encoders have: configuration, parameters with logical axes, normalisation, dropout."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, UInt32

from taser_jax.devices.mesh import current_shard
from taser_jax.models.stack import Remat, Scan
from taser_jax.storage.errors import check_fields
from taser_jax.storage.typed_files import Checked

Initializer = Callable[..., Any]
DTYPES = ("float32", "bfloat16")
# Fields of every Transformer that the shapes of its parameters show.
SIZES = ("vocab_size", "embed_dim", "num_layers", "num_heads", "head_dim", "mlp_dim")
# Random words of a dropout mask.
_WORDS = 2
# An odd number: multiplying by it spreads neighbouring positions over 32 bits.
_SPREAD = 0x9E3779B1


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
        equation: einsum equation of two operands; every index is in two of its terms, or in all.
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
    left_indices, right_indices, output = equation.replace("->", ",").split(",")
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


def row_by_row(states: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
    """The states; on a GPU in this order in memory.

    XLA would put the batch or the positions innermost, as pooling likes to read them, and transpose
    the states for every product. Only for training: an export must not hold the constraint.
    """
    rows = functools.partial(with_layout_constraint, layouts=Layout(tuple(range(states.ndim))))
    return jax.lax.platform_dependent(states, cuda=rows, rocm=rows, default=lambda x: x)


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
        called: the kernel's name; in a layer normalisation, which has no inputs, `scale`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: tuple[int, ...]
    kernel_init: Initializer
    has_bias: bool = True
    called: str = "kernel"

    @nn.compact
    def __call__(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns (kernel, bias)."""
        outputs = [axis for axis in range(len(self.shape)) if axis not in self.inputs]
        shape = tuple(self.shape[axis] for axis in outputs)
        axes = tuple(self.axes[axis] for axis in outputs)
        kernel = parameter(self, self.called, self.kernel_init, self.shape, self.axes)
        if not self.has_bias:
            return kernel, jnp.zeros(shape)
        return kernel, parameter(self, "bias", nn.initializers.zeros, shape, axes)


class Kernel(nn.Module):
    """Holds one kernel or table.

    Attributes:
        shape: shape of the kernel.
        axes: logical axis names.
        kernel_init: initialiser of [inputs, outputs], reshaped to `shape`.
        inputs: number of leading axes that are inputs.
        called: its name.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kernel_init: Initializer
    inputs: int = 1
    called: str = "kernel"

    @nn.compact
    def __call__(self) -> Float[Array, "..."]:
        """Returns the kernel."""
        flat = (math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :]))

        def initialize(
            key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
        ) -> jax.Array:
            return self.kernel_init(key, flat, dtype).reshape(shape)

        return parameter(self, self.called, initialize, self.shape, self.axes)


def mean_over_tokens(
    hidden: Float[Array, "batch length embed"], mask: Bool[Array, "batch length"]
) -> Float[Array, "batch embed"]:
    """Mean of hidden states over real tokens, in float32; 0 if there are none."""
    weight = mask[..., None].astype(jnp.float32)
    total = (hidden.astype(jnp.float32) * weight).sum(1)
    return total / jnp.maximum(weight.sum(1), 1.0)


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


def _drop_forward(x: jax.Array, salt: jax.Array, rate: float) -> tuple[jax.Array, jax.Array]:
    return drop(x, salt, rate), salt


def _drop_backward(rate: float, salt: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return drop(cotangent, salt, rate), None


drop.defvjp(_drop_forward, _drop_backward)


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
