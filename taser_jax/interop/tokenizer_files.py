"""Converts WordPiece vocabularies from and to Hugging Face's tokenizer files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from taser_jax.artifacts import read_json
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.vocabulary_files import METADATA
from taser_jax.data.text.wordpiece import VOCAB_FILE, WordPieceVocabulary
from taser_jax.errors import ConfigError, DataError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def checkpoint_vocabulary(directory: pathlib.Path) -> WordPieceVocabulary:
    """The vocabulary of a BERT checkpoint, with its setting for lower-casing.

    Args:
        directory: has `vocab.txt`, or else `tokenizer.json`.

    Raises:
        DataError: neither file exists, or it is damaged.
        ConfigError: the tokenizer has unsupported settings.
    """
    directory = pathlib.Path(directory)
    settings = read_json(directory / TOKENIZER_CONFIG_FILE, absent={})
    tokenizer = read_json(directory / TOKENIZER_FILE, absent={})
    normalizer = tokenizer.get("normalizer") or {}

    def setting(name: str, name_in_normalizer: str, default: Any) -> Any:
        return settings.get(name, normalizer.get(name_in_normalizer, default))

    lower_case = setting("do_lower_case", "lowercase", True)
    strip_accents = setting("strip_accents", "strip_accents", None)
    if strip_accents not in (None, lower_case):
        raise ConfigError(
            f"strip_accents is {strip_accents} with do_lower_case {lower_case}",
            where=str(directory),
            expected="accents removed if and only if letters are lower-cased",
        )
    if not setting("tokenize_chinese_chars", "handle_chinese_chars", True):
        raise ConfigError(
            "tokenize_chinese_chars is false",
            where=str(directory),
            expected="true: each ideograph is a word",
        )
    if (directory / VOCAB_FILE).is_file():
        return WordPieceVocabulary.from_file(str(directory / VOCAB_FILE), lower_case=lower_case)
    return WordPieceVocabulary(
        _pieces(tokenizer, directory / TOKENIZER_FILE),
        lower_case=lower_case,
        where=str(directory / TOKENIZER_FILE),
    )


def write_tokenizer(
    vocabulary_dir: pathlib.Path, output_dir: pathlib.Path, *, max_length: int
) -> None:
    """Writes what transformers' AutoTokenizer reads, with the same ids as our vocabulary.

    One text becomes `[CLS] text [SEP]`, a pair `[CLS] title [SEP] text [SEP]`, cut longest first:
    where both are longer than half of an odd room, transformers leaves the odd token to the longer
    of them, `passage_ids` to the title.
    No token types are returned, since all of a text is of segment 0 here, and "[SEP]" and the
    like inside a text are ordinary text, as in our vocabulary.

    Args:
        vocabulary_dir: the model's vocabulary.
        output_dir: an existing directory.
        max_length: maximum number of tokens of a text.

    Raises:
        DataError: the vocabulary is missing or damaged.
        ConfigError: it is not a WordPiece vocabulary.
    """
    vocabulary_dir, output_dir = pathlib.Path(vocabulary_dir), pathlib.Path(output_dir)
    if not any((vocabulary_dir / name).is_file() for name in (METADATA, VOCAB_FILE)):
        raise DataError(
            "no vocabulary: the exported model would have no tokenizer",
            where=str(vocabulary_dir),
            expected=f"{METADATA} or {VOCAB_FILE}",
            fix="give the vocabulary directory that the model was trained with",
        )
    vocabulary = load_vocabulary(vocabulary_dir)
    if not isinstance(vocabulary, WordPieceVocabulary):
        raise ConfigError(
            f"a {vocabulary.kind} vocabulary",
            where=str(vocabulary_dir),
            expected="WordPiece, the only tokenizer of Hugging Face's BERT",
            fix="export as saved_model, which supports any tokenizer",
        )
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    special = {name: piece for name, piece in _SPECIAL_TOKENS.items() if piece in ids}
    files: dict[str, Any] = {
        TOKENIZER_FILE: json.loads(_tokenizer(vocabulary, ids, special.values()).to_str()),
        TOKENIZER_CONFIG_FILE: {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": vocabulary.lower_case,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            "model_max_length": max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "split_special_tokens": True,
            **dict.fromkeys(_SPECIAL_TOKENS),
            **special,
        },
        SPECIAL_TOKENS_FILE: special,
    }
    for name, value in files.items():
        text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
        (output_dir / name).write_text(text, encoding="utf-8")
    pieces = "".join(f"{piece}\n" for piece in vocabulary.pieces)
    (output_dir / VOCAB_FILE).write_bytes(pieces.encode("utf-8"))


def _tokenizer(
    vocabulary: WordPieceVocabulary, ids: dict[str, int], special: Iterable[str]
) -> tokenizers.Tokenizer:
    """Our tokenisation in the `tokenizers` library."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=vocabulary.lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, ids[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(sorted(special, key=ids.__getitem__))
    return tokenizer


def _pieces(tokenizer: dict[str, Any], path: pathlib.Path) -> list[str]:
    """Pieces by id of a `tokenizer.json`."""
    if not tokenizer:
        raise DataError(
            "no vocabulary in this directory",
            where=str(path.parent),
            expected=f"{VOCAB_FILE} or {TOKENIZER_FILE}",
            fix="copy the tokenizer's files beside the weights",
        )
    model = tokenizer.get("model") or {}
    if model.get("type") != "WordPiece":
        raise ConfigError(
            f"a tokenizer of type {model.get('type')!r}", where=str(path), expected="'WordPiece'"
        )
    ids = model.get("vocab") or {}
    pieces = sorted(ids, key=ids.__getitem__)
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise DataError(
            "ids with gaps or repetitions", where=str(path), expected=f"ids 0..{len(pieces) - 1}"
        )
    return pieces
