"""BERT's word pieces, and what all vocabularies share: the directory that each is saved to."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from etils import epath

from taser_jax.storage.artifacts import (
    fingerprint,
    replacing,
    write_json,
)
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Positive, read_typed

if TYPE_CHECKING:
    import tokenizers

METADATA = "vocabulary.json"
FORMAT_VERSION = 1
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100
_BATCH = 1024
# Our field -> its names in tokenizer_config.json and in tokenizer.json's normalizer.
_SPLITTING = {
    "lower_case": ("do_lower_case", "lowercase"),
    "strip_accents": ("strip_accents", "strip_accents"),
    "split_ideographs": ("tokenize_chinese_chars", "handle_chinese_chars"),
}
# Values that every BERT's tokenizer.json has; others are not supported.
_FIXED = {
    ("model", "type"): "WordPiece",
    ("model", "unk_token"): "[UNK]",
    ("model", "continuing_subword_prefix"): "##",
    ("model", "max_input_chars_per_word"): MAX_WORD_CHARACTERS,
    ("normalizer", "type"): "BertNormalizer",
    ("normalizer", "clean_text"): True,
    ("pre_tokenizer", "type"): "BertPreTokenizer",
}


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


class _TokenizerConfig(TypedDict, total=False):
    do_lower_case: bool
    strip_accents: bool
    tokenize_chinese_chars: bool


@dataclasses.dataclass(frozen=True)
class WordSplitting:
    """How BERT's texts become words, before words become pieces.

    Attributes:
        lower_case: whether letters are lower-cased.
        strip_accents: whether combining marks are removed; None means only if letters are
            lower-cased.
        split_ideographs: whether each CJK ideograph is a word (`tokenize_chinese_chars`).
    """

    lower_case: bool = True
    strip_accents: bool | None = None
    split_ideographs: bool = True

    @property
    def strips_accents(self) -> bool:
        """Whether combining marks are removed."""
        return self.lower_case if self.strip_accents is None else self.strip_accents

    @property
    def unusual(self) -> dict[str, bool]:
        """Settings that differ from those of BERT's cased and uncased tokenizers; empty for these.

        Example:
            >>> WordSplitting(lower_case=True, strip_accents=False).unusual
            {'strip_accents': False}
        """
        unusual = {}
        if self.strips_accents != self.lower_case:
            unusual["strip_accents"] = self.strips_accents
        if not self.split_ideographs:
            unusual["split_ideographs"] = False
        return unusual


class WordPieceVocabulary(SavedVocabulary):
    """Splits text into BERT's word pieces.

    `encode` uses Hugging Face's `tokenizers`, except that "[CLS]" and the like in a text are
    ordinary text. `TextGraph`, for programs without Python, gives the same ids except for 614
    characters (uncased; cased 150), nearly all newer than Unicode 3.2, that TensorFlow Text
    classifies differently.

    Example:
        vocabulary = WordPieceVocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##do"])
        vocabulary.encode(["Undo it"])   # [[4, 5, 1]]

    Args:
        pieces: the pieces in the order of their ids; "##" starts those that continue a word.
        lower_case: lower-case and strip accents, as BERT's uncased vocabularies require.
        splitting: how texts become words; replaces `lower_case`.
        where: file that the pieces came from, for messages.

    Raises:
        DataError: no pieces, a repeated piece, or a missing special token.
    """

    kind = "wordpiece"
    file = VOCAB_FILE

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        lower_case: bool = True,
        splitting: WordSplitting | None = None,
        where: str = VOCAB_FILE,
    ) -> None:
        self.pieces = tuple(pieces)
        self.splitting = splitting or WordSplitting(lower_case=lower_case)
        self._ids = piece_ids(self.pieces, where)
        self.cls_id, self.sep_id = self._ids["[CLS]"], self._ids["[SEP]"]
        unusual = [f"{name} {value}" for name, value in self.splitting.unusual.items()]
        super().__init__(
            "".join(f"{piece}\n" for piece in self.pieces).encode("utf-8"),
            size=len(self.pieces),
            deciding=[str(self.lower_case), *unusual, *self.pieces],
            lower_case=self.lower_case,
            **self.splitting.unusual,
        )

    @property
    def lower_case(self) -> bool:
        """Whether letters are lower-cased."""
        return self.splitting.lower_case

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return token_ids(self._tokenizer, texts)

    @functools.cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return wordpiece_tokenizer(self._ids, self.splitting)

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "[unused1]"; None if there is no such piece."""
        return self._ids.get(piece)


