"""An estimate of what the backward pass keeps: activations of a training step."""

from __future__ import annotations

from taser_jax.models import t5_costs
from taser_jax.models.bert import BertConfig, Remat
from taser_jax.models.build import ModelConfig
from taser_jax.models.flops import StepShape
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding

_BYTES = {"float32": 4, "bfloat16": 2}


def activation_bytes(config: ModelConfig, shape: StepShape, *, batch_devices: int = 1) -> int:
    """Bytes of activations a device holds at the peak of a training step.

    An estimate, meant for "does it fit", not a measurement: it counts, for each block and token,
    9 vectors of the model's width, 2 of the feed-forward's inner width (once per expert that
    learned routing computes), and an attention map; dropout keeps no mask. XLA fuses some of them
    away and needs scratch of its own. Under `Remat.BLOCK` a block keeps its input only, and one
    block is recomputed at a time. T5's terms are those of `t5_costs`. The compiler's figure is
    `jax.jit(step).lower(...).compile().memory_analysis()`.

    Args:
        config: the model.
        shape: of the step; with GradCache, of one chunk.
        batch_devices: parts the batch is split into.
    """
    total = 0
    for batch_size, length in (
        (shape.queries, shape.query_length),
        (shape.passages, shape.passage_length),
    ):
        total += _texts_bytes(config, batch_size, length)
    return total // batch_devices


def _texts_bytes(config: ModelConfig, batch_size: int, length: int) -> int:
    if isinstance(config, T5DualEncoderConfig):
        return _t5_texts_bytes(config, batch_size, length)
    bert, experts = config.bert, config.experts
    specialized = experts.specialized_blocks(bert.num_layers)
    blocks = [
        _block_bytes(
            bert, length, experts.num_experts if experts.learned and block in specialized else 1
        )
        for block in range(1, bert.num_layers + 1)
    ]
    if bert.remat is Remat.BLOCK:
        inputs = bert.num_layers * length * bert.embed_dim * _BYTES[bert.dtype]
        return batch_size * (inputs + max(blocks))
    return batch_size * sum(blocks)


def _t5_texts_bytes(config: T5DualEncoderConfig, batch_size: int, length: int) -> int:
    t5, width_bytes = config.t5, _BYTES[config.t5.dtype]
    block = t5_costs.block_bytes(t5, length, width_bytes=width_bytes)
    decoder_block, decoder_layers = 0, 0
    if config.embedding is T5Embedding.FIRST_DECODER_OUTPUT:
        decoder_block = t5_costs.decoder_block_bytes(t5, length, width_bytes=width_bytes)
        decoder_layers = t5.num_decoder_layers
    if t5.remat is Remat.BLOCK:
        inputs = (t5.num_layers * length + decoder_layers) * t5.embed_dim * width_bytes
        return batch_size * (inputs + max(block, decoder_block))
    return batch_size * (t5.num_layers * block + decoder_layers * decoder_block)


def _block_bytes(bert: BertConfig, length: int, computed_experts: int) -> int:
    vectors = length * (9 * bert.embed_dim + 2 * bert.mlp_dim * computed_experts)
    attention_map = bert.num_heads * length * length
    return (vectors + attention_map) * _BYTES[bert.dtype]
