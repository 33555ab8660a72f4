"""Pretrained checkpoints as the initial parameters of training or encoding."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.interop.hub import fetch
from taser_jax.interop.pretrained import load_pretrained, load_pretrained_t5
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase

if TYPE_CHECKING:
    from taser_jax.data.text.vocabularies import Vocabulary

_TOKENIZERS = ("vocab.txt", "tokenizer.json", "vocabulary.json", "spiece.model")


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
    pretrained: Pretrained, *, config: ModelConfig, params: Params, vocabulary: pathlib.Path | None
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
    # Asks a hub once.
    source, passage_source = fetch(pretrained.source), None
    if pretrained.passage_source is not None:
        passage_source = fetch(pretrained.passage_source)
    for directory in (source, passage_source):
        if vocabulary is not None and directory is not None:
            check_words(directory, vocabulary)
    with phase(f"read {pretrained.source}"):
        if isinstance(config, DualEncoderConfig):
            return load_pretrained(
                source,
                config=config,
                params=params,
                num_layers=pretrained.num_layers,
                passage_source=passage_source,
            )
        assert isinstance(config, T5DualEncoderConfig)
        return load_pretrained_t5(source, config=config, params=params)


def drawn_without(
    loaded: Params, initialise: Callable[[jax.Array], Params]
) -> Callable[[jax.Array], Params]:
    """`initialise` with zeros for what was read, until `place_pretrained` replaces them.

    Compiling the draws of a BERT of six blocks takes ten seconds.

    Args:
        loaded: from `read_pretrained`.
        initialise: key -> the model's parameters.
    """

    def draw(key: jax.Array) -> Params:
        return jax.tree.map(
            lambda read, drawn: jnp.zeros_like(drawn) if isinstance(read, np.ndarray) else drawn,
            loaded,
            initialise(key),
        )

    return draw


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


def check_words(checkpoint: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """Refuses texts that were tokenised otherwise than for the pretrained weights.

    Args:
        checkpoint: the weights' directory.
        vocabulary: what the texts were tokenised with, as a token store keeps it. If either has no
            tokenizer to compare, the log says so.

    Raises:
        ConfigError: words, or how texts are split into them, differ.
        DataError: the checkpoint's tokenizer is damaged or is not of its weights.
    """
    # Training imports no tokenizers unless its weights are pretrained.
    from taser_jax.data.text.vocabularies import load_vocabulary

    for directory in (checkpoint, vocabulary):
        if not any((directory / name).is_file() for name in _TOKENIZERS):
            logger.warning(
                "%s has no tokenizer: whether texts have the ids that the pretrained weights know "
                "was not checked",
                directory,
            )
            return
    used, pretrained = load_vocabulary(vocabulary), load_vocabulary(checkpoint)
    if _deciding(used) != _deciding(pretrained):
        raise ConfigError(
            f"the token store's vocabulary ({used.kind}) has other pieces, or splits texts "
            f"otherwise, than that of the weights ({pretrained.kind})",
            where=str(vocabulary),
            fix=f"tokenize with --gin.VOCABULARY={checkpoint}",
        )


def _deciding(vocabulary: Vocabulary) -> str | bytes:
    """What decides a text's ids: T5's extra ids, which follow the pieces, do not."""
    from taser_jax.data.text.sentencepiece import SentencePieceVocabulary

    if isinstance(vocabulary, SentencePieceVocabulary):
        return vocabulary.content
    return vocabulary.fingerprint
