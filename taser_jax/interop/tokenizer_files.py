"""Writes vocabularies as the tokenizer files that transformers' AutoTokenizer reads."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from taser_jax.data.text.preprocessors import without_space
from taser_jax.data.text.vocabularies import (
    T5_MODEL_FILE,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
    load_vocabulary,
)
from taser_jax.data.text.wordpiece import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WordPieceVocabulary,
    wordpiece_tokenizer,
)
from taser_jax.interop.hub import TEMPLATE_PROMPT, write_json
from taser_jax.storage.errors import ConfigError

# The generated module has no types.
_PROTO: Any = sentencepiece_model_pb2
# Pieces with this score are chosen only where nothing else is possible.
_NEVER = -1e6
# Role -> token, of WordPiece and of most other tokenizers.
_SPECIAL_TOKENS = {
    "unk_token": ("[UNK]", "<unk>"),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>"),
    "cls_token": ("[CLS]",),
    "mask_token": ("[MASK]", "<mask>"),
}

Special = dict[str, str]


def write_tokenizer(
    vocabulary_dir: pathlib.Path,
    output_dir: pathlib.Path,
    *,
    max_length: int,
    prompt: Sequence[int] = (),
) -> None:
    """Writes what transformers' AutoTokenizer reads, with the same ids as our vocabulary.

    One text becomes `[CLS] prompt text [SEP]`, and a pair becomes
    `[CLS] prompt title [SEP] text [SEP]`, truncated longest first, as by `query_ids` and
    `passage_ids`; a SentencePiece vocabulary may have no start. No token types are returned, since
    all tokens are of segment 0. As in our vocabulary, "[SEP]" and the like inside a text are
    ordinary text; the name of a control piece of SentencePiece is that piece, as in transformers'
    own T5.

    Args:
        vocabulary_dir: the model's vocabulary.
        output_dir: an existing directory.
        max_length: maximum number of tokens of a text.
        prompt: ids before every text or pair, never truncated. BertTokenizer has no prompts: with
            one, the class is transformers' general one.

    Raises:
        DataError: the vocabulary is missing or damaged.
        ConfigError: it is a SentencePiece vocabulary, but no unigram model.
    """
    vocabulary = load_vocabulary(vocabulary_dir)
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "split_special_tokens": True,
    }
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        tokenizer, special = _of_json(vocabulary)
    elif isinstance(vocabulary, WordPieceVocabulary):
        tokenizer, special = _of_wordpiece(vocabulary)
        settings |= {
            "tokenizer_class": "PreTrainedTokenizerFast" if prompt else "BertTokenizer",
            "do_lower_case": vocabulary.lower_case,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            **dict.fromkeys(_SPECIAL_TOKENS),
        }
        (output_dir / vocabulary.file).write_bytes(vocabulary.content)
    else:
        tokenizer, special = _of_sentencepiece(vocabulary)
        # What `load_vocabulary` reads; transformers reads the other file.
        settings["extra_ids"] = vocabulary.extra_ids
        (output_dir / T5_MODEL_FILE).write_bytes(vocabulary.content)
    prompt, space = without_space(prompt, vocabulary)
    if space:
        former = tokenizer.normalizer
        before = normalizers.Prepend(space)
        tokenizer.normalizer = normalizers.Sequence([before, *([former] if former else [])])
    tokenizer.post_processor = _template(vocabulary, tokenizer, prompt)
    tokenizer.save(str(output_dir / TOKENIZER_FILE))
    write_json(output_dir / TOKENIZER_CONFIG_FILE, settings | special)


def _of_wordpiece(vocabulary: WordPieceVocabulary) -> tuple[tokenizers.Tokenizer, Special]:
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    special = {role: names[0] for role, names in _SPECIAL_TOKENS.items() if names[0] in ids}
    tokenizer = wordpiece_tokenizer(ids, lower_case=vocabulary.lower_case)
    tokenizer.add_special_tokens(sorted(special.values(), key=ids.__getitem__))
    return tokenizer, special


def _of_json(vocabulary: TokenizerJsonVocabulary) -> tuple[tokenizers.Tokenizer, Special]:
    tokenizer = tokenizers.Tokenizer.from_buffer(vocabulary.content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    cls, sep = (_token(tokenizer, id) for id in (vocabulary.cls_id, vocabulary.sep_id))
    # Padding is masked: without a token of its own, any will do.
    special = {"pad_token": sep} | {
        role: name
        for role, names in _SPECIAL_TOKENS.items()
        for name in names
        if vocabulary.id_of(name) is not None
    }
    return tokenizer, special | {"cls_token": cls, "sep_token": sep}


def _of_sentencepiece(vocabulary: SentencePieceVocabulary) -> tuple[tokenizers.Tokenizer, Special]:
    model = _PROTO.ModelProto.FromString(vocabulary.content)
    trainer, piece = model.trainer_spec, _PROTO.ModelProto.SentencePiece
    if trainer.model_type != _PROTO.TrainerSpec.UNIGRAM:
        problem = "a SentencePiece model that is not a unigram model, as T5's is"
        fix = "export it as saved_model, which takes any SentencePiece vocabulary"
        raise ConfigError(problem, where="vocabulary", fix=fix)
    of_texts = (piece.NORMAL, piece.USER_DEFINED, piece.BYTE)
    pieces = [
        (each.piece, each.score if each.type in of_texts else _NEVER) for each in model.pieces
    ]
    # Text has no spaces when it is split, so it never yields these; a prompt may have them.
    extra = reversed(range(vocabulary.extra_ids))
    pieces += [(f"<extra id {number}>", _NEVER) for number in extra]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram(pieces, unk_id=vocabulary.unk_id, byte_fallback=trainer.byte_fallback)
    )
    spaces = [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    charsmap = model.normalizer_spec.precompiled_charsmap
    before = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*before, *spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ids = {"pad_token": 0, "eos_token": vocabulary.sep_id, "unk_token": vocabulary.unk_id}
    return tokenizer, {role: _token(tokenizer, id) for role, id in ids.items()}


def _template(
    vocabulary: Vocabulary, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int]
) -> processors.TemplateProcessing:
    """What stands around texts, such as `[CLS] prompt text [SEP]`."""
    start, end = "", _token(tokenizer, vocabulary.sep_id)
    pieces: list[tuple[str, int] | dict[str, object]] = [(end, vocabulary.sep_id)]
    if vocabulary.cls_id is not None:
        cls = _token(tokenizer, vocabulary.cls_id)
        pieces.append((cls, vocabulary.cls_id))
        start = f"{cls} "
    if prompt:
        tokens = [_token(tokenizer, id) for id in prompt]
        pieces.append({"id": TEMPLATE_PROMPT, "ids": list(prompt), "tokens": tokens})
        start += f"{TEMPLATE_PROMPT} "
    return processors.TemplateProcessing(
        single=f"{start}$A {end}", pair=f"{start}$A {end} $B {end}", special_tokens=pieces
    )


def _token(tokenizer: tokenizers.Tokenizer, id: int) -> str:
    token = tokenizer.id_to_token(id)
    assert token is not None
    return token
