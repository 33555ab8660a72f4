"""Writes vocabularies as Hugging Face's tokenizer files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import processors

from taser_jax.data.text.tokenizer_json import TokenizerJsonVocabulary
from taser_jax.data.text.vocabularies import Vocabulary, load_vocabulary
from taser_jax.data.text.vocabulary_files import (
    METADATA,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
)
from taser_jax.data.text.wordpiece import WordPieceVocabulary, wordpiece_tokenizer
from taser_jax.storage.errors import ConfigError, DataError

# Represents all ids of the prompt in a template.
_PROMPT = "[PROMPT]"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def write_tokenizer(
    vocabulary_dir: pathlib.Path,
    output_dir: pathlib.Path,
    *,
    max_length: int,
    rows: int | None = None,
    prompt: Sequence[int] = (),
) -> None:
    """Writes what transformers' AutoTokenizer reads, with the same ids as our vocabulary.

    One text becomes `[CLS] prompt text [SEP]`, and a pair becomes `[CLS] title [SEP] text [SEP]`,
    truncated longest first, as by `query_ids` and `passage_ids`. No token types are returned, since
    all tokens are of segment 0. As in our vocabulary, "[SEP]" and the like inside a text are
    ordinary text.

    Args:
        vocabulary_dir: the model's vocabulary.
        output_dir: an existing directory.
        max_length: maximum number of tokens of a text.
        rows: number of rows of the model's embedding table.
        prompt: ids before every text or pair, never truncated. BertTokenizer has no prompts: with
            one, the class is transformers' general one.

    Raises:
        DataError: the vocabulary is missing or damaged, or has more ids than there are rows.
        ConfigError: it is a SentencePiece vocabulary.
    """
    vocabulary_dir, output_dir = pathlib.Path(vocabulary_dir), pathlib.Path(output_dir)
    if not any(
        (vocabulary_dir / name).is_file() for name in (METADATA, VOCAB_FILE, TOKENIZER_FILE)
    ):
        raise DataError(
            "no vocabulary: the exported model would have no tokenizer",
            where=str(vocabulary_dir),
            fix=f"give the model's {METADATA}, {VOCAB_FILE} or {TOKENIZER_FILE}",
        )
    vocabulary = load_vocabulary(vocabulary_dir, rows=rows)
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        _write_own(vocabulary, output_dir, max_length=max_length, prompt=prompt)
        return
    if not isinstance(vocabulary, WordPieceVocabulary):
        raise ConfigError(
            f"a {vocabulary.kind} vocabulary, and Hugging Face's BERT has none of that kind",
            where=str(vocabulary_dir),
            fix="export as saved_model, which supports any tokenizer",
        )
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    special = {name: piece for name, piece in _SPECIAL_TOKENS.items() if piece in ids}
    files: dict[str, Any] = {
        TOKENIZER_FILE: json.loads(_tokenizer(vocabulary, ids, special.values(), prompt).to_str()),
        TOKENIZER_CONFIG_FILE: {
            "tokenizer_class": "PreTrainedTokenizerFast" if prompt else "BertTokenizer",
            "do_lower_case": vocabulary.lower_case,
            "strip_accents": vocabulary.splitting.strip_accents,
            "tokenize_chinese_chars": vocabulary.splitting.split_ideographs,
            "model_max_length": max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "split_special_tokens": True,
            **dict.fromkeys(_SPECIAL_TOKENS),
            **special,
        },
        SPECIAL_TOKENS_FILE: special,
    }
    for name, value in files.items():
        _write_json(output_dir / name, value)
    pieces = "".join(f"{piece}\n" for piece in vocabulary.pieces)
    (output_dir / VOCAB_FILE).write_bytes(pieces.encode("utf-8"))


def _tokenizer(
    vocabulary: WordPieceVocabulary,
    ids: dict[str, int],
    special: Iterable[str],
    prompt: Sequence[int],
) -> tokenizers.Tokenizer:
    """Our tokenisation in the `tokenizers` library."""
    tokenizer = wordpiece_tokenizer(ids, vocabulary.splitting)
    tokenizer.post_processor = _template(vocabulary, vocabulary.pieces.__getitem__, prompt)
    tokenizer.add_special_tokens(sorted(special, key=ids.__getitem__))
    return tokenizer


def _template(
    vocabulary: Vocabulary, name_of: Callable[[int], str], prompt: Sequence[int]
) -> processors.TemplateProcessing:
    """What stands around texts: `[CLS] prompt text [SEP]` and `[CLS] title [SEP] text [SEP]`."""
    assert vocabulary.cls_id is not None
    before, after = name_of(vocabulary.cls_id), name_of(vocabulary.sep_id)
    pieces: list[Any] = [(before, vocabulary.cls_id), (after, vocabulary.sep_id)]
    if prompt:
        tokens = [name_of(id) for id in prompt]
        pieces.append({"id": _PROMPT, "ids": list(prompt), "tokens": tokens})
        before = f"{before} {_PROMPT}"
    return processors.TemplateProcessing(
        single=f"{before} $A {after}",
        pair=f"{before} $A {after} $B {after}",
        special_tokens=pieces,
    )


def _write_own(
    vocabulary: TokenizerJsonVocabulary,
    output_dir: pathlib.Path,
    *,
    max_length: int,
    prompt: Sequence[int],
) -> None:
    """Writes a tokenizer.json with our template around texts."""
    tokenizer = tokenizers.Tokenizer.from_buffer(vocabulary.content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = _template(vocabulary, vocabulary.piece, prompt)
    cls, sep = vocabulary.piece(vocabulary.cls_id), vocabulary.piece(vocabulary.sep_id)
    likely = {
        "unk_token": ("[UNK]", "<unk>"),
        "pad_token": ("[PAD]", "<pad>"),
        "mask_token": ("[MASK]", "<mask>"),
    }
    found = {
        role: name
        for role, names in likely.items()
        for name in names
        if vocabulary.id_of(name) is not None
    }
    # Padding is masked: without a token of its own, any will do.
    special = {"cls_token": cls, "sep_token": sep, "pad_token": sep, **found}
    _write_json(output_dir / TOKENIZER_FILE, json.loads(tokenizer.to_str()))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,
        **special,
    }
    _write_json(output_dir / TOKENIZER_CONFIG_FILE, config)
    _write_json(output_dir / SPECIAL_TOKENS_FILE, special)


def _write_json(path: pathlib.Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
