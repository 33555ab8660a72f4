"""From texts to token ids, in the same way for token stores, typed questions and exports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from taser_jax.batch import Tokens
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.token_store.text_settings import QueryNormalization, QuerySettings, Titles
from taser_jax.errors import ConfigError
from taser_jax.records import Passage

# A token store's ids depend on it beside its settings; raised when formatting changes.
PREPROCESSING_VERSION = 1
_MIN_LENGTH = 4
_BATCH = 1024


def normalize_queries(texts: tf.Tensor, normalization: QueryNormalization) -> tf.Tensor:
    """Applies the normalisation to queries. [queries] -> [queries], strings."""
    if normalization is QueryNormalization.CURLY_APOSTROPHE:
        return tf.strings.regex_replace(texts, "’", "'")
    return texts


def query_ids(
    texts: tf.Tensor, vocabulary: Vocabulary, length: int | None, *, prompt: Sequence[int] = ()
) -> tf.RaggedTensor:
    """`[CLS] prompt text [SEP]`, with the text truncated to fit.

    Args:
        texts: strings. Shape [queries].
        vocabulary: splits the texts; without a [CLS] token nothing precedes them.
        length: maximum tokens, special ones and the prompt included; None truncates nothing.
        prompt: ids put before every text; never truncated.

    Returns:
        Ids. Shape [queries, (tokens)], int32.

    Raises:
        ConfigError: the prompt leaves no room for the text.
    """
    tokens = vocabulary.encode_tf(texts)
    if length is not None:
        room = query_room(vocabulary, length, prompt=prompt)
        tokens = _keep_first(tokens, tf.minimum(tokens.row_lengths(), room))
    if prompt:
        before = tf.RaggedTensor.from_tensor(
            tf.tile(tf.constant([list(prompt)], tf.int32), [tokens.nrows(), 1])
        )
        tokens = tf.concat([before, tokens], axis=1)
    return _frame([tokens], vocabulary)


def passage_ids(
    titles: tf.Tensor, texts: tf.Tensor, vocabulary: Vocabulary, length: int | None
) -> tf.RaggedTensor:
    """`[CLS] title [SEP] text [SEP]`, or `[CLS] text [SEP]` if the title has no tokens.

    What is too long is truncated longest first: token by token from the longer of title and text,
    from the text if they are equal, as transformers' BertTokenizer does to a pair. With
    t and x tokens and room for r: t' = min(t, max(r - x, ⌈r/2⌉)), x' = min(x, r - t').

    Args:
        titles: strings, empty for passages without one. Shape [passages].
        texts: strings. Shape [passages].
        vocabulary: splits the texts.
        length: maximum tokens, special ones included; None truncates nothing.

    Returns:
        Ids. Shape [passages, (tokens)], int32.
    """
    title, text = vocabulary.encode_tf(titles), vocabulary.encode_tf(texts)
    if length is not None:
        in_title, in_text = title.row_lengths(), text.row_lengths()
        specials = 1 + int(vocabulary.cls_id is not None) + tf.cast(in_title > 0, tf.int64)
        room = check_length(length) - specials
        in_title = tf.minimum(in_title, tf.maximum(room - in_text, (room + 1) // 2))
        title = _keep_first(title, in_title)
        text = _keep_first(text, tf.minimum(in_text, room - in_title))
    return _frame([title, text], vocabulary)


def encode_queries(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    *,
    length: int,
    settings: QuerySettings = QuerySettings(),
) -> Tokens:
    """Token ids of questions, padded to `length`, as in a token store."""
    parts = []
    for start in range(0, len(texts), _BATCH):
        batch = normalize_queries(_strings(texts[start : start + _BATCH]), settings.normalization)
        parts.append(query_ids(batch, vocabulary, length, prompt=settings.prompt))
    return _pad(parts, length)


def encode_passages(
    passages: Sequence[Passage],
    vocabulary: Vocabulary,
    *,
    length: int,
    titles: Titles = Titles.INCLUDE,
) -> Tokens:
    """Token ids of passages, padded to `length`, as in a token store."""
    parts = []
    for start in range(0, len(passages), _BATCH):
        batch = passages[start : start + _BATCH]
        shown = [p.title if titles is Titles.INCLUDE else "" for p in batch]
        parts.append(
            passage_ids(_strings(shown), _strings([p.text for p in batch]), vocabulary, length)
        )
    return _pad(parts, length)


def query_room(vocabulary: Vocabulary, length: int, *, prompt: Sequence[int] = ()) -> int:
    """Tokens that remain for a query's own text.

    Raises:
        ConfigError: none remain.
    """
    room = check_length(length) - 1 - (vocabulary.cls_id is not None) - len(prompt)
    if room < 1:
        raise ConfigError(
            f"the prompt of {len(prompt)} tokens leaves no room for the query",
            where=f"query length {length}",
            expected=f"{length - room + 1} tokens or more, special tokens included",
            fix="raise the query length of the task, or shorten its prompt",
        )
    return room


def check_length(length: int) -> int:
    """The length; `ConfigError` if special tokens leave no room for title and text."""
    if length < _MIN_LENGTH:
        raise ConfigError(f"length {length}", expected=f"{_MIN_LENGTH} tokens or more")
    return length


def _keep_first(tokens: tf.RaggedTensor, counts: tf.Tensor) -> tf.RaggedTensor:
    """The first counts[i] tokens of row i."""
    kept = tf.ragged.range(tokens.row_lengths()).values < tf.gather(counts, tokens.value_rowids())
    return _ragged(tf.boolean_mask(tokens.values, kept), counts)


def _frame(segments: list[tf.RaggedTensor], vocabulary: Vocabulary) -> tf.RaggedTensor:
    """Adds [CLS] at the start, and [SEP] after the last segment and after other non-empty ones."""
    rows = segments[0].nrows()
    one_each = tf.ones([rows], tf.int64)
    parts = []
    if vocabulary.cls_id is not None:
        parts.append(_repeat(vocabulary.cls_id, one_each))
    for segment in segments[:-1]:
        parts += [segment, _repeat(vocabulary.sep_id, tf.minimum(segment.row_lengths(), 1))]
    return tf.concat([*parts, segments[-1], _repeat(vocabulary.sep_id, one_each)], axis=1)


def _repeat(token: int, counts: tf.Tensor) -> tf.RaggedTensor:
    """A ragged tensor whose row i repeats the token counts[i] times."""
    return _ragged(tf.fill([tf.reduce_sum(counts)], token), counts)


def _ragged(values: tf.Tensor, counts: tf.Tensor) -> tf.RaggedTensor:
    # The counts are right; checking them is most of the graph, and of the time to build it.
    return tf.RaggedTensor.from_row_lengths(values, counts, validate=False)


def _strings(texts: Sequence[str]) -> tf.Tensor:
    return tf.constant([text.encode("utf-8", "replace") for text in texts], tf.string)


def _pad(parts: Sequence[tf.RaggedTensor], length: int) -> Tokens:
    ids = [part.to_tensor(shape=[None, length]).numpy() for part in parts]
    lengths = [part.row_lengths().numpy() for part in parts]
    real = np.concatenate([np.zeros(0, np.int64), *lengths])
    return Tokens(
        ids=np.concatenate([np.zeros((0, length), np.int32), *ids]),
        mask=np.arange(length)[None, :] < real[:, None],
    )
