"""Vocabularies, from text to token ids: those of other kinds than BERT's, and loading."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec
import sentencepiece
from etils import epath

from taser_jax.data.text import wordpiece
from taser_jax.data.text.wordpiece import SavedVocabulary, WordPieceVocabulary
from taser_jax.storage import checksums
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Natural, Positive, read_typed

MODEL_FILE = "sentencepiece.model"
_ADDED_TOKENS_FILE = "added_tokens.json"
_EXTRA_ID = re.compile(r"<extra_id_(\d+)>")
T5_MODEL_FILE = "spiece.model"


class SentencePieceVocabulary(SavedVocabulary):
    """Splits text with a SentencePiece model.

    `encode` uses the SentencePiece library. `TextGraph`, for programs without Python, gives the
    same ids except where several ways to split a text have the same score.

    [CLS] and [SEP] are the ids that SentencePiece calls bos and eos. T5's model has only pad and
    eos, so `cls_id` is None and nothing is put before its texts.

    T5 has ids after those of its SentencePiece file: `<extra_id_N>`, the spans of its pre-training
    (Raffel et al., 2020, section 3.1.4). As in SeqIO, the first has the last id. Text never yields
    them: such a name in a text is split like any other word.

    Example:
        T5's 32,000 pieces and 100 extra ids: `<extra_id_0>` is 32,099, `<extra_id_99>` 32,000.

    Args:
        model: the serialised model.
        where: file that the model came from, for messages.
        extra_ids: number of ids after the model's.

    Raises:
        DataError: not a SentencePiece model, pad is not id 0, there is no end piece, or there are
            extra ids for a model that already has such pieces.
    """

    kind = "sentencepiece"
    file = MODEL_FILE

    def __init__(self, model: bytes, *, where: str = MODEL_FILE, extra_ids: int = 0) -> None:
        self.extra_ids = extra_ids
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"not a SentencePiece model ({error})", where=where) from error
        if not model:
            raise DataError("the vocabulary is empty", where=where)
        pad_id, bos_id = self._processor.pad_id(), self._processor.bos_id()
        self.cls_id = bos_id if bos_id >= 0 else None
        self.sep_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        if pad_id != 0 or self.sep_id < 0:
            problem = (
                f"pad is id {pad_id} and the end of a text id {self.sep_id}, not 0 and another"
            )
            fix = "train it with pad_id=0 and eos_id set"
            raise DataError(problem, where=where, fix=fix)
        if extra_ids and self._piece_id("<extra_id_0>") is not None:
            problem = f"{extra_ids} extra ids for a model that has pieces of their names"
            fix = "set tokenize.extra_ids=0: the model has its own"
            raise DataError(problem, where=where, fix=fix)
        super().__init__(
            model,
            size=self._processor.get_piece_size() + extra_ids,
            deciding=[model, *([f"{extra_ids} extra ids"] if extra_ids else [])],
            **({"extra_ids": extra_ids} if extra_ids else {}),
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return self._processor.encode([wordpiece.whole(text) for text in texts])

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "<extra_id_1>"; None if there is no such piece."""
        own = self._piece_id(piece)
        if own is not None:
            return own
        name = _EXTRA_ID.fullmatch(piece)
        if name is None or int(name[1]) >= self.extra_ids:
            return None
        return self.size - 1 - int(name[1])

    def _piece_id(self, piece: str) -> int | None:
        id = self._processor.piece_to_id(piece)
        return id if self._processor.id_to_piece(id) == piece else None


class VocabularyMetadata(msgspec.Struct):
    """`vocabulary.json`, as far as all vocabularies share it."""

    kind: Literal["wordpiece", "sentencepiece", "tokenizer_json"]
    extra_ids: Natural = 0
    lower_case: bool = True


