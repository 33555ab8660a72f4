"""Whether texts were tokenised as pretrained weights know them."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

if TYPE_CHECKING:
    from taser_jax.data.text.vocabularies import Vocabulary

_FILES = ("vocab.txt", "tokenizer.json", "vocabulary.json", "spiece.model")


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
        if not any((directory / name).is_file() for name in _FILES):
            logger.warning(
                "%s has no tokenizer: whether texts have the ids that the pretrained weights know "
                "was not checked",
                directory,
            )
            return
    difference = _difference(load_vocabulary(vocabulary), load_vocabulary(checkpoint))
    if difference is not None:
        raise ConfigError(
            f"the token store's vocabulary {difference}",
            where=str(vocabulary),
            fix=f"tokenize with --gin.VOCABULARY={checkpoint}",
        )


def _difference(used: Vocabulary, pretrained: Vocabulary) -> str | None:
    """How the vocabulary used differs from that of pretrained weights; None if ids are the same."""
    from taser_jax.data.text.hugging_face import TokenizerJsonVocabulary, WordPieceVocabulary
    from taser_jax.data.text.sentencepiece import SentencePieceVocabulary
    from taser_jax.data.text.vocabulary_files import first_difference

    match used, pretrained:
        case TokenizerJsonVocabulary(), TokenizerJsonVocabulary():
            is_same = used.content == pretrained.content
            return None if is_same else "is another tokenizer.json than the weights'"
        case SentencePieceVocabulary(), SentencePieceVocabulary():
            is_same = used.model == pretrained.model
            return None if is_same else "is another SentencePiece model than the weights'"
        case WordPieceVocabulary(), WordPieceVocabulary():
            if used.pieces != pretrained.pieces:
                line, ours, theirs = first_difference(used.pieces, pretrained.pieces)
                return f"differs from the weights' from line {line} on: {ours}, not {theirs}"
            for name in ("lower_case", "strips_accents", "split_ideographs"):
                ours, theirs = (getattr(v.splitting, name) for v in (used, pretrained))
                if ours != theirs:
                    return f"has {name} {ours}, and the weights' {theirs}"
            return None
    return f"is of kind {used.kind}, and the weights' of kind {pretrained.kind}"
