"""Pretrained checkpoints as the initial parameters of training or encoding."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from taser_jax.artifacts import read_json
from taser_jax.errors import ConfigError
from taser_jax.interop.hub import fetch
from taser_jax.interop.pretrained import load_pretrained
from taser_jax.interop.t5_pretrained import load_pretrained_t5
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.bert_fusion import BertFusionConfig
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.models.t5_fusion import T5FusionConfig
from taser_jax.progress import phase

VOCAB_FILE = "vocab.txt"
SENTENCEPIECE_FILE = "spiece.model"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Weights that encoders start from.

    Attributes:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint.
        num_layers: number of its first blocks to keep (BERT only); None keeps all.
        layers: keep these blocks, numbered from 0, in place of `num_layers`.
        passage_source: another checkpoint for passages, where roles have weights of their own.
    """

    source: str
    num_layers: int | None = None
    layers: Sequence[int] | None = None
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
    with phase(f"read {pretrained.source}"):
        loaded = _READERS[config.kind](pretrained, config, params)
    if vocabulary is not None:
        _check_vocabulary(fetch(pretrained.source), vocabulary)
    return loaded


def _read_bert(pretrained: Pretrained, config: Any, params: Params) -> Params:
    return load_pretrained(
        pretrained.source,
        config=config,
        params=params,
        num_layers=pretrained.num_layers,
        layers=pretrained.layers,
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

    def place(read: Any, drawn: jax.Array) -> jax.Array:
        if not isinstance(read, np.ndarray):
            return drawn
        return jax.make_array_from_callback(
            drawn.shape, drawn.sharding, lambda index: read[index].astype(drawn.dtype)
        )

    return jax.tree.map(place, loaded, params)


def _check_vocabulary(checkpoint: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """Rejects texts that were tokenised differently than for the pretrained weights.

    Only files are compared, since a training machine has no tokeniser.
    """
    fix = f"tokenize with --gin.VOCABULARY={checkpoint}"
    theirs, ours = checkpoint / VOCAB_FILE, vocabulary / VOCAB_FILE
    if theirs.is_file() and ours.is_file():
        _check_words(theirs, ours, fix=fix)
    theirs, ours = checkpoint / SENTENCEPIECE_FILE, vocabulary / "sentencepiece.model"
    if theirs.is_file() and ours.is_file() and theirs.read_bytes() != ours.read_bytes():
        raise ConfigError(
            "the token store's SentencePiece model is another than the pretrained weights'",
            where=str(ours),
            expected=str(theirs),
            fix=f"tokenize with --gin.VOCABULARY={theirs}",
        )
    known = _setting(checkpoint / "tokenizer_config.json", "do_lower_case")
    used = _setting(vocabulary / "vocabulary.json", "lower_case")
    if None not in (known, used) and known != used:
        raise ConfigError(
            f"the token store's texts were tokenised with lower_case {used}",
            where=str(vocabulary / "vocabulary.json"),
            expected=f"{known}, as the pretrained weights know them",
            fix=fix,
        )


def _check_words(theirs: pathlib.Path, ours: pathlib.Path, *, fix: str) -> None:
    known = theirs.read_text(encoding="utf-8").splitlines()
    used = ours.read_text(encoding="utf-8").splitlines()
    if known == used:
        return
    line = next(
        (i for i, (a, b) in enumerate(zip(known, used, strict=False)) if a != b),
        min(len(known), len(used)),
    )
    raise ConfigError(
        f"the token store's vocabulary has {len(used):,} entries and differs from line {line + 1} "
        "on",
        where=str(ours),
        expected=f"the {len(known):,} entries that the pretrained weights know ({theirs})",
        fix=fix,
    )


def _setting(path: pathlib.Path, name: str) -> Any:
    """A field of a JSON file; None if either is missing."""
    return read_json(path, absent={}).get(name)
