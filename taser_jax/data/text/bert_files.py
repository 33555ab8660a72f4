"""The only reader of BERT's tokenizer files in Hugging Face directories, in plain Python."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from taser_jax.data.text.vocabulary_files import read_bytes
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.json_fields import JsonField, JsonType

VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
CONFIG_FILE = "config.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100

_FLAG, _TEXT = JsonField(JsonType.BOOLEAN), JsonField(JsonType.STRING)
_ID = JsonField(JsonType.INTEGER, required=True, minimum=0)
_ADDED = {"content": dataclasses.replace(_TEXT, required=True), "special": _FLAG}
_KIND = JsonField(JsonType.OBJECT, fields={"type": _TEXT})
_TOKENIZER_FIELDS = {
    "model": JsonField(
        JsonType.OBJECT,
        required=True,
        fields={"type": _TEXT, "vocab": JsonField((JsonType.OBJECT, JsonType.LIST))},
    ),
    "normalizer": JsonField(
        JsonType.OBJECT,
        fields={
            "type": _TEXT,
            **dict.fromkeys(
                ("lowercase", "strip_accents", "handle_chinese_chars", "clean_text"), _FLAG
            ),
        },
    ),
    "pre_tokenizer": _KIND,
    "added_tokens": JsonField(
        JsonType.LIST, items=JsonField(JsonType.OBJECT, fields={**_ADDED, "id": _ID})
    ),
}
_CONFIG_FIELDS = {
    **dict.fromkeys(("do_lower_case", "strip_accents", "tokenize_chinese_chars"), _FLAG),
    "added_tokens_decoder": JsonField(
        JsonType.OBJECT, items=JsonField(JsonType.OBJECT, fields=_ADDED)
    ),
}
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
        found = {}
        if self.strips_accents != self.lower_case:
            found["strip_accents"] = self.strips_accents
        if not self.split_ideographs:
            found["split_ideographs"] = False
        return found


@dataclasses.dataclass(frozen=True)
class BertFiles:
    """The content of a directory's tokenizer files.

    Attributes:
        pieces: the pieces in the order of their ids.
        splitting: how texts become words.
        where: the file that the pieces came from.
    """

    pieces: tuple[str, ...]
    splitting: WordSplitting
    where: str


def read_bert_files(
    directory: str | os.PathLike[str],
    *,
    vocab_file: str | None = None,
    lower_case: bool | None = None,
) -> BertFiles:
    """Reads the tokenizer of a BERT from `tokenizer.json`, `vocab.txt`, or both.

    Args:
        directory: local or `gs://`.
        vocab_file: name of the file of pieces, which must exist; None: `vocab.txt`, if it exists.
        lower_case: replaces the files' setting.

    Raises:
        DataError: neither file exists, one is damaged, they disagree, or there are more pieces than
            rows in the table that `config.json` describes.
        ConfigError: a tokenizer that splits words differently from BERT's, or has added tokens.
    """
    folder = epath.Path(directory)
    words, tokenizer_path = folder / (vocab_file or VOCAB_FILE), folder / TOKENIZER_FILE
    has_words = vocab_file is not None or words.exists()
    tokenizer = read_json(tokenizer_path, fields=_TOKENIZER_FIELDS, absent={})
    if not tokenizer and not has_words:
        raise DataError(
            "no BERT vocabulary in this directory" if folder.is_dir() else "no such directory",
            where=os.fspath(directory),
            expected=f"{VOCAB_FILE} or {TOKENIZER_FILE}",
            fix="give the directory of a BERT with its tokenizer's files, or make a vocabulary "
            "with `taser vocab`",
        )
    if tokenizer:
        _check_kind(tokenizer, str(tokenizer_path))
    config = read_json(folder / TOKENIZER_CONFIG_FILE, fields=_CONFIG_FIELDS, absent={})
    splitting = _splitting(config, tokenizer.get("normalizer", {}), folder, lower_case)
    if has_words:
        pieces, where = read_vocab_txt(words), str(words)
        if tokenizer:
            _check_agreement(pieces, _pieces(tokenizer, str(tokenizer_path)), words, tokenizer_path)
    else:
        pieces, where = _pieces(tokenizer, str(tokenizer_path)), str(tokenizer_path)
    _check_added(_added_tokens(folder, tokenizer, config), piece_ids(pieces, where), where)
    check_rows(folder, len(pieces), where=where)
    return BertFiles(tuple(pieces), splitting, where)


def read_vocab_txt(path: str | os.PathLike[str]) -> list[str]:
    """The pieces of a `vocab.txt`: one per line; the id is the line number minus one.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        text = read_bytes(os.fspath(path)).decode("utf-8")
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
    if not any(pieces):
        raise DataError("the vocabulary is empty", where=where, expected="one piece per line")
    place = f"{where}:%d" if where.endswith(".txt") else f"{where}, id %d"
    shift = int(where.endswith(".txt"))
    ids: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        if not piece:
            raise DataError(
                "an empty line", where=place % (i + shift), expected="one piece per line"
            )
        if piece in ids:
            raise DataError(
                f"piece {piece!r} is also on line {ids[piece] + 1}",
                where=place % (i + shift),
                expected="each piece once",
            )
        ids[piece] = i
    for name in SPECIAL_TOKENS[:4]:
        if name not in ids:
            raise DataError(
                f"no line {name!r}",
                where=where,
                expected=f"lines {', '.join(SPECIAL_TOKENS[:4])}",
                fix="check that this is a BERT vocab.txt; `taser vocab` makes one",
            )
    if ids["[PAD]"] != 0:
        raise DataError(
            "[PAD] is not id 0", where=place % (ids["[PAD]"] + shift), expected="[PAD] first"
        )
    return ids


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
    path = epath.Path(directory) / CONFIG_FILE
    rows = JsonField(JsonType.INTEGER, minimum=1)
    config = read_json(path, fields={"vocab_size": rows}, absent={})
    if config.get("vocab_size", size) < size:
        raise DataError(
            f"the vocabulary has {size:,} ids",
            where=where,
            expected=f"at most {config['vocab_size']:,}, the rows of the embedding table ({path}, "
            "field 'vocab_size')",
            fix="take the tokenizer's files and the weights from the same model",
        )


