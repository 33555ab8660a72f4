"""Arithmetic and memory of a T5 dual encoder, by the rules of `flops` and `memory`."""

from __future__ import annotations

from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding


def forward_flops(config: T5DualEncoderConfig, *, length: int) -> int:
    """Matrix FLOPs to encode one text.

    Encoder block on L tokens, width d, joined head width a = heads·kv, inner width f, m kernels in
    the feed-forward (2, or 3 if gated):
        2·L·d·a·4 (query, key, value, out) + 2·L·L·a·2 (scores, values) + 2·L·d·f·m
    Decoder block, at its one position:
        2·d·a·2 (value, out of self-attention) + 2·d·a·4 (query into the encoder's space, value,
        out) + 2·heads·L·d·2 (scores, mean) + 2·d·f·m
    """
    t5 = config.t5
    embed, attention = t5.embed_dim, t5.num_heads * t5.head_dim
    feed_forward = 2 * embed * t5.mlp_dim * (len(t5.mlp_activations) + 1)
    block = length * (2 * 4 * embed * attention + 2 * 2 * length * attention + feed_forward)
    total = t5.num_layers * block
    if config.embedding is T5Embedding.FIRST_DECODER_OUTPUT:
        cross = 2 * 2 * t5.num_heads * length * embed
        total += t5.num_decoder_layers * (2 * 6 * embed * attention + cross + feed_forward)
    if config.projection_dim is not None:
        total += 2 * embed * config.projection_dim
    return total


def block_bytes(config: T5Config, length: int, *, width_bytes: int) -> int:
    """Activations that an encoder block keeps for a text.

    Five vectors of the model's width a token, four of the heads', two of the inner width for each
    kernel into it, and an attention map. Dropout keeps no mask.
    """
    inner = 2 * len(config.mlp_activations) * config.mlp_dim
    vectors = 5 * config.embed_dim + 4 * config.num_heads * config.head_dim + inner
    attention_map = config.num_heads * length * length
    return (length * vectors + attention_map) * width_bytes


def decoder_block_bytes(config: T5Config, length: int, *, width_bytes: int) -> int:
    """Activations that a decoder block keeps for a text, at its one position."""
    inner = 2 * len(config.mlp_activations) * config.mlp_dim
    heads = 2 * config.num_heads * config.embed_dim
    vectors = 7 * config.embed_dim + 5 * config.num_heads * config.head_dim + inner + heads
    return (vectors + config.num_heads * length) * width_bytes
