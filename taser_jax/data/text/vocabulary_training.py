"""Trains a small vocabulary on a collection's own texts."""

from __future__ import annotations

import collections
import enum
import io
import itertools
import os
from collections.abc import Iterable, Iterator

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from taser_jax.data.text.bert_files import MAX_WORD_CHARACTERS, SPECIAL_TOKENS
from taser_jax.data.text.sentencepiece import SentencePieceVocabulary
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import phase, track

_MAX_ALPHABET = 1000
_MIN_SIZE = 64
# SentencePiece adds up its threads' results in order, so their number affects them, but not timing.
_SENTENCEPIECE_THREADS = 16


class VocabularyKind(enum.Enum):
    """How a vocabulary splits words."""

    WORDPIECE = "wordpiece"
    SENTENCEPIECE = "sentencepiece"


def train_vocabulary(
    texts: Iterable[str],
    *,
    kind: VocabularyKind | str = VocabularyKind.WORDPIECE,
    size: int,
    output_dir: str | os.PathLike[str],
    lower_case: bool = True,
) -> Vocabulary:
    """Trains a vocabulary and saves it where `load_vocabulary` finds it.

    The same texts in the same order give the same vocabulary, in any process. WordPiece stores only
    counts of distinct words. SentencePiece (a unigram model) holds all texts in memory, so give it
    a sample of a large collection.

    Args:
        texts: texts to learn from; read once.
        kind: "wordpiece" or "sentencepiece".
        size: number of ids; few texts may give a smaller vocabulary.
        output_dir: created if missing.
        lower_case: lower-case and strip accents.

    Returns:
        The vocabulary, [PAD] = 0, [UNK] = 1, [CLS] = 2, [SEP] = 3, [MASK] = 4.

    Raises:
        ConfigError: unknown kind, or a size that the texts do not allow.
        DataError: no words in the texts.
    """
    try:
        kind = VocabularyKind(kind)
    except ValueError as error:
        raise ConfigError(
            f"kind {kind!r}",
            where="train_vocabulary",
            expected=f"one of {', '.join(repr(k.value) for k in VocabularyKind)}",
        ) from error
    if size < _MIN_SIZE:
        raise ConfigError(f"size {size}", where="train_vocabulary", expected=f">= {_MIN_SIZE}")
    train = _train_wordpiece if kind is VocabularyKind.WORDPIECE else _train_sentencepiece
    vocabulary = train(track(texts, "reading texts", unit="text"), size, lower_case)
    vocabulary.save(os.fspath(output_dir))
    return vocabulary


def _train_wordpiece(texts: Iterable[str], size: int, lower_case: bool) -> Vocabulary:
    """Byte-pair merges by count (what `tokenizers` calls WordPiece training).

    The trainer numbers letters in the order in which a hash map yields words, and breaks ties
    between merges by these numbers. To make the result deterministic, all letters, including those
    that continue words, are numbered before it starts.
    """
    counts = _count_words(texts, lower_case)
    if not counts:
        raise DataError("no words in the texts", where="train_vocabulary")
    letters: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        for letter in word:
            letters[letter] += count
    # At most half of a small vocabulary goes to letters (each stands alone and as ##letter).
    limit = min(_MAX_ALPHABET, size // 4)
    alphabet = {c for c, _ in sorted(letters.items(), key=lambda item: (-item[1], item[0]))[:limit]}
    continuing = {f"##{c}" for word in counts for c in word[1:] if c in alphabet}
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *sorted(continuing)],
        initial_alphabet=sorted(alphabet),
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with phase("learning word pieces"):
        tokenizer.train_from_iterator(_repeat(counts), trainer)
    ids = tokenizer.get_vocab()
    return WordPieceVocabulary(sorted(ids, key=ids.__getitem__), lower_case=lower_case)


def _count_words(texts: Iterable[str], lower_case: bool) -> collections.Counter[str]:
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    splitter = pre_tokenizers.BertPreTokenizer()
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        words = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(word for word, _ in words if len(word) <= MAX_WORD_CHARACTERS)
    return counts


def _repeat(counts: collections.Counter[str]) -> Iterator[str]:
    """Repeats each word as often as it was counted, in texts of at most 1,000 words."""
    for word in sorted(counts):
        whole, rest = divmod(counts[word], 1000)
        yield from itertools.repeat(f"{word} " * 1000, whole)
        yield f"{word} " * rest


def _train_sentencepiece(texts: Iterable[str], size: int, lower_case: bool) -> Vocabulary:
    model = io.BytesIO()
    pad, unknown, cls, sep, mask = SPECIAL_TOKENS
    try:
        with phase("learning sentence pieces"):
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                vocab_size=size,
                model_type="unigram",
                normalization_rule_name="nmt_nfkc_cf" if lower_case else "nmt_nfkc",
                pad_id=0,
                unk_id=1,
                bos_id=2,
                eos_id=3,
                pad_piece=pad,
                unk_piece=unknown,
                bos_piece=cls,
                eos_piece=sep,
                control_symbols=[mask],
                max_sentence_length=1 << 20,
                hard_vocab_limit=False,
                num_threads=_SENTENCEPIECE_THREADS,
                minloglevel=2,
            )
    except RuntimeError as error:
        raise ConfigError(
            f"SentencePiece rejects size {size} ({error})",
            where="train_vocabulary",
            fix="give other texts, or a size that the message allows",
        ) from error
    return SentencePieceVocabulary(model.getvalue())
