"""Any configured model, without naming its kind: what commands and pipelines use."""

from __future__ import annotations

import dataclasses

import flax.linen as nn

from taser_jax.models.bert import Remat
from taser_jax.models.dual_encoder import DualEncoder, DualEncoderConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoder, T5DualEncoderConfig

ModelConfig = DualEncoderConfig | T5DualEncoderConfig


def build_model(config: ModelConfig) -> nn.Module:
    """The dual encoder of a configuration: a module with `encode(tokens, role=, task=, train=)`."""
    if isinstance(config, T5DualEncoderConfig):
        return T5DualEncoder(config)
    return DualEncoder(config)


def embedding_dim(config: ModelConfig) -> int:
    """Width of the embeddings."""
    if isinstance(config, T5DualEncoderConfig):
        return config.projection_dim or config.t5.embed_dim
    return config.bert.embed_dim


def vocabulary_size(config: ModelConfig) -> int:
    """Rows of the token table."""
    if isinstance(config, T5DualEncoderConfig):
        return config.t5.vocab_size
    return config.bert.vocab_size


def with_vocabulary_size(config: ModelConfig, size: int) -> ModelConfig:
    """The same model with another token table."""
    if isinstance(config, T5DualEncoderConfig):
        return dataclasses.replace(config, t5=dataclasses.replace(config.t5, vocab_size=size))
    return dataclasses.replace(config, bert=dataclasses.replace(config.bert, vocab_size=size))


def remat(config: ModelConfig) -> Remat:
    """What the backward pass recomputes."""
    return config.t5.remat if isinstance(config, T5DualEncoderConfig) else config.bert.remat
