"""From a pretrained checkpoint to the parameters that a training, or an encoding, starts with."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from taser_jax.errors import ConfigError
from taser_jax.interop.hub import fetch
from taser_jax.interop.pretrained import load_pretrained
from taser_jax.interop.t5_pretrained import load_pretrained_t5
from taser_jax.models.build import ModelConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.progress import phase

Params = Any
VOCAB_FILE = "vocab.txt"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Weights that encoders start from.

    Attributes:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint.
        num_layers: keep so many of its first blocks (BERT only); None keeps all.
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
        (routers).

    Raises:
        ConfigError: sizes or vocabularies that differ; both are told.
        DataError: missing or damaged files.
    """
    with phase(f"read {pretrained.source}"):
        if isinstance(config, T5DualEncoderConfig):
            loaded = load_pretrained_t5(pretrained.source, config=config, params=params)
        else:
            loaded = load_pretrained(
                pretrained.source,
                config=config,
                params=params,
                num_layers=pretrained.num_layers,
                layers=pretrained.layers,
                passage_source=pretrained.passage_source,
            )
    if vocabulary is not None:
        _check_vocabulary(fetch(pretrained.source), vocabulary)
    return loaded


def place_pretrained(loaded: Params, *, params: Params) -> Params:
    """Puts what was read where parameters lie; parameters that were not read stay.

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
    """Refuses texts that were split by another WordPiece vocabulary than the weights know."""
    theirs, ours = checkpoint / VOCAB_FILE, vocabulary / VOCAB_FILE
    if not (theirs.is_file() and ours.is_file()):
        return
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
        fix=f"tokenize with --gin.VOCABULARY={checkpoint}",
    )
