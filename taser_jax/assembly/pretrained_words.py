"""Whether texts were tokenised as pretrained weights know them."""

from __future__ import annotations

import pathlib

from taser_jax.data.text.bert_files import (
    TOKENIZER_FILE,
    VOCAB_FILE,
    BertFiles,
    WordSplitting,
    read_bert_files,
    read_vocab_txt,
)
from taser_jax.data.text.vocabulary_files import FIELDS as SAVED_FIELDS
from taser_jax.data.text.vocabulary_files import METADATA, SPLITTING
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

_SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.model")


def check_words(checkpoint: pathlib.Path, vocabulary: pathlib.Path) -> None:
    """Refuses texts that were tokenised otherwise than for the pretrained weights.

    Only files are compared, since a training machine has no tokeniser.

    Args:
        checkpoint: the weights' directory.
        vocabulary: what the texts were tokenised with, as a token store keeps it. If either has no
            words to compare, the log says so.

    Raises:
        ConfigError: words, or how texts are split into them, differ.
        DataError: the checkpoint's tokenizer is damaged or is not of its weights.
    """
    theirs, ours = _model(checkpoint), _model(vocabulary)
    for directory, model in ((checkpoint, theirs), (vocabulary, ours)):
        names = (VOCAB_FILE, TOKENIZER_FILE, METADATA)
        if model is None and not any((directory / name).is_file() for name in names):
            logger.warning(
                "%s has no tokenizer: whether texts have the ids that the pretrained weights know "
                "was not checked",
                directory,
            )
            return
    fix = f"tokenize with --gin.VOCABULARY={theirs or checkpoint}"
    if (theirs is None) != (ours is None):
        kinds = {True: "WordPiece vocabulary", False: "SentencePiece model"}
        raise ConfigError(
            f"the token store has a {kinds[ours is None]}",
            where=str(vocabulary),
            expected=f"a {kinds[theirs is None]}, as the pretrained weights know ({checkpoint})",
            fix=fix,
        )
    if theirs is not None and ours is not None:
        if theirs.read_bytes() != ours.read_bytes():
            raise ConfigError(
                "the token store's SentencePiece model is another than the pretrained weights'",
                where=str(ours),
                expected=str(theirs),
                fix=fix,
            )
        return
    known = read_bert_files(checkpoint)
    if (vocabulary / VOCAB_FILE).is_file():
        _check_pieces(known, vocabulary / VOCAB_FILE, fix=fix)
    if (vocabulary / METADATA).is_file():
        _check_splitting(known, vocabulary / METADATA, fix=fix)


def _model(directory: pathlib.Path) -> pathlib.Path | None:
    """A directory's SentencePiece model."""
    files = (directory / name for name in _SENTENCEPIECE_FILES)
    return next((file for file in files if file.is_file()), None)


def _check_pieces(known: BertFiles, ours: pathlib.Path, *, fix: str) -> None:
    used = tuple(read_vocab_txt(ours))
    if known.pieces == used:
        return
    both = zip(known.pieces, used, strict=False)
    line = next((i for i, (a, b) in enumerate(both) if a != b), min(len(known.pieces), len(used)))
    raise ConfigError(
        f"the token store's vocabulary has {len(used):,} entries and differs from line {line + 1} "
        "on",
        where=str(ours),
        expected=f"the {len(known.pieces):,} entries that the pretrained weights know "
        f"({known.where})",
        fix=fix,
    )


def _check_splitting(known: BertFiles, path: pathlib.Path, *, fix: str) -> None:
    saved = read_json(path, fields=SAVED_FIELDS)
    used = WordSplitting(**{name: saved[name] for name in SPLITTING if name in saved})
    for name, ours, theirs in (
        ("lower_case", used.lower_case, known.splitting.lower_case),
        ("strip_accents", used.strips_accents, known.splitting.strips_accents),
        ("split_ideographs", used.split_ideographs, known.splitting.split_ideographs),
    ):
        if ours != theirs:
            raise ConfigError(
                f"the token store's texts were tokenised with {name} {ours}",
                where=str(path),
                expected=f"{theirs}, as the pretrained weights know them",
                fix=fix,
            )