def _check_kind(tokenizer: Mapping[str, Any], where: str) -> None:
    for (part, name), expected in _FIXED.items():
        found = (tokenizer.get(part) or {}).get(name, None if name == "type" else expected)
        if type(found) is not type(expected) or found != expected:
            raise ConfigError(
                f"a tokenizer of type {found!r}"
                if (part, name) == ("model", "type")
                else f"{part}.{name} is {found!r}",
                where=f"{where}, field '{part}.{name}'",
                expected=f"{expected!r}, as BERT's tokenizers have it",
                fix="choose a checkpoint with a tokenizer of BERT",
            )


def _splitting(
    config: Mapping[str, Any],
    normalizer: Mapping[str, Any],
    folder: epath.Path,
    lower_case: bool | None,
) -> WordSplitting:
    """Both files' settings, which must agree where both have them."""
    values: dict[str, Any] = {}
    for ours, (named, in_normalizer) in _SPLITTING.items():
        values[ours] = config.get(named, normalizer.get(in_normalizer))
        if named in config and normalizer.get(in_normalizer, config[named]) != config[named]:
            raise DataError(
                f"{named} is {str(config[named]).lower()}",
                where=str(folder / TOKENIZER_CONFIG_FILE),
                expected=f"{str(normalizer[in_normalizer]).lower()}, as normalizer.{in_normalizer} "
                f"in {folder / TOKENIZER_FILE}",
                fix="correct the file that is wrong: the model was trained with one of the two",
            )
    if lower_case is not None:
        values["lower_case"] = lower_case
    return WordSplitting(**{name: value for name, value in values.items() if value is not None})


def _pieces(tokenizer: Mapping[str, Any], where: str) -> list[str]:
    ids = tokenizer["model"].get("vocab") or {}
    if not isinstance(ids, dict) or not all(type(id) is int for id in ids.values()):
        raise DataError("no ids of pieces", where=f"{where}, field 'model.vocab'")
    pieces = sorted(ids, key=functools.partial(dict.__getitem__, ids))
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise DataError(
            "ids with gaps or repetitions",
            where=f"{where}, field 'model.vocab'",
            expected=f"ids 0..{len(pieces) - 1}",
        )
    return pieces


def _check_agreement(
    lines: Sequence[str], pieces: Sequence[str], words: epath.Path, tokenizer: epath.Path
) -> None:
    if list(lines) == list(pieces):
        return
    both = zip(lines, pieces, strict=False)
    first = next((i for i, (a, b) in enumerate(both) if a != b), min(len(lines), len(pieces)))
    there = repr(pieces[first]) if first < len(pieces) else f"only {len(pieces):,} pieces"
    raise DataError(
        repr(lines[first]) if first < len(lines) else f"only {len(lines):,} pieces",
        where=f"{words}:{first + 1}",
        expected=f"what {tokenizer} has as id {first}: {there}",
        fix="delete the file that is not of these weights",
    )


def _added_tokens(
    folder: epath.Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, str, int | None, bool]]:
    """Added tokens as (place, token, id, whether it is special)."""
    place = f"{folder / TOKENIZER_FILE}, field 'added_tokens'"
    for token in tokenizer.get("added_tokens", ()):
        yield place, token["content"], token["id"], token.get("special", False)
    place = f"{folder / TOKENIZER_CONFIG_FILE}, field 'added_tokens_decoder'"
    for id, token in config.get("added_tokens_decoder", {}).items():
        number = int(id) if id.isascii() and id.isdigit() else None
        yield place, token["content"], number, token.get("special", False)
    path = folder / ADDED_TOKENS_FILE
    for content, number in read_json(path, absent={}).items():
        # This older file does not say which are special; only tokens beyond the pieces matter.
        yield str(path), content, number, True


def _check_added(
    added: Iterator[tuple[str, str, int | None, bool]], ids: Mapping[str, int], where: str
) -> None:
    """Refuses added tokens other than special tokens that are pieces (plain text inside texts)."""
    for place, content, id, special in added:
        if ids.get(content) == id and (special or content in SPECIAL_TOKENS):
            continue
        raise ConfigError(
            f"an added token, {content!r} with id {id}",
            where=place,
            expected=f"special tokens that are pieces of {where}, and no others: texts would not "
            "get the ids that the weights know",
            fix="choose a checkpoint without added tokens",
        )
