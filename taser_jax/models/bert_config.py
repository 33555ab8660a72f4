"""The configuration of BERT and of its relatives, and what distinguishes these."""

from __future__ import annotations

import dataclasses
import enum

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from taser_jax.models.layers import Activation, Initializer, TransformerConfig
from taser_jax.models.stack import Remat, Scan
from taser_jax.storage.errors import check_fields
from taser_jax.storage.typed_files import Checked, Positive, PositiveNumber, Rate


class AttentionKernel(enum.Enum):
    """Implementations of softmax(q·kᵀ/√d + b)·v; their values agree to rounding.

    EINSUM moves the heads into the batch dimension before the products, and can drop attention
    probabilities. CUDNN is cuDNN's flash attention (NVIDIA GPUs, bfloat16), which needs even
    numbers of queries and keys; otherwise, as with [CLS] pooling's one query, with a bias b, while
    attention dropout is active (training with `attention_dropout_rate` > 0), or on other devices,
    it is EINSUM.
    """

    EINSUM = "einsum"
    CUDNN = "cudnn"


class Family(enum.Enum):
    """Encoders that `BertEncoder` computes; the values are Hugging Face's `model_type`.

    ROBERTA is also XLM-R and CamemBERT, which differ in their vocabularies alone.
    """

    BERT = "bert"
    DISTILBERT = "distilbert"
    ROBERTA = "roberta"
    MPNET = "mpnet"
    MODERNBERT = "modernbert"
    NOMIC_BERT = "nomic_bert"

    @property
    def traits(self) -> Traits:
        """What a family changes."""
        return _TRAITS[self]


@dataclasses.dataclass(frozen=True)
class Traits:
    """What distinguishes a family; the defaults are BERT's.

    Attributes:
        first_position: row of the first token in the table of positions; None for no table.
        segments: whether there is a table of segments.
        relative_buckets: buckets of distances whose bias all blocks add to attention scores, as in
            T5; 0 for none.
        rotary: whether queries and keys are rotated by their positions.
        pre_norm: whether attention and feed-forward normalise their inputs instead of their
            outputs. The first block's attention then has no norm, and the last block is followed by
            one (ModernBERT).
        biases: whether kernels have biases.
        norm_biases: whether normalisations have biases.
        gated: whether the feed-forward is W₂·(act(W₁·h) ∘ V·h) instead of W₂·act(W₁·h).
    """

    first_position: int | None = 0
    segments: bool = True
    relative_buckets: int = 0
    rotary: bool = False
    pre_norm: bool = False
    biases: bool = True
    norm_biases: bool = True
    gated: bool = False


_TRAITS = {
    Family.BERT: Traits(),
    Family.DISTILBERT: Traits(segments=False),
    # Rows 0 and 1 are for no position and for padding.
    Family.ROBERTA: Traits(first_position=2),
    Family.MPNET: Traits(first_position=2, segments=False, relative_buckets=32),
    Family.MODERNBERT: Traits(
        first_position=None,
        segments=False,
        rotary=True,
        pre_norm=True,
        biases=False,
        norm_biases=False,
        gated=True,
    ),
    Family.NOMIC_BERT: Traits(first_position=None, rotary=True, biases=False, gated=True),
}


@dataclasses.dataclass(frozen=True)
class RotaryConfig(Checked):
    """Rotary positions, and which blocks attend to near tokens alone; defaults are ModernBERT's.

    Attributes:
        theta: base of the rotations in blocks that attend to all tokens.
        local_theta: base in the other blocks.
        local_window: tokens that a local block's tokens attend to, half of them on each side.
        global_every: blocks 1, 1 + n, 1 + 2n, … attend to all tokens; 1 for all blocks.
    """

    theta: PositiveNumber = 160_000.0
    local_theta: PositiveNumber = 10_000.0
    local_window: Positive = 128
    global_every: Positive = 3

    def is_local(self, block: int) -> bool:
        """Whether a block, numbered from 1, attends to near tokens alone."""
        return (block - 1) % self.global_every != 0

    def theta_of(self, block: int) -> float:
        """Base of the rotations of a block, numbered from 1."""
        return self.local_theta if self.is_local(block) else self.theta

    def local_bias(self, length: int) -> Float[Array, "1 length length"]:
        """0 within half a window of a query's position (axis 1), else so low that softmax is 0."""
        steps = np.abs(np.arange(length)[:, None] - np.arange(length))
        # Half of the lowest, which scores can be added to.
        far = np.finfo(np.float32).min / 2
        bias = np.where(steps <= self.local_window // 2, 0.0, far)
        return jnp.asarray(bias[None], jnp.float32)


@dataclasses.dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """Sizes and numerics of a BERT encoder; the defaults are bert-base-uncased.

    Attributes:
        vocab_size: rows of the token table.
        embed_dim: width of the hidden states.
        num_layers: number of blocks.
        num_heads: number of attention heads.
        head_dim: width of a head.
        mlp_dim: inner width of the feed-forward.
        max_length: maximum tokens of a text.
        type_vocab_size: rows of the segment table, in families that have one; every token is of
            segment 0.
        dropout_rate: dropout after embeddings, attention and feed-forward.
        attention_dropout_rate: dropout of attention probabilities.
        layer_norm_epsilon: epsilon of all layer normalisations.
        initializer_stddev: standard deviation of the normal for initial kernels and tables.
        activation: activation of the feed-forward.
        dtype: dtype of activations, "float32" or "bfloat16"; parameters, softmax and normalisation
            statistics, router logits and returned embeddings are always float32.
        remat: rematerialisation.
        scan: whether a training step's blocks are one loop for the compiler.
        attention: attention kernel.
        family: how the encoder differs from BERT.
        rotary: rotary positions and local attention, in families that have them.
    """

    vocab_size: Positive = 30522
    embed_dim: Positive = 768
    num_layers: Positive = 12
    num_heads: Positive = 12
    head_dim: Positive = 64
    mlp_dim: Positive = 3072
    max_length: Positive = 512
    type_vocab_size: Positive = 2
    dropout_rate: Rate = 0.1
    attention_dropout_rate: Rate = 0.1
    layer_norm_epsilon: float = 1e-12
    initializer_stddev: float = 0.02
    activation: Activation = Activation.GELU
    dtype: str = "float32"
    remat: Remat = Remat.NONE
    scan: Scan = Scan.NONE
    attention: AttentionKernel = AttentionKernel.EINSUM
    family: Family = Family.BERT
    rotary: RotaryConfig = RotaryConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.traits.rotary:
            expected = "an even number, for rotary positions"
            check_fields(self, "head_dim", is_valid=lambda n: n % 2 == 0, expected=expected)

    @property
    def traits(self) -> Traits:
        """What the family changes."""
        return self.family.traits

    @property
    def by_distance(self) -> bool:
        """Whether the family has rotary or relative positions."""
        return self.traits.rotary or self.traits.relative_buckets > 0

    @property
    def kernel_init(self) -> Initializer:
        """Initialiser of kernels and tables."""
        return nn.initializers.normal(self.initializer_stddev)
