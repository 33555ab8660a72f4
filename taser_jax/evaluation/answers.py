"""Decides whether a passage contains an answer: DPR's rule, fast enough for whole runs.

Source: Karpukhin et al., EMNLP 2020, section 5, and the rule of its evaluation script, on which
every published "top-k accuracy" of open-domain retrieval rests.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import regex
from jaxtyping import Bool, Int

from taser_jax.storage.progress import bar

_TOKENS = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
# The same tokens for ASCII text, with the standard library's faster engine.
_ASCII_TOKENS = re.compile(r"[A-Za-z0-9]+|[!-~]")
_REGEX_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


class AnswerMatch(enum.Enum):
    """How an answer is matched in a passage's body (never in its title).

    STRING: the answer's tokens are a contiguous run of the passage's tokens, after NFD
        normalisation and lower-casing; punctuation counts, articles are kept. As in DPR's script,
        an answer without tokens (white space only) is in every passage.
    REGEX: the answer is a regular expression searched in the NFD-normalised text, ignoring case
        (CuratedTREC). A pattern that does not compile matches nothing.
    """

    STRING = "string"
    REGEX = "regex"


def tokenize(text: str) -> list[str]:
    """DPR's tokens of a text: runs of letters, digits and marks, or one visible character.

    Example:
        >>> tokenize("The U.S. won 3-1")
        ['the', 'u', '.', 's', '.', 'won', '3', '-', '1']

    Args:
        text: any text.

    Returns:
        Tokens, NFD-normalised and lower-cased.
    """
    return _padded(text).split()


def _padded(text: str) -> str:
    """Tokens between single spaces, and one space at each end.

    No token contains a space, so "the answer's tokens are a contiguous sublist" is equivalent to
    "the answer's padded string is a substring", which runs in C. Lower-casing after joining equals
    lower-casing each token, because a space ends a word for the final sigma too.
    """
    if text.isascii():
        tokens = _ASCII_TOKENS.findall(text)
    else:
        tokens = _TOKENS.findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(tokens)} ".lower()


def _nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """One question's answers, ready for matching in prepared passages."""

    strings: tuple[str, ...] = ()
    patterns: tuple[regex.Pattern[str], ...] = ()
    everything: bool = False

    @classmethod
    def make(cls, answers: Sequence[str], match: AnswerMatch) -> _Answers:
        if match is AnswerMatch.REGEX:
            return cls(patterns=tuple(_compiled(answers)))
        padded = [_padded(answer) for answer in answers]
        strings = tuple(answer for answer in padded if not answer.isspace())
        return cls(strings=strings, everything=len(strings) < len(padded))

    def in_passage(self, prepared: str) -> bool:
        return (
            self.everything
            or any(string in prepared for string in self.strings)
            or any(pattern.search(prepared) for pattern in self.patterns)
        )


def _compiled(answers: Sequence[str]) -> Iterator[regex.Pattern[str]]:
    for answer in answers:
        try:
            yield regex.compile(_nfd(answer), _REGEX_FLAGS)
        except (regex.error, RecursionError, OverflowError):
            continue


class AnswerMatcher:
    """Answer checks over whole runs, each passage fetched and tokenised once.

    Tokenised passages are cached by row, up to `cache_bytes`; the oldest are dropped first. Besides
    the cache, memory holds at most `block_queries` lists of passages.

    Example:
        def text_of(rows):
            return [passage.text for passage in store.get_many(rows)]

        hits = AnswerMatcher(text_of).hits(run.rows, [query.answers for query in queries])

    Args:
        text_of: rows -> the passages' bodies, in the same order.
        match: how to match.
        cache_bytes: memory for tokenised passages, in bytes.
        block_queries: queries checked between two fetches of passages.
    """

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], list[str]],
        *,
        match: AnswerMatch = AnswerMatch.STRING,
        cache_bytes: int = 512 * 2**20,
        block_queries: int = 256,
    ) -> None:
        self._match, self._text_of = match, text_of
        self._cache: dict[int, str] = {}
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._block_queries = block_queries

    def hits(
        self, rows: Int[np.ndarray, "queries k"], answers: Sequence[Sequence[str]]
    ) -> Bool[np.ndarray, "queries k"]:
        """Which retrieved passages contain an answer of their query.

        Args:
            rows: rows of the passage store, one list per query; -1 for no result.
            answers: each query's answers, parallel to `rows`.

        Returns:
            True if the passage contains an answer; always False at -1.
        """
        hits = np.zeros(rows.shape, bool)
        with bar("answer match", total=len(rows), unit="query") as progress:
            for start in range(0, len(rows), self._block_queries):
                block = rows[start : start + self._block_queries]
                prepared = self._passages(np.unique(block))
                for index, passage_rows in enumerate(block.tolist(), start):
                    of_query = _Answers.make(answers[index], self._match)
                    hits[index] = [
                        row >= 0 and of_query.in_passage(prepared[row]) for row in passage_rows
                    ]
                progress.update(len(block))
        return hits

    def _passages(self, rows: Int[np.ndarray, " rows"]) -> dict[int, str]:
        """Prepared passages of distinct rows, from the cache or newly made; skips -1."""
        retrieved = [row for row in rows.tolist() if row >= 0]
        passages = {row: self._cache[row] for row in retrieved if row in self._cache}
        missing = [row for row in retrieved if row not in passages]
        if missing:
            form = _padded if self._match is AnswerMatch.STRING else _nfd
            for row, text in zip(missing, self._text_of(missing), strict=True):
                passages[row] = form(text)
                self._remember(row, passages[row])
        return passages

    def _remember(self, row: int, prepared: str) -> None:
        size = prepared.__sizeof__()
        while self._cache and self._cached_bytes + size > self._cache_bytes:
            oldest = next(iter(self._cache))
            self._cached_bytes -= self._cache.pop(oldest).__sizeof__()
        if size <= self._cache_bytes:
            self._cache[row] = prepared
            self._cached_bytes += size