def wordpiece_tokenizer(ids: dict[str, int], splitting: WordSplitting) -> tokenizers.Tokenizer:
    """BERT's tokenizer in the `tokenizers` library, without special tokens.

    Args:
        ids: piece -> id.
        splitting: how texts become words.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=splitting.lower_case,
        strip_accents=splitting.strip_accents,
        handle_chinese_chars=splitting.split_ideographs,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def read_bert(
    directory: str | os.PathLike[str], *, vocab_file: str | None = None
) -> WordPieceVocabulary:
    """Reads the tokenizer of a BERT from its `tokenizer.json`, or else from its `vocab.txt`.

    As in transformers, a `tokenizer_config.json` beside it decides on casing, accents and
    ideographs.

    Args:
        directory: local or `gs://`.
        vocab_file: name of the file of pieces; None: as above.

    Raises:
        DataError: neither file exists, one is damaged, or there are more pieces than rows in the
            table that `config.json` describes.
        ConfigError: a tokenizer that splits words differently from BERT's, or has added tokens.
    """
    folder = epath.Path(directory)
    path, tokenizer = folder / TOKENIZER_FILE, None
    if path.exists():
        tokenizer = _read_tokenizer(path)
    elif (folder / ADDED_TOKENS_FILE).exists():
        raise _added_tokens(folder / ADDED_TOKENS_FILE)
    if tokenizer is None or vocab_file is not None:
        path = folder / (vocab_file or VOCAB_FILE)
        pieces = read_vocab_txt(path)
    else:
        ids = tokenizer["model"]["vocab"]
        pieces = sorted(ids, key=ids.__getitem__)
    config = read_typed(folder / TOKENIZER_CONFIG_FILE, _TokenizerConfig, absent=_TokenizerConfig())
    normalizer: Mapping[str, Any] = tokenizer["normalizer"] if tokenizer else {}
    splitting: dict[str, Any] = {}
    for name, (in_config, in_normalizer) in _SPLITTING.items():
        value = config.get(in_config, normalizer.get(in_normalizer))
        splitting |= {} if value is None else {name: value}
    vocabulary = WordPieceVocabulary(
        pieces, splitting=WordSplitting(**splitting), where=os.fspath(path)
    )
    check_rows(folder, vocabulary.size, where=os.fspath(path))
    return vocabulary


def _read_tokenizer(path: epath.Path) -> dict[str, Any]:
    """A tokenizer.json of BERT, with all of its fields.

    Raises:
        DataError: the file is damaged.
        ConfigError: it describes a tokenizer of another kind, or one with added tokens.
    """
    tokenizer = json.loads(tokenizer_of(path.read_bytes(), os.fspath(path)).to_str())
    for (part, name), value in _FIXED.items():
        actual = (tokenizer[part] or {}).get(name)
        if actual != value:
            problem = f"{part}.{name} is {actual!r}, and {value!r} in BERT's tokenizers"
            fix = "choose a checkpoint with a tokenizer of BERT"
            raise ConfigError(problem, where=os.fspath(path), fix=fix)
    ids = tokenizer["model"]["vocab"]
    if sorted(ids.values()) != list(range(len(ids))):
        where = f"{path}, field 'model.vocab'"
        raise DataError(f"ids with gaps or repetitions, not 0 to {len(ids) - 1}", where=where)
    for token in tokenizer["added_tokens"]:
        # Special tokens that are pieces are ordinary text inside texts.
        is_special = token["special"] or token["content"] in SPECIAL_TOKENS
        if not is_special or ids.get(token["content"]) != token["id"]:
            raise _added_tokens(f"{path}, field 'added_tokens'", f", such as {token['content']!r}")
    return tokenizer


def _added_tokens(where: object, example: str = "") -> ConfigError:
    return ConfigError(
        f"added tokens{example}: texts would not get the ids that the weights know",
        where=str(where),
        fix="choose a checkpoint whose added tokens are special pieces of its vocabulary",
    )


def read_vocab_txt(path: str | os.PathLike[str]) -> list[str]:
    """The pieces of a `vocab.txt`: one per line; the id is the line number minus one.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error})", where=os.fspath(path)) from error
    # Not splitlines(): a piece may be one of the characters that it treats as line ends.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def piece_ids(pieces: Sequence[str], where: str) -> dict[str, int]:
    """Piece -> id, checked.

    Raises:
        DataError: no pieces, an empty or repeated one, or a missing special token.
    """
    fix = "check that this is a BERT vocab.txt, one piece per line"
    ids: dict[str, int] = {}
    for id, piece in enumerate(pieces):
        if not piece or ids.setdefault(piece, id) != id:
            problem = f"piece {id} is {piece!r}, which is {'a repetition' if piece else 'empty'}"
            raise DataError(problem, where=where, fix=fix)
    missing = [name for name in SPECIAL_TOKENS[:4] if name not in ids]
    if missing or ids["[PAD]"] != 0:
        problem = f"no piece {', '.join(missing)}" if missing else "[PAD] is not id 0"
        raise DataError(problem, where=where, fix=fix)
    return ids


def tokenizer_of(content: bytes, where: str) -> tokenizers.Tokenizer:
    """A tokenizer of Hugging Face's library, from the content of its file."""
    # A training machine has no tokenizers, unless its weights are pretrained.
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:
        problem = f"not a tokenizer of `tokenizers` ({error})"
        raise DataError(problem, where=where) from error


def token_ids(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without special tokens."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        batch = [whole(text) for text in texts[start : start + _BATCH]]
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids += [encoding.ids for encoding in encoded]
    return ids
