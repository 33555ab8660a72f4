"""T5 and T5 1.1: the encoder, and the decoder at its first position."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from taser_jax.models import t5_layers
from taser_jax.models.batch import Augmented, States, Tokens
from taser_jax.models.bert import EncoderOutput
from taser_jax.models.dual_encoder import Params
from taser_jax.models.layers import Dropout, Kernel
from taser_jax.models.stack import BlockCall, Scan, by_remat, run_blocks, split_over_batch
from taser_jax.models.t5_layers import PositionBias, T5Config, T5Initialization

# T5 starts its decoder with the padding token.
DECODER_START_ID = 0


_DIVISORS = (
    (re.compile(r"(^|/)token_embedder/embedding\b"), 100.0),
    (re.compile(r"attention/out/kernel\b"), 100.0),
    (re.compile(r"(^|/)mlp/(wi|wi_1|wo)/kernel\b"), 10.0),
)


def decoder_flops(t5: T5Config, length: int) -> int:
    """Model FLOPs of a decoder block at its one position, which attends to L encoded tokens.

    With the sizes of `T5DualEncoderConfig.block_flops`:
        2·d·a·2 (value, out of self-attention) + 2·d·a·4 (query into the encoder's space, value,
        out) + 2·heads·L·d·2 (scores, mean) + 2·d·f·m
    """
    products = 6 * t5.num_heads * t5.head_dim + 2 * t5.num_heads * length
    return 2 * t5.embed_dim * (products + t5.mlp_dim * (len(t5.mlp_activations) + 1))


def rescale(params: Params, initialization: T5Initialization) -> Params:
    """Rescales the parameters of a STANDARD T5, or of towers of it, to `initialization`."""
    if initialization is T5Initialization.STANDARD:
        return params

    def divide(path: KeyPath, leaf: ArrayLike) -> ArrayLike:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, divisor in _DIVISORS:
            if pattern.search(name):
                return leaf / divisor
        return leaf

    return jax.tree_util.tree_map_with_path(divide, params)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward (pre-norm), each with a residual connection."""

    config: T5Config
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
        position_bias: Float[Array, "heads length length"] | None,
    ) -> tuple[Float[Array, "batch length embed"], None]:
        """Applies the block; if `position_bias` is None, the block has a table of its own."""
        config = self.config
        if position_bias is None:
            position_bias = _relative_positions(config)(hidden.shape[1])
        dropout = Dropout(config.dropout_rate, deterministic=self.deterministic)
        norm = t5_layers.RmsNorm(config.rms_norm_epsilon, name="pre_attention_layer_norm")
        attention = t5_layers.SelfAttention(config, self.deterministic, name="attention")
        hidden += dropout(attention(norm(hidden), mask=mask, position_bias=position_bias))
        return hidden + _feed_forward(config, hidden, dropout), None


def _feed_forward(
    config: T5Config, hidden: Float[Array, "*batch embed"], dropout: Dropout
) -> Float[Array, "*batch embed"]:
    """Norm, feed-forward and dropout, inside a compact method."""
    feed_forward = t5_layers.FeedForward(config, bool(dropout.deterministic), name="mlp")
    norm = t5_layers.RmsNorm(config.rms_norm_epsilon, name="pre_mlp_layer_norm")
    return dropout(feed_forward(norm(hidden)))


class DecoderLayer(nn.Module):
    """A block of the decoder at the first position."""

    config: T5Config
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch embed"],
        encoded: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
    ) -> tuple[Float[Array, "batch embed"], None]:
        """Applies the block."""
        config = self.config
        if config.position_bias is PositionBias.PER_LAYER:
            _relative_positions(config)(1)
        dropout = Dropout(config.dropout_rate, deterministic=self.deterministic)
        norm = t5_layers.RmsNorm(config.rms_norm_epsilon, name="pre_self_attention_layer_norm")
        own = t5_layers.FirstSelfAttention(config, self.deterministic, name="self_attention")
        hidden += dropout(own(norm(hidden)))
        norm = t5_layers.RmsNorm(config.rms_norm_epsilon, name="pre_cross_attention_layer_norm")
        name = "encoder_decoder_attention"
        attention = t5_layers.FirstCrossAttention(config, self.deterministic, name=name)
        hidden += dropout(attention(norm(hidden), encoded, mask=mask))
        return hidden + _feed_forward(config, hidden, dropout), None


_ENCODER_LAYERS, _DECODER_LAYERS = by_remat(EncoderLayer), by_remat(DecoderLayer)


