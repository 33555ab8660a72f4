"""Finds queries that occur verbatim in a passage: a query must not be a quotation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from taser_jax.data.pydocs.parse import words

_MIN_WORDS = 5


def find_leaks(queries: Sequence[str], passages: Iterable[str]) -> list[int]:
    """Positions of the queries of five or more words that a passage contains verbatim.

    Texts are compared as sequences of lower-cased words, ignoring punctuation and line breaks.

    Example:
        >>> find_leaks(["the sum of two numbers", "two numbers"], ["Is the sum, of two numbers."])
        [0]

    Args:
        queries: texts that must not occur in passages.
        passages: texts to search; read once.

    Returns:
        Sorted positions in `queries`.
    """
    by_start: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
    for position, text in enumerate(queries):
        tokens = words(text)
        if len(tokens) >= _MIN_WORDS:
            by_start.setdefault(tuple(tokens[:_MIN_WORDS]), []).append((position, tokens))
    leaks: set[int] = set()
    for passage in passages:
        tokens = words(passage)
        for start in range(len(tokens) - _MIN_WORDS + 1):
            for position, query in by_start.get(tuple(tokens[start : start + _MIN_WORDS]), ()):
                if tokens[start : start + len(query)] == query:
                    leaks.add(position)
    return sorted(leaks)
