"""Loads pretrained weights into a dual encoder: DPR, TASER or Shared."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from taser_jax.interop.bert import bert_config, check_shapes, encoder_from_tensors
from taser_jax.interop.encoder_settings import read_encoder_settings
from taser_jax.interop.hub import fetch
from taser_jax.interop.plain import from_plain_encoders
from taser_jax.interop.sizes import check_sizes
from taser_jax.interop.tensors import read_shapes, read_tensors
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import Normalization, Params
from taser_jax.storage.errors import ConfigError

Source = str | os.PathLike[str]

# Fields that must be equal for the weights to have the same meaning.
_MUST_MATCH = (
    *("vocab_size", "embed_dim", "num_layers", "num_heads", "head_dim", "mlp_dim"),
    *("max_length", "type_vocab_size", "activation", "layer_norm_epsilon"),
)


def pretrained_bert(
    source: Source,
    *,
    num_layers: int | None = None,
    layers: Sequence[int] | None = None,
    numerics: BertConfig = BertConfig(),
) -> BertConfig:
    """The configuration of a checkpoint's encoder: its sizes, with the given training numerics.

    Args:
        source: a Hugging Face directory, or an id on its hub.
        num_layers: number of first blocks to keep; None keeps all.
        layers: blocks to keep, numbered from 0, in this order; instead of `num_layers`.
        numerics: source of dropout rates, dtype, rematerialisation and attention kernel.

    Raises:
        DataError: the source does not exist or is damaged.
        ConfigError: another architecture, or blocks that it does not have.
    """
    directory = fetch(source)
    checkpoint = bert_config(directory)
    kept = _kept(checkpoint, num_layers, layers, where=str(source))
    found = dataclasses.replace(checkpoint, num_layers=len(kept))
    # Checked before a model of these sizes is created: wrong ones could fill the memory.
    shapes = read_shapes(directory)
    if shapes is not None:
        check_shapes(shapes, found, where=str(directory), layers=kept)
    return dataclasses.replace(
        found,
        dropout_rate=numerics.dropout_rate,
        attention_dropout_rate=numerics.attention_dropout_rate,
        dtype=numerics.dtype,
        remat=numerics.remat,
        attention=numerics.attention,
    )


def pretrained_pooling(source: Source) -> Pooling:
    """The pooling that a checkpoint's modules.json names; [CLS] without a modules.json."""
    settings = read_encoder_settings(fetch(source))
    return Pooling.CLS if settings is None else settings.pooling


def pretrained_normalization(source: Source) -> Normalization:
    """The normalisation that a checkpoint's modules.json names; NONE without a modules.json."""
    settings = read_encoder_settings(fetch(source))
    return Normalization.NONE if settings is None else settings.normalization


def load_pretrained(
    source: Source,
    *,
    config: DualEncoderConfig,
    params: Params,
    num_layers: int | None = None,
    layers: Sequence[int] | None = None,
    passage_source: Source | None = None,
) -> Params:
    """A dual encoder that starts from a pretrained BERT.

    Every tower is a copy of it, and every expert an exact copy of its block's feed-forward with the
    output LayerNorm (TASER, section 3.3). Routers keep their initial values.

    Args:
        source: a Hugging Face directory, or an id on its hub.
        config: configuration of the dual encoder; its sizes must be the checkpoint's.
        params: initial parameters of the dual encoder.
        num_layers: as given to `pretrained_bert`.
        layers: as given to `pretrained_bert`.
        passage_source: another checkpoint for passages, if queries and passages have their own,
            as in exports with one encoder per role.

    Returns:
        NumPy parameters of the same tree, with the routers of `params`.

    Raises:
        DataError: a source does not exist or is damaged.
        ConfigError: the dual encoder's sizes are not the checkpoint's.
    """
    query = passage = _read(source, config.bert, num_layers, layers)
    if passage_source is not None:
        passage = _read(passage_source, config.bert, num_layers, layers)
    return from_plain_encoders(query, passage, config=config, params=params)


def _read(
    source: Source,
    config: BertConfig,
    num_layers: int | None,
    layers: Sequence[int] | None,
) -> Params:
    directory = fetch(source)
    checkpoint, where = bert_config(directory), str(directory)
    kept = _kept(checkpoint, num_layers, layers, where=where)
    found = dataclasses.replace(checkpoint, num_layers=len(kept))
    check_sizes(
        found,
        config,
        names=_MUST_MATCH,
        where=where,
        fix="take the sizes from the checkpoint: bert = pretrained_bert(source)",
        fixes={
            "vocab_size": "tokenize with the checkpoint's own vocabulary",
            "num_layers": "set num_layers or layers to keep only some of its blocks",
        },
    )
    return encoder_from_tensors(read_tensors(directory), found, where=where, layers=kept)


def _kept(
    checkpoint: BertConfig, num_layers: int | None, layers: Sequence[int] | None, *, where: str
) -> tuple[int, ...]:
    """Numbers of the checkpoint's blocks that are kept, from 0."""
    if num_layers is not None and layers is not None:
        raise ConfigError("both num_layers and layers are given", where=where, fix="drop one")
    if layers is None:
        layers = range(checkpoint.num_layers if num_layers is None else num_layers)
    if not layers or not set(layers) <= set(range(checkpoint.num_layers)):
        asked = f"layers {tuple(layers)}" if num_layers is None else f"{num_layers} layers"
        raise ConfigError(
            f"{asked} of a checkpoint of {checkpoint.num_layers}",
            where=where,
            expected=f"at least one, all within 0..{checkpoint.num_layers - 1}",
        )
    return tuple(layers)