class Encoder(nn.Module):
    """`num_layers` blocks that share one position bias, and a final norm.

    Attributes:
        config: sizes and numerics.
        frozen_blocks: number of first blocks that run as at inference, without gradients.
    """

    config: T5Config
    frozen_blocks: int = 0

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
        *,
        train: bool,
        first: int = 0,
        output: EncoderOutput = EncoderOutput.ALL_TOKENS,
    ) -> Float[Array, "batch length embed"]:
        """The states of all tokens, or those of the frozen blocks, which have no final norm.

        Args:
            hidden: the embedded tokens, or the output of the blocks before `first`.
            mask: True at real tokens.
            train: True enables dropout.
            first: the first block to run.
            output: ALL_TOKENS or FROZEN.
        """
        config, frozen = self.config, self.frozen_blocks
        last = frozen if output is EncoderOutput.FROZEN else config.num_layers
        dropout = Dropout(config.dropout_rate, deterministic=not train)
        position_bias = None
        if config.position_bias is PositionBias.SHARED:
            position_bias = _relative_positions(config)(hidden.shape[1])
        layer_class = _ENCODER_LAYERS[config.remat]

        def call(i: int) -> BlockCall:
            return BlockCall(
                layer_class(config, not train or i < frozen, parent=None), (mask, position_bias)
            )

        hidden = split_over_batch(hidden if frozen else dropout(hidden))
        hidden, _ = run_blocks(
            self,
            first,
            [call(i) for i in range(first, last)],
            hidden,
            frozen=frozen,
            scanned=train and config.scan is Scan.BLOCKS,
        )
        if output is EncoderOutput.FROZEN:
            return hidden
        return dropout(t5_layers.RmsNorm(config.rms_norm_epsilon, name="encoder_norm")(hidden))


class Decoder(nn.Module):
    """`num_decoder_layers` blocks at the first position, and a final norm."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch embed"],
        encoded: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
        *,
        train: bool,
    ) -> Float[Array, "batch embed"]:
        """The first position's output, given its embedded token."""
        config = self.config
        dropout = Dropout(config.dropout_rate, deterministic=not train)
        # A single position has no distances; the table exists because checkpoints have it.
        if config.position_bias is PositionBias.SHARED:
            _relative_positions(config)(1)
        layer = _DECODER_LAYERS[config.remat](config, deterministic=not train, parent=None)
        # A loop would lose what its blocks sow.
        sows = self.is_mutable_collection(t5_layers.ATTENTION)
        is_scanned = train and config.scan is Scan.BLOCKS and not sows
        calls = [BlockCall(layer, (encoded, mask))] * config.num_decoder_layers
        hidden = split_over_batch(dropout(hidden))
        hidden, _ = run_blocks(self, 0, calls, hidden, frozen=0, scanned=is_scanned)
        return dropout(t5_layers.RmsNorm(config.rms_norm_epsilon, name="decoder_norm")(hidden))


def _relative_positions(config: T5Config) -> t5_layers.RelativePositionBias:
    return t5_layers.RelativePositionBias(
        config.num_heads, config.num_buckets, config.max_distance, name="relpos_bias"
    )


class T5(nn.Module):
    """T5 without its language-model head.

    Parameters: `token_embedder/embedding`, `encoder/layers_i/...`, `encoder/encoder_norm/scale`,
    `encoder/relpos_bias/rel_embedding`, and the same for `decoder` if it is used.
    """

    config: T5Config
    frozen_blocks: int = 0

    def setup(self) -> None:
        """Creates the token table and the stacks."""
        config = self.config
        shape, axes = (config.vocab_size, config.embed_dim), ("vocab", "embed")
        init = nn.initializers.normal(1.0)
        self.token_embedder = Kernel(shape, axes, init, called="embedding")
        self.encoder = Encoder(config, self.frozen_blocks)
        self.decoder = Decoder(config)

    def encode(
        self,
        tokens: Tokens | States,
        *,
        train: bool = False,
        output: EncoderOutput = EncoderOutput.ALL_TOKENS,
    ) -> Float[Array, "batch length embed"]:
        """The encoder's hidden states, in `config.dtype`, or those of its frozen blocks.

        Args:
            tokens: ids and mask, or the output of the frozen blocks.
            train: True enables dropout, from the rng "dropout".
            output: the states of all blocks, or those of the frozen ones.
        """
        if isinstance(tokens, States):
            first, hidden = self.frozen_blocks, jnp.asarray(tokens.hidden).astype(self.config.dtype)
        else:
            first, hidden = 0, self._embed(jnp.asarray(tokens.ids))
        mask = jnp.asarray(tokens.mask)
        return self.encoder(hidden, mask, train=train, first=first, output=output)

    def first_decoder_output(
        self, tokens: Tokens | States | Augmented, *, train: bool = False
    ) -> Float[Array, "batch embed"]:
        """The decoder's last hidden state for the start token, normalised, in `config.dtype`."""
        assert not isinstance(tokens, Augmented)
        encoded = self.encode(tokens, train=train)
        return self.decode_first(encoded, jnp.asarray(tokens.mask), train=train)

    def decode_first(
        self,
        encoded: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
        *,
        train: bool = False,
    ) -> Float[Array, "batch embed"]:
        """The decoder's output for the start token, given the states that it attends to."""
        start = jnp.full(encoded.shape[:1], DECODER_START_ID, jnp.int32)
        return self.decoder(self._embed(start), encoded, mask, train=train)

    def _embed(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape embed"]:
        return jnp.take(self.token_embedder(), ids, axis=0).astype(self.config.dtype)
