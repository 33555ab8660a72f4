"""Files of vocabularies: our own directories, and Hugging Face's tokenizer files of BERT."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from etils import epath

from taser_jax.storage import checksums
from taser_jax.storage.artifacts import check_version, read_json, replacing, write_json
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError
from taser_jax.storage.typed_files import Natural, Positive, read_typed

METADATA = "vocabulary.json"
FORMAT_VERSION = 1
_Splitting = Literal["lower_case", "strip_accents", "split_ideographs"]
SPLITTING: tuple[_Splitting, ...] = ("lower_case", "strip_accents", "split_ideographs")
VOCAB_FILE = "vocab.txt"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100


class VocabularyMetadata(TypedDict, total=False):
    """`vocabulary.json`, as far as it is read; `SPLITTING` names the last three fields."""

    format_version: int
    kind: str
    fingerprint: str
    extra_ids: Natural
    lower_case: bool
    strip_accents: bool
    split_ideographs: bool


class _Added(TypedDict):
    content: str
    special: NotRequired[bool | None]


class _Config(TypedDict, total=False):
    """tokenizer_config.json."""

    do_lower_case: bool
    strip_accents: bool
    tokenize_chinese_chars: bool
    added_tokens_decoder: dict[str, _Added]


class _WeightsConfig(TypedDict, total=False):
    vocab_size: Positive


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
        unusual = {}
        if self.strips_accents != self.lower_case:
            unusual["strip_accents"] = self.strips_accents
        if not self.split_ideographs:
            unusual["split_ideographs"] = False
        return unusual


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


def whole(text: str) -> str:
    """The text with "?" for lone surrogates, which JSON can contain but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_bytes(path: str) -> bytes:
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
        raise DataError(f"cannot be read ({error})", where=path, fix=fix) from error


def save_directory(
    directory: str,
    *,
    kind: str,
    fingerprint: str,
    size: int,
    data: tuple[str, bytes],
    **extra: object,
) -> None:
    """Writes the vocabulary's own file, then `vocabulary.json`.

    Args:
        directory: local or `gs://`; created if missing.
        kind: "wordpiece" or "sentencepiece".
        fingerprint: content fingerprint, checked on loading.
        size: number of ids.
        data: name and content of the vocabulary's own file.
        extra: further fields of `vocabulary.json`.
    """
    metadata = {"format_version": FORMAT_VERSION, "kind": kind, "size": size}
    name, content = data
    with replacing(epath.Path(directory) / name) as scratch:
        scratch.write_bytes(content)
    write_json(epath.Path(directory) / METADATA, {**metadata, "fingerprint": fingerprint, **extra})


def read_metadata(directory: str) -> VocabularyMetadata:
    """`vocabulary.json` of a saved vocabulary, whose files are compared with their record.

    Raises:
        DataError: a damaged file; not JSON, without a kind, or of another format version.
    """
    path, again = f"{directory}/{METADATA}", "delete the directory and train the vocabulary again"
    checksums.check_directory(directory, fix=again)
    metadata = read_typed(path, VocabularyMetadata, fix=again)
    check_version(metadata, FORMAT_VERSION, where=path, fix=again)
    if "kind" not in metadata:
        raise DataError("not a vocabulary's metadata: no kind", where=path, fix=again)
    return metadata


def check_fingerprint(directory: str, metadata: VocabularyMetadata, actual: str) -> None:
    """Raises `FingerprintError` if the files are not the ones that were saved."""
    if metadata.get("fingerprint", actual) != actual:
        problem = f"the vocabulary's files have fingerprint {actual}"
        expected = f"{metadata['fingerprint']}, as recorded in {METADATA}"
        fix = "the file was changed after saving: restore it, or make the vocabulary again"
        raise FingerprintError(problem, where=directory, expected=expected, fix=fix)


