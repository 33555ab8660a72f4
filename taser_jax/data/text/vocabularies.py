"""Vocabularies: from text to token ids, for token stores, questions and exports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from etils import epath

from taser_jax.data.text.bert_files import (
    TOKENIZER_CONFIG_FILE,
    VOCAB_FILE,
    check_rows,
    read_bert_files,
)
from taser_jax.data.text.sentencepiece import EXTRA_ID, SentencePieceVocabulary
from taser_jax.data.text.vocabulary_files import METADATA, read_metadata
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_fields import JsonField, JsonType

if TYPE_CHECKING:
    import tensorflow as tf


class Vocabulary(Protocol):
    """Converts between text and token ids.

    Attributes:
        kind: "wordpiece" or "sentencepiece".
        pad_id: always 0.
        sep_id: id put after a text.
        unk_id: id of text that has no pieces.
    """

    kind: str
    pad_id: int
    sep_id: int
    unk_id: int

    @property
    def cls_id(self) -> int | None:
        """Id put before a text; None if the vocabulary has no such token (T5's)."""
        ...

    @property
    def trackables(self) -> tuple[tf.Module, ...]:
        """Objects that a `tf.Module` must hold so that it can be saved with `encode_tf`."""
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
        """Id of a piece by its name, such as "[unused1]"; None if there is no such piece."""
        ...

    def save(self, directory: str) -> None:
        """Writes a directory that `load_vocabulary` reads."""
        ...


T5_MODEL_FILE = "spiece.model"
_NAME = JsonField(JsonType.STRING, required=True)
_TOKEN = JsonField(JsonType.OBJECT, fields={"content": _NAME})
_EXTRA_IDS_FIELDS = {
    "extra_ids": JsonField(JsonType.INTEGER, minimum=0),
    "additional_special_tokens": JsonField(
        JsonType.LIST,
        items=JsonField((JsonType.STRING, JsonType.OBJECT), fields={"content": _NAME}),
    ),
    "added_tokens_decoder": JsonField(JsonType.OBJECT, items=_TOKEN),
}
_KINDS = {kind.kind: kind for kind in (WordPieceVocabulary, SentencePieceVocabulary)}


def load_vocabulary(
    path: str | os.PathLike[str],
    *,
    lower_case: bool | None = None,
    extra_ids: int | None = None,
    rows: int | None = None,
) -> WordPieceVocabulary | SentencePieceVocabulary:
    """Loads a vocabulary from a local or `gs://` path.

    Args:
        path: a directory that `save` wrote, a BERT or T5 checkpoint's directory with a
            `tokenizer.json`, `vocab.txt` or `spiece.model`, one of the last two files itself, or
            any SentencePiece `.model`.
        lower_case: for a WordPiece `vocab.txt`, which does not record it. None: as saved, else as
            in the `tokenizer_config.json` or `tokenizer.json` beside it, else True.
        extra_ids: for a SentencePiece `.model`: number of ids after its own, T5's `<extra_id_N>`.
            None: as saved, else as in the `tokenizer_config.json` beside it, else 0.
        rows: rows of the embedding table of the model that the ids are for, at least one per id.

    Raises:
        DataError: there is no vocabulary, it is damaged, or it has more ids than the weights beside
            it have rows, or than `rows`.
        ConfigError: a tokenizer with an unsupported way of splitting words, or with added tokens.
        FingerprintError: the files are not the ones that were saved.
    """
    vocabulary = _load(os.fspath(path).rstrip("/"), lower_case, extra_ids)
    if rows is not None and vocabulary.size > rows:
        raise DataError(
            f"the vocabulary has {vocabulary.size:,} ids",
            where=os.fspath(path),
            expected=f"at most {rows:,}, the rows of the model's embedding table (vocab_size)",
            fix="give the vocabulary that the model was trained with",
        )
    return vocabulary


def _load(
    path: str, lower_case: bool | None, extra_ids: int | None
) -> WordPieceVocabulary | SentencePieceVocabulary:
    if not epath.Path(path).is_dir():
        if path.endswith(".model"):
            return _load_model(path, extra_ids)
        return _load_bert(os.path.dirname(path), os.path.basename(path), lower_case, extra_ids)
    if not epath.Path(path, METADATA).exists():
        if epath.Path(path, T5_MODEL_FILE).exists():
            return _load_model(f"{path}/{T5_MODEL_FILE}", extra_ids)
        return _load_bert(path, None, lower_case, extra_ids)
    metadata = read_metadata(path)
    if metadata["kind"] not in _KINDS:
        raise DataError(
            f"kind {metadata['kind']!r}",
            where=f"{path}/{METADATA}, field 'kind'",
            expected=f"one of {', '.join(map(repr, sorted(_KINDS)))}",
        )
    if lower_case is not None and metadata.get("lower_case", lower_case) != lower_case:
        raise DataError(
            f"lower_case is {metadata['lower_case']}, requested was {lower_case}",
            where=f"{path}/{METADATA}",
            fix=f"give the path of the {VOCAB_FILE} itself to read it with another setting",
        )
    saved = metadata.get("extra_ids", 0)
    if extra_ids is not None and saved != extra_ids:
        raise DataError(
            f"it has {saved} extra ids, requested were {extra_ids}",
            where=f"{path}/{METADATA}",
            fix="give the path of the SentencePiece .model itself to read it with another setting",
        )
    return _KINDS[metadata["kind"]].from_directory(path, metadata)


def _load_model(path: str, extra_ids: int | None) -> SentencePieceVocabulary:
    named = {} if extra_ids is not None else _named_extra_ids(os.path.dirname(path))
    count = len(named) if extra_ids is None else extra_ids
    vocabulary = SentencePieceVocabulary.from_file(path, extra_ids=count)
    check_rows(os.path.dirname(path), vocabulary.size, where=path)
    for name, id in named.items():
        if id is not None and vocabulary.id_of(name) != id:
            raise DataError(
                f"{name} is id {id}",
                where=os.path.join(os.path.dirname(path), TOKENIZER_CONFIG_FILE),
                expected=f"{vocabulary.id_of(name)}: extra ids follow the model's, the first last",
                fix="set tokenize.extra_ids to read the model with another number",
            )
    return vocabulary


def _named_extra_ids(directory: str) -> dict[str, int | None]:
    """The extra ids in a T5's tokenizer_config.json, with their ids if it gives them."""
    path = os.path.join(directory, TOKENIZER_CONFIG_FILE)
    config = read_json(path, fields=_EXTRA_IDS_FIELDS, absent={})
    found: dict[str, int | None] = {
        f"<extra_id_{number}>": None for number in range(config.get("extra_ids", 0))
    }
    for token in config.get("additional_special_tokens", ()):
        found.setdefault(token["content"] if isinstance(token, dict) else token, None)
    for id, token in config.get("added_tokens_decoder", {}).items():
        if not (id.isascii() and id.isdigit()):
            raise DataError(
                f"id {id!r} of {token['content']!r}",
                where=f"{path}, field 'added_tokens_decoder'",
                expected="a whole number",
            )
        found[token["content"]] = int(id)
    return {name: id for name, id in found.items() if EXTRA_ID.fullmatch(name)}


def _load_bert(
    directory: str, vocab_file: str | None, lower_case: bool | None, extra_ids: int | None
) -> WordPieceVocabulary:
    if extra_ids:
        raise DataError(
            f"{extra_ids} extra ids for a WordPiece vocabulary",
            where=os.path.join(directory, vocab_file or VOCAB_FILE),
            expected="a SentencePiece .model: only those take extra ids",
            fix="leave tokenize.extra_ids out",
        )
    files = read_bert_files(directory or ".", vocab_file=vocab_file, lower_case=lower_case)
    return WordPieceVocabulary.from_files(files)
