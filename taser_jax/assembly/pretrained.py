"""Pretrained checkpoints as the initial parameters of training or encoding."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from taser_jax.assembly.pretrained_words import check_words
from taser_jax.interop.hub import fetch
from taser_jax.interop.pretrained import (
    load_pretrained,
    load_pretrained_t5,
    load_trained_by_t5x,
)
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.models.fusion import BertFusionConfig, T5FusionConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.progress import phase


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Weights that encoders start from.

    Attributes:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint, of T5 or of a dual
            encoder of ours (`interop.t5x_model`).
        num_layers: number of its first blocks to keep (BERT only); None keeps all.
        passage_source: another checkpoint for passages, where roles have weights of their own.
    """

    source: str
    num_layers: int | None = None
    passage_source: str | None = None


def read_pretrained(
    pretrained: Pretrained,
    *,
    config: ModelConfig,
    params: Params,
    vocabulary: pathlib.Path | None,
) -> Params:
    """Reads pretrained weights into the shape of a model.

    Args:
        pretrained: where they lie, and which blocks are taken.
        config: the model.
        params: its parameters; abstract ones will do.
        vocabulary: what texts were tokenised with; compared with the checkpoint's own.

    Returns:
        NumPy arrays where the checkpoint has the parameter, the leaf of `params` elsewhere
        (routers, a fusion's decoder).

    Raises:
        ConfigError: sizes or vocabularies differ; the message has both.
        DataError: missing or damaged files.
    """
    for source in (pretrained.source, pretrained.passage_source):
        if vocabulary is not None and source is not None:
            check_words(fetch(source), vocabulary)
    with phase(f"read {pretrained.source}"):
        trained = load_trained_by_t5x(pretrained.source, config=config, params=params)
        if trained is not None:
            return trained
        return _READERS[config.kind](pretrained, config, params)


def _read_bert(pretrained: Pretrained, config: Any, params: Params) -> Params:
    return load_pretrained(
        pretrained.source,
        config=config,
        params=params,
        num_layers=pretrained.num_layers,
        passage_source=pretrained.passage_source,
    )


def _read_t5(pretrained: Pretrained, config: Any, params: Params) -> Params:
    return load_pretrained_t5(pretrained.source, config=config, params=params)


_READERS: dict[str, Callable[[Pretrained, Any, Params], Params]] = {
    DualEncoderConfig.kind: _read_bert,
    BertFusionConfig.kind: _read_bert,
    T5DualEncoderConfig.kind: _read_t5,
    T5FusionConfig.kind: _read_t5,
}


def place_pretrained(loaded: Params, *, params: Params) -> Params:
    """Replaces parameters by those read, on the same devices; the others stay.

    Args:
        loaded: from `read_pretrained`.
        params: the model's parameters, on their devices.
    """

    def place(read: object, drawn: jax.Array) -> jax.Array:
        if not isinstance(read, np.ndarray):
            return drawn
        return jax.make_array_from_callback(
            drawn.shape, drawn.sharding, lambda index: read[index].astype(drawn.dtype)
        )

    return jax.tree.map(place, loaded, params)