class TokenizerJsonVocabulary(SavedVocabulary):
    """Splits text as a file of Hugging Face's `tokenizers` says: RoBERTa, XLM-R, MPNet, ModernBERT.

    The ids before and after a text are those of the file's own template. The names of special
    tokens in a text, such as "</s>", are ordinary text, except in Unigram models, whose pieces they
    are.

    Args:
        content: the file's.
        where: the file, for messages.

    Raises:
        DataError: not a tokenizer of `tokenizers`.
        ConfigError: it does not put one id before a text and one after it.
    """

    kind = "tokenizer_json"
    file = wordpiece.TOKENIZER_FILE

    def __init__(self, content: bytes, *, where: str = wordpiece.TOKENIZER_FILE) -> None:
        self._tokenizer = wordpiece.tokenizer_of(content, where)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        around = self._tokenizer.encode("").ids
        if len(around) != 2:
            raise ConfigError(
                f"{len(around)} special tokens around a text",
                where=where,
                expected="one before and one after it, as encoders have",
                fix="choose a checkpoint of an encoder",
            )
        self.cls_id, self.sep_id = around
        self._tokenizer.encode_special_tokens = True
        size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        super().__init__(content, size=size, deciding=[content])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens. Lone surrogates become "?"."""
        return wordpiece.token_ids(self._tokenizer, texts)

    def id_of(self, piece: str) -> int | None:
        """Id of a piece by its name, such as "<mask>"; None if there is no such piece."""
        return self._tokenizer.token_to_id(piece)


Vocabulary = WordPieceVocabulary | SentencePieceVocabulary | TokenizerJsonVocabulary


class _WeightsConfig(TypedDict, total=False):
    vocab_size: Positive


class _TokenizerConfig(TypedDict, total=False):
    extra_ids: Natural
    do_lower_case: bool
    strip_accents: bool
    tokenize_chinese_chars: bool


def load_vocabulary(
    path: str | os.PathLike[str], *, extra_ids: int | None = None, rows: int | None = None
) -> Vocabulary:
    """Loads a vocabulary from a local or `gs://` path.

    Args:
        path: a directory that `save` wrote, an encoder's or T5's checkpoint directory with a
            `tokenizer.json`, `vocab.txt` or `spiece.model`, one of the last two files itself, or
            any SentencePiece `.model`. Texts for a `vocab.txt` are lower-cased unless a
            `tokenizer_config.json` beside it says otherwise.
        extra_ids: for a SentencePiece `.model`: number of ids after its own, T5's `<extra_id_N>`.
            None: as saved, else as in the `tokenizer_config.json` beside it, else 0.
        rows: rows of the embedding table of the model that the ids are for, at least one per id.

    Raises:
        DataError: there is no vocabulary, it is damaged, or it has more ids than the weights beside
            it have rows, or than `rows`.
        ConfigError: a `vocab.txt` with added tokens or an unsupported way of splitting words.
        FingerprintError: the files are not the ones that were saved.
    """
    where = os.fspath(path).rstrip("/")
    vocabulary = _load(where, extra_ids)
    actual = vocabulary.extra_ids if isinstance(vocabulary, SentencePieceVocabulary) else 0
    if extra_ids is not None and actual != extra_ids:
        fix = "give the path of a SentencePiece .model itself, which takes any number, or none"
        problem = f"it has {actual} extra ids, requested were {extra_ids}"
        raise DataError(problem, where=where, fix=fix)
    config_file = epath.Path(where if epath.Path(where).is_dir() else os.path.dirname(where))
    config_file /= "config.json"
    config = read_typed(config_file, _WeightsConfig, absent=_WeightsConfig())
    tables = {
        f"the weights ({config_file}, field 'vocab_size')": config.get("vocab_size"),
        "the model": rows,
    }
    for owner, table_rows in tables.items():
        # More rows than ids are fine: tables are padded.
        if table_rows is not None and vocabulary.size > table_rows:
            raise DataError(
                f"the vocabulary has {vocabulary.size:,} ids",
                where=where,
                expected=f"at most {table_rows:,}, the rows of the embedding table of {owner}",
                fix="take the tokenizer's files and the weights from the same model",
            )
    return vocabulary


def _load(path: str, extra_ids: int | None) -> Vocabulary:
    if not epath.Path(path).is_dir():
        if path.endswith(".model"):
            return _load_model(path, extra_ids)
        return _load_bert(os.path.dirname(path) or ".", path)
    if epath.Path(path, wordpiece.METADATA).exists():
        return _load_saved(path)
    if epath.Path(path, T5_MODEL_FILE).exists():
        return _load_model(f"{path}/{T5_MODEL_FILE}", extra_ids)
    if epath.Path(path, wordpiece.TOKENIZER_FILE).exists():
        return _load_bert(path, f"{path}/{wordpiece.TOKENIZER_FILE}")
    return _load_bert(path, f"{path}/{wordpiece.VOCAB_FILE}")


def _load_saved(directory: str) -> Vocabulary:
    """Reads what `save` wrote, whose files are compared with their record."""
    path = f"{directory}/{wordpiece.METADATA}"
    again = "delete the directory and train the vocabulary again"
    checksums.check_directory(directory, fix=again)
    metadata = read_typed(path, VocabularyMetadata, fix=again, version=wordpiece.FORMAT_VERSION)
    if metadata.kind == WordPieceVocabulary.kind:
        path = f"{directory}/{WordPieceVocabulary.file}"
        pieces = wordpiece.read_vocab_txt(path)
        return WordPieceVocabulary(pieces, lower_case=metadata.lower_case, where=path)
    if metadata.kind == SentencePieceVocabulary.kind:
        path = f"{directory}/{SentencePieceVocabulary.file}"
        model, extra_ids = wordpiece.read_bytes(path), metadata.extra_ids
        return SentencePieceVocabulary(model, where=path, extra_ids=extra_ids)
    path = f"{directory}/{TokenizerJsonVocabulary.file}"
    return TokenizerJsonVocabulary(wordpiece.read_bytes(path), where=path)


def _load_model(path: str, extra_ids: int | None) -> SentencePieceVocabulary:
    directory = os.path.dirname(path)
    if extra_ids is None:
        config_file = os.path.join(directory, wordpiece.TOKENIZER_CONFIG_FILE)
        config = read_typed(config_file, _TokenizerConfig, absent=_TokenizerConfig())
        extra_ids = config.get("extra_ids", 0)
    return SentencePieceVocabulary(wordpiece.read_bytes(path), where=path, extra_ids=extra_ids)


def _load_bert(directory: str, path: str) -> WordPieceVocabulary | TokenizerJsonVocabulary:
    """The vocabulary of an encoder's `tokenizer.json`, or of a BERT's `vocab.txt`.

    As in transformers, a `tokenizer_config.json` beside it decides on the casing of BERT's.

    Raises:
        ConfigError: BERT's pieces for texts that are split in another way than BERT's.
    """
    config_file = f"{directory}/{wordpiece.TOKENIZER_CONFIG_FILE}"
    config = read_typed(config_file, _TokenizerConfig, absent=_TokenizerConfig())
    lower_case = config.get("do_lower_case", True)
    if path.endswith(wordpiece.TOKENIZER_FILE):
        content = wordpiece.read_bytes(path)
        tokenizer = json.loads(wordpiece.tokenizer_of(content, path).to_str())
        if not wordpiece.is_berts(tokenizer):
            return TokenizerJsonVocabulary(content, where=path)
        lower_case = config.get("do_lower_case", tokenizer["normalizer"]["lowercase"])
        ids = tokenizer["model"]["vocab"]
        pieces = sorted(ids, key=ids.__getitem__)
    else:
        if epath.Path(directory, _ADDED_TOKENS_FILE).exists():
            raise _other_splitting(f"{directory}/{_ADDED_TOKENS_FILE}", "added tokens")
        pieces = wordpiece.read_vocab_txt(path)
    if config.get("strip_accents", lower_case) != lower_case:
        raise _other_splitting(config_file, f"strip_accents is not {lower_case}, the casing")
    if not config.get("tokenize_chinese_chars", True):
        raise _other_splitting(config_file, "tokenize_chinese_chars is false")
    return WordPieceVocabulary(pieces, lower_case=lower_case, where=path)


def _other_splitting(where: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}: texts would not get the ids that the weights know",
        where=where,
        fix="write a tokenizer.json that has it, as transformers' save_pretrained does",
    )
