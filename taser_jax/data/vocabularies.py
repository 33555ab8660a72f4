"""Vocabularies: text to token ids, one graph for token stores, questions and exported models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import tensorflow as tf

from taser_jax.data.sentencepiece_vocabulary import SentencePieceVocabulary
from taser_jax.data.vocabulary_files import METADATA, read_bytes, read_metadata
from taser_jax.data.wordpiece import VOCAB_FILE, WordPieceVocabulary
from taser_jax.errors import DataError


class Vocabulary(Protocol):
    """Text to ids and back.

    Attributes:
        kind: "wordpiece" or "sentencepiece".
        pad_id: always 0.
        sep_id: put after a text.
        unk_id: what has no pieces.
    """

    kind: str
    pad_id: int
    sep_id: int
    unk_id: int

    @property
    def cls_id(self) -> int | None:
        """Put before a text; None where the vocabulary has no such token (T5's)."""
        ...

    @property
    def trackables(self) -> tuple[tf.Module, ...]:
        """What a `tf.Module` that calls `encode_tf` must hold to be saved."""
        ...

    @property
    def size(self) -> int:
        """Number of ids."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that decides the ids of a text."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens."""
        ...

    def encode_tf(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Ids of each text, without special tokens. [texts] -> [texts, (pieces)], int32."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without padding, [CLS] and [SEP]."""
        ...

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "[unused1]"; None where there is none."""
        ...

    def save(self, directory: str) -> None:
        """Writes a directory that `load_vocabulary` reads."""
        ...


_KINDS = {kind.kind: kind for kind in (WordPieceVocabulary, SentencePieceVocabulary)}


def load_vocabulary(
    path: str | os.PathLike[str], *, lower_case: bool | None = None
) -> WordPieceVocabulary | SentencePieceVocabulary:
    """Loads a vocabulary, local or `gs://`.

    Args:
        path: a directory that `save` wrote, a BERT checkpoint's directory with a `vocab.txt`, a
            `vocab.txt` itself, or a SentencePiece `.model`.
        lower_case: for a WordPiece `vocab.txt`, which does not say it itself. None: as saved, or as
            `tokenizer_config.json` beside it says, or else True.

    Raises:
        DataError: nothing of the kind is there, or it is damaged.
        FingerprintError: the files are not the ones that were saved.
    """
    path = os.fspath(path).rstrip("/")
    if not tf.io.gfile.isdir(path):
        if path.endswith(".model"):
            return SentencePieceVocabulary.from_file(path)
        return _load_vocab_txt(path, lower_case)
    if not tf.io.gfile.exists(f"{path}/{METADATA}"):
        return _load_vocab_txt(f"{path}/{VOCAB_FILE}", lower_case)
    metadata = read_metadata(path)
    if metadata["kind"] not in _KINDS:
        raise DataError(
            f"kind {metadata['kind']!r}",
            where=f"{path}/{METADATA}, field 'kind'",
            expected=f"one of {', '.join(map(repr, sorted(_KINDS)))}",
        )
    if lower_case is not None and metadata.get("lower_case", lower_case) != lower_case:
        raise DataError(
            f"lower_case is {metadata['lower_case']}, asked for was {lower_case}",
            where=f"{path}/{METADATA}",
            fix=f"give the path of the {VOCAB_FILE} itself to read it otherwise",
        )
    return _KINDS[metadata["kind"]].from_directory(path, metadata)


def _load_vocab_txt(path: str, lower_case: bool | None) -> WordPieceVocabulary:
    if lower_case is None:
        config = os.path.join(os.path.dirname(path), "tokenizer_config.json")
        lower_case = True
        if tf.io.gfile.exists(config):
            lower_case = json.loads(read_bytes(config)).get("do_lower_case", True)
    return WordPieceVocabulary.from_file(path, lower_case=lower_case)