def read_bert_files(
    directory: str | os.PathLike[str], *, vocab_file: str | None = None
) -> BertFiles:
    """Reads the tokenizer of a BERT from `tokenizer.json`, `vocab.txt`, or both.

    Args:
        directory: local or `gs://`.
        vocab_file: name of the file of pieces, which must exist; None: `vocab.txt`, if it exists.

    Raises:
        DataError: neither file exists, one is damaged, they disagree, or there are more pieces than
            rows in the table that `config.json` describes.
        ConfigError: a tokenizer that splits words differently from BERT's, or has added tokens.
    """
    folder = epath.Path(directory)
    words, tokenizer_path = folder / (vocab_file or VOCAB_FILE), folder / TOKENIZER_FILE
    has_words = vocab_file is not None or words.exists()
    tokenizer = _read_tokenizer(tokenizer_path) if tokenizer_path.exists() else None
    if tokenizer is None and not has_words:
        raise DataError(
            "no BERT vocabulary in this directory" if folder.is_dir() else "no such directory",
            where=os.fspath(directory),
            fix=f"give the directory of a BERT with its {VOCAB_FILE} or {TOKENIZER_FILE}, or a "
            "VOCAB_SIZE with which `taser tokenize` trains a vocabulary",
        )
    config = read_typed(folder / TOKENIZER_CONFIG_FILE, _Config, absent=_Config())
    splitting = _splitting(config, tokenizer["normalizer"] if tokenizer else {}, folder)
    pieces = [] if tokenizer is None else _pieces(tokenizer, tokenizer_path)
    where = os.fspath(words if has_words else tokenizer_path)
    if has_words:
        lines = read_vocab_txt(words)
        if tokenizer is not None and lines != pieces:
            pairs = zip(lines, pieces, strict=False)
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            raise DataError(
                f"from this line on, other pieces than in {tokenizer_path}",
                where=f"{where}:{1 + sum(1 for _ in same)}",
                fix="delete the file that is not of these weights",
            )
        pieces = lines
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
    fix = "check that this is a BERT vocab.txt, one piece per line"
    if not any(pieces):
        raise DataError("the vocabulary is empty", where=where, fix=fix)
    place = f"{where}:%d" if where.endswith(".txt") else f"{where}, id %d"
    first = int(where.endswith(".txt"))
    ids: dict[str, int] = {}
    for number, piece in enumerate(pieces, start=first):
        if not piece:
            raise DataError("an empty line", where=place % number, fix=fix)
        if piece in ids:
            line = f"piece {piece!r} is also on line {ids[piece] + 1}"
            raise DataError(line, where=place % number, fix=fix)
        ids[piece] = number - first
    for name in SPECIAL_TOKENS[:4]:
        if name not in ids:
            raise DataError(f"no line {name!r}", where=where, fix=fix)
    if ids["[PAD]"] != 0:
        raise DataError("[PAD] is not id 0", where=place % (ids["[PAD]"] + first), fix=fix)
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


def _read_tokenizer(path: epath.Path) -> dict[str, Any]:
    """A tokenizer.json of BERT, with all of its fields.

    Raises:
        DataError: the file is damaged.
        ConfigError: it describes a tokenizer of another kind.
    """
    # A training machine has no tokenizers, unless its weights are pretrained.
    import tokenizers

    try:
        tokenizer = json.loads(tokenizers.Tokenizer.from_buffer(path.read_bytes()).to_str())
    except Exception as error:
        where = os.fspath(path)
        raise DataError(f"not a tokenizer of `tokenizers` ({error})", where=where) from error
    for (part, name), value in _FIXED.items():
        actual = (tokenizer[part] or {}).get(name)
        if actual != value:
            problem = f"{part}.{name} is {actual!r}, and {value!r} in BERT's tokenizers"
            fix = "choose a checkpoint with a tokenizer of BERT"
            raise ConfigError(problem, where=os.fspath(path), fix=fix)
    return tokenizer


def _splitting(
    config: _Config, normalizer: Mapping[str, bool | None], folder: epath.Path
) -> WordSplitting:
    """Both files' settings, which must agree where both have them."""
    values: dict[str, Any] = {}
    for ours, (named, in_normalizer) in _SPLITTING.items():
        other = normalizer.get(in_normalizer)
        values[ours] = config.get(named, other)
        if None not in (other, values[ours]) and other != values[ours]:
            raise DataError(
                f"{named} is {values[ours]}, and normalizer.{in_normalizer} in {TOKENIZER_FILE} "
                f"is {other}",
                where=os.fspath(folder / TOKENIZER_CONFIG_FILE),
                fix="correct the file that is wrong: the model was trained with one of the two",
            )
    return WordSplitting(**{name: value for name, value in values.items() if value is not None})


def _pieces(tokenizer: Mapping[str, Any], path: epath.Path) -> list[str]:
    ids = tokenizer["model"]["vocab"]
    if sorted(ids.values()) != list(range(len(ids))):
        where = f"{path}, field 'model.vocab'"
        raise DataError(f"ids with gaps or repetitions, not 0 to {len(ids) - 1}", where=where)
    return sorted(ids, key=ids.__getitem__)


def _added_tokens(
    folder: epath.Path, tokenizer: Mapping[str, Any] | None, config: _Config
) -> Iterator[tuple[str, str, int | None, bool]]:
    """Added tokens as (place, token, id, whether it is special)."""
    place = f"{folder / TOKENIZER_FILE}, field 'added_tokens'"
    for token in tokenizer["added_tokens"] if tokenizer else ():
        yield place, token["content"], token["id"], token["special"]
    place = f"{folder / TOKENIZER_CONFIG_FILE}, field 'added_tokens_decoder'"
    for id, token in config.get("added_tokens_decoder", {}).items():
        number = int(id) if id.isascii() and id.isdigit() else None
        yield place, token["content"], number, bool(token.get("special"))
    path = folder / ADDED_TOKENS_FILE
    for content, number in read_json(path, absent={}).items():
        # This older file does not say which are special; only tokens beyond the pieces matter.
        yield str(path), content, number, True


def _check_added(
    added: Iterator[tuple[str, str, int | None, bool]], ids: Mapping[str, int], where: str
) -> None:
    """Refuses added tokens other than special tokens that are pieces (plain text inside texts)."""
    for place, content, id, special in added:
        if ids.get(content) != id or not (special or content in SPECIAL_TOKENS):
            raise ConfigError(
                f"an added token, {content!r} with id {id}: texts would not get the ids that the "
                "weights know",
                where=place,
                fix=f"choose a checkpoint whose added tokens are special pieces of {where}",
            )
