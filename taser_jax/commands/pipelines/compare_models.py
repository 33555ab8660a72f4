"""The models that `taser compare` trains: their weights, experts and steps, and what they cost."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping
from typing import TypeVar

from taser_jax.assembly.config import TrainingConfig
from taser_jax.commands.pipelines.compare_plan import Plan
from taser_jax.commands.pipelines.retrieval_stages import System
from taser_jax.commands.train import train
from taser_jax.devices.hosts import writes
from taser_jax.interop.pretrained import (
    pretrained_bert,
    pretrained_normalization,
    pretrained_pooling,
)
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import ModelConfig

MEASURED_STEPS = 6
ConfigT = TypeVar("ConfigT")


def filled(config: ConfigT, **values: object) -> ConfigT:
    """A configuration in which fields that have their defaults get other values.

    Example:
        >>> filled(Pretrained("minilm", num_layers=2), num_layers=3).num_layers  # doctest: +SKIP
        2
    """
    fields = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    unset = {name: value for name, value in values.items() if getattr(config, name) == fields[name]}
    return dataclasses.replace(config, **unset)  # type: ignore[type-var]


def with_weights(model: ModelConfig, pretrained: str | None) -> ModelConfig:
    """The model with the sizes, pooling and normalisation of the pretrained weights."""
    assert isinstance(model, DualEncoderConfig)
    if pretrained is None:
        # From random weights the mean over tokens learns faster than [CLS].
        return filled(model, pooling=Pooling.MEAN)
    return filled(
        dataclasses.replace(model, bert=pretrained_bert(pretrained, numerics=model.bert)),
        pooling=pretrained_pooling(pretrained),
        normalization=pretrained_normalization(pretrained),
    )


def untrained_system(systems: Mapping[str, System]) -> System:
    """One plain tower with the same pretrained weights."""
    model = next(iter(systems.values())).model
    assert isinstance(model, DualEncoderConfig)
    return System(
        DualEncoderConfig(bert=model.bert, pooling=model.pooling, normalization=model.normalization)
    )


def with_trained_experts(model: ModelConfig, chosen: Plan) -> ModelConfig:
    """The model with experts in trained blocks alone: one that is frozen is no expert.

    The frozen blocks are then those of the other systems, which share their states.
    """
    assert isinstance(model, DualEncoderConfig)
    blocks = model.transformer.num_layers
    if not chosen.frozen_blocks or model.experts.num_experts == 1:
        return model
    trained = [
        block for block in model.experts.specialized_blocks(blocks) if block > chosen.frozen_blocks
    ]
    experts = filled(model.experts, blocks=tuple(trained or [blocks]))
    return dataclasses.replace(model, experts=experts)


def planned(
    training: TrainingConfig, chosen: Plan, *, states_dir: str, is_pretrained: bool
) -> TrainingConfig:
    """The training with a plan's steps and frozen blocks.

    Args:
        training: all else.
        chosen: the plan.
        states_dir: where states of frozen blocks are kept.
        is_pretrained: whether the initial weights may be the best.
    """
    frozen = training.train_from_block or chosen.frozen_blocks
    period = max(5, chosen.steps // 4)
    loop = dataclasses.replace(
        filled(training.loop, evaluation_period=period),
        train_steps=chosen.steps,
        # Pretrained weights stay where no later checkpoint is better.
        validates_first=is_pretrained,
    )
    warmup = max(1, chosen.steps // 10)
    return dataclasses.replace(
        training,
        loop=loop,
        optimizer=dataclasses.replace(training.optimizer, warmup_steps=warmup),
        train_from_block=frozen,
        states_dir=states_dir if frozen else None,
    )


@writes("{model_dir}")
def measure(
    *,
    model_dir: str,
    token_store: str,
    model: ModelConfig,
    training: TrainingConfig,
    text_tokens: float,
    batch_tokens: float,
) -> dict[str, float]:
    """Seconds of a step, of a start, and of encoding the collection, from a few steps.

    Args:
        model_dir: of a model that is deleted again.
        token_store: tokens of the collection.
        model: the model.
        training: its training.
        text_tokens: tokens of all passages.
        batch_tokens: tokens of a training batch.
    """
    # What a killed run left would be resumed, with fewer steps to time or none.
    shutil.rmtree(model_dir, ignore_errors=True)
    start = time.monotonic()
    summary = train(model_dir=model_dir, token_store=token_store, model=model, training=training)
    wall = time.monotonic() - start
    shutil.rmtree(model_dir)
    assert summary is not None
    step = 1 / summary.steps_per_second
    return {
        "step_seconds": step,
        "start_seconds": max(0.0, wall - training.loop.train_steps * step),
        # Forward and backward are three forward passes.
        "encode_seconds": text_tokens * step / (3 * batch_tokens),
    }
