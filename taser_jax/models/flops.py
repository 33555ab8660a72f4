"""Arithmetic of the matrix products, counted by hand's rules: what model FLOPs utilisation is of.

A product of [m, k] and [k, n] counts 2·m·k·n. Table look-ups, normalisation, softmax and
activations count nothing. Counted on the padded shapes that are really computed.
"""

from __future__ import annotations

import dataclasses

from taser_jax.models import t5_costs
from taser_jax.models.bert import EncoderOutput, Remat, block_output
from taser_jax.models.build import ModelConfig, embedding_dim, remat
from taser_jax.models.dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.routing import Routing
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The arrays of one training step, over all devices.

    Attributes:
        queries: queries in the batch.
        query_length: tokens each, padding included.
        passages: passages in the batch: positives and hard negatives.
        passage_length: tokens each, padding included.
    """

    queries: int
    query_length: int
    passages: int
    passage_length: int


def forward_flops(config: ModelConfig, *, batch_size: int, length: int) -> int:
    """Matrix FLOPs to encode `batch_size` texts of `length` tokens, one expert a token.

    A block on all L tokens, width d, joined head width a = heads·kv, inner width f:
        2·L·d·a·3 (query, key, value) + 2·L·L·a·2 (scores, values) + 2·L·a·d (out) + 2·L·d·f·2 (FFN)
    With [CLS] pooling the last block computes 1 query in place of L: keys and values only are over
    all tokens. A learned router adds 2·d·I a choice. For T5 see `t5_costs.forward_flops`.

    Example:
        BERT-base, one text of 256 tokens, mean pooling: 12 · 3,825,205,248 = 45,902,462,976.
    """
    return batch_size * _text_flops(config, length, all_experts=False)


def training_flops(config: ModelConfig, shape: StepShape) -> int:
    """Model FLOPs of a training step: three forward passes (the backward pass costs two).

    Rematerialisation and experts computed to be masked away do not count: that is MFU's numerator.
    The score matrix of queries × passages is included.
    """
    return 3 * (
        forward_flops(config, batch_size=shape.queries, length=shape.query_length)
        + forward_flops(config, batch_size=shape.passages, length=shape.passage_length)
        + 2 * shape.queries * shape.passages * embedding_dim(config)
    )


def executed_training_flops(config: ModelConfig, shape: StepShape) -> int:
    """FLOPs that a training step executes: all experts of learned routing, and recomputation.

    Four forward passes of the blocks under `Remat.BLOCK`, three otherwise. (GradCache adds one
    more forward pass, which is its caller's to add.)
    """
    passes = 4 if remat(config) is Remat.BLOCK else 3
    blocks = sum(
        batch_size * _text_flops(config, length, all_experts=True)
        for batch_size, length in (
            (shape.queries, shape.query_length),
            (shape.passages, shape.passage_length),
        )
    )
    return passes * blocks + 3 * 2 * shape.queries * shape.passages * embedding_dim(config)


def _text_flops(config: ModelConfig, length: int, *, all_experts: bool) -> int:
    if isinstance(config, T5DualEncoderConfig):
        return t5_costs.forward_flops(config, length=length)
    return sum(_blocks(config, length, all_experts=all_experts))


def _blocks(config: DualEncoderConfig, length: int, *, all_experts: bool) -> list[int]:
    """FLOPs of each block for one text."""
    bert, experts = config.bert, config.experts
    embed, attention = bert.embed_dim, bert.num_heads * bert.head_dim
    specialized = experts.specialized_blocks(bert.num_layers)
    pooled = config.pooling is Pooling.CLS
    wanted = EncoderOutput.FIRST_TOKEN if pooled else EncoderOutput.ALL_TOKENS
    # Det-R computes the experts of one role, and trains by drawing among them.
    computed_experts = experts.num_experts if experts.learned else experts.num_experts // 2

    flops = []
    for block in range(1, bert.num_layers + 1):
        output = block_output(bert, experts, block, wanted)
        queries = 1 if output is EncoderOutput.FIRST_TOKEN else length
        total = 2 * embed * attention * (2 * queries + 2 * length)
        total += 2 * 2 * queries * length * attention
        feed_forward = 2 * 2 * queries * embed * bert.mlp_dim
        if block in specialized:
            feed_forward *= computed_experts if all_experts else 1
            if experts.learned:
                choices = queries if experts.routing is Routing.TOKEN else 1
                total += 2 * embed * experts.num_experts * choices
        flops.append(total + feed_forward)
    return flops
