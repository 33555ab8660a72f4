"""What all vocabularies share: names of files, and the directory that each is saved to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar, Literal, TypedDict

import msgspec
from etils import epath

from taser_jax.storage import checksums
from taser_jax.storage.artifacts import (
    check_version,
    fingerprint,
    read_json,
    replacing,
    write_json,
)
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import Natural, Positive, read_typed, typed

METADATA = "vocabulary.json"
FORMAT_VERSION = 1
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


class VocabularyMetadata(msgspec.Struct):
    """`vocabulary.json`, as far as all vocabularies share it."""

    kind: Literal["wordpiece", "sentencepiece", "tokenizer_json"]
    fingerprint: str
    extra_ids: Natural = 0


class _WeightsConfig(TypedDict, total=False):
    vocab_size: Positive


class SavedVocabulary:
    """A vocabulary that `save` writes to a directory of its own.

    Attributes:
        kind: its kind in `vocabulary.json`.
        file: name of its own file.
        content: content of that file.
        size: number of ids, up to the largest.
        fingerprint: fingerprint of everything that decides the ids of a text.

    Args:
        content: content of its own file.
        size: number of ids.
        deciding: what decides the ids of a text.
        settings: further fields of `vocabulary.json`.
    """

    kind: ClassVar[str]
    file: ClassVar[str]

    def __init__(
        self, content: bytes, *, size: int, deciding: Sequence[str | bytes], **settings: object
    ) -> None:
        self.content, self.size, self._settings = content, size, settings
        self.fingerprint = fingerprint([self.kind, *deciding])

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the vocabulary's own file, then `vocabulary.json`."""
        folder = epath.Path(directory)
        with replacing(folder / self.file) as scratch:
            scratch.write_bytes(self.content)
        metadata = {"format_version": FORMAT_VERSION, "kind": self.kind, "size": self.size}
        metadata |= {"fingerprint": self.fingerprint, **self._settings}
        write_json(folder / METADATA, metadata)


def whole(text: str) -> str:
    """The text with "?" for lone surrogates, which JSON can contain but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads a local or `gs://` file.

    Raises:
        DataError: it is missing or cannot be read.
    """
    try:
        return epath.Path(path).read_bytes()
    except OSError as error:
        fix = (
            "give a vocabulary directory, a BERT vocab.txt or a SentencePiece .model, or a "
            "VOCAB_SIZE with which `taser tokenize` trains one"
        )
        raise DataError(f"cannot be read ({error})", where=os.fspath(path), fix=fix) from error


def read_metadata(directory: str) -> VocabularyMetadata:
    """`vocabulary.json` of a saved vocabulary, whose files are compared with their record.

    Raises:
        DataError: a damaged file; not JSON, of an unknown kind, or of another format version.
    """
    path, again = f"{directory}/{METADATA}", "delete the directory and train the vocabulary again"
    checksums.check_directory(directory, fix=again)
    value = read_json(path, fix=again)
    check_version(value, FORMAT_VERSION, where=path, fix=again)
    return typed(value, VocabularyMetadata, where=path, fix=again)


def check_rows(directory: str | os.PathLike[str], size: int, *, where: str) -> None:
    """Refuses a vocabulary with ids beyond the embedding table of the weights in the directory.

    More rows than ids are fine: tables are padded.

    Args:
        directory: a directory that may have a `config.json`.
        size: number of ids.
        where: the vocabulary.

    Raises:
        DataError: naming both files and the field.
    """
    path = epath.Path(directory) / "config.json"
    config = read_typed(path, _WeightsConfig, absent=_WeightsConfig())
    if config.get("vocab_size", size) < size:
        raise DataError(
            f"the vocabulary has {size:,} ids",
            where=where,
            expected=f"at most {config['vocab_size']:,}, the rows of the embedding table ({path}, "
            "field 'vocab_size')",
            fix="take the tokenizer's files and the weights from the same model",
        )
