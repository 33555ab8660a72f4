"""Turns texts into token ids, in the same way for token stores and typed questions.

`preprocessing_graph` has the same functions as TensorFlow graphs, for SavedModels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.token_store.text_settings import QueryNormalization, QuerySettings, Titles
from taser_jax.models.batch import Tokens
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage

_MIN_LENGTH = 4


def normalize_queries(texts: Sequence[str], normalization: QueryNormalization) -> list[str]:
    """Applies the normalisation to queries."""
    if normalization is QueryNormalization.CURLY_APOSTROPHE:
        return [text.replace("’", "'") for text in texts]
    return list(texts)


def query_ids(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    length: int | None,
    *,
    prompt: Sequence[int] = (),
) -> list[list[int]]:
    """`[CLS] prompt text [SEP]`, with the text truncated to fit.

    Args:
        texts: queries.
        vocabulary: splits the texts; without a [CLS] token nothing precedes them.
        length: maximum tokens, special ones and the prompt included; None truncates nothing.
        prompt: ids put before every text; never truncated.

    Returns:
        Ids of each query.

    Raises:
        ConfigError: the prompt leaves no room for the text.
    """
    room = None if length is None else query_room(vocabulary, length, prompt=prompt)
    before = [*_start(vocabulary), *prompt]
    return [[*before, *ids[:room], vocabulary.sep_id] for ids in vocabulary.encode(texts)]


def passage_ids(
    titles: Sequence[str], texts: Sequence[str], vocabulary: Vocabulary, length: int | None
) -> list[list[int]]:
    """`[CLS] title [SEP] text [SEP]`, or `[CLS] text [SEP]` where the title is the empty string.

    The ids are those of Hugging Face's `tokenizers` for the pair (title, text), or for the text
    alone; a title of only blanks has no tokens but keeps its [SEP]. If title and text do not fit,
    the longer of the two is truncated first; if the room for both is odd, the longer one gets the
    odd token, or the text if they are equal. With t and x tokens and room for r:
    t' = min(t, max(r - x, ⌊(r + [t > x]) / 2⌋)), x' = min(x, r - t').

    Args:
        titles: titles of the passages; empty for those without one.
        texts: texts of the passages.
        vocabulary: splits the texts.
        length: maximum tokens, special ones included; None truncates nothing.

    Returns:
        Ids of each passage.
    """
    if length is not None:
        check_length(length)
    start, end = _start(vocabulary), vocabulary.sep_id
    found = []
    encoded = zip(titles, vocabulary.encode(titles), vocabulary.encode(texts), strict=True)
    for shown, title, text in encoded:
        if length is not None:
            room = length - 1 - len(start) - bool(shown)
            title = title[: max(room - len(text), (room + (len(title) > len(text))) // 2)]
            text = text[: room - len(title)]
        found.append([*start, *title, *([end] if shown else []), *text, end])
    return found


def encode_queries(
    texts: Sequence[str],
    vocabulary: Vocabulary,
    *,
    length: int,
    settings: QuerySettings = QuerySettings(),
) -> Tokens:
    """Token ids of questions, padded to `length`, as in a token store."""
    shown = normalize_queries(texts, settings.normalization)
    return _pad(query_ids(shown, vocabulary, length, prompt=settings.prompt), length)


def encode_passages(
    passages: Sequence[Passage],
    vocabulary: Vocabulary,
    *,
    length: int,
    titles: Titles = Titles.INCLUDE,
) -> Tokens:
    """Token ids of passages, padded to `length`, as in a token store."""
    shown, texts = titles.applied([p.title for p in passages], [p.text for p in passages])
    return _pad(passage_ids(shown, texts, vocabulary, length), length)


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


def _start(vocabulary: Vocabulary) -> list[int]:
    return [] if vocabulary.cls_id is None else [vocabulary.cls_id]


def _pad(rows: Sequence[Sequence[int]], length: int) -> Tokens:
    ids = np.zeros((len(rows), length), np.int32)
    for row, found in enumerate(rows):
        ids[row, : len(found)] = found
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Tokens(ids=ids, mask=np.arange(length)[None, :] < lengths[:, None])
