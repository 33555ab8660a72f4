"""Whether a passage has an answer, sublist by sublist and pattern by pattern."""

import contextlib
import unicodedata
from collections.abc import Iterable

import regex

_FLAGS = regex.I | regex.U | regex.M
_TOKENS = regex.compile(r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", _FLAGS)


def oracle_tokens(text: str) -> list[str]:
    normal = unicodedata.normalize("NFD", text)
    return [match.group().lower() for match in _TOKENS.finditer(normal)]


def oracle_has_answer(answers: Iterable[str], text: str) -> bool:
    """An empty answer is a sublist of anything."""
    words = oracle_tokens(text)
    return any(
        words[start : start + len(answer)] == answer
        for answer in map(oracle_tokens, answers)
        for start in range(len(words) - len(answer) + 1)
    )


def oracle_regex(answers: Iterable[str], text: str) -> bool:
    text = unicodedata.normalize("NFD", text)
    for answer in answers:
        with contextlib.suppress(regex.error, RecursionError):
            if regex.search(unicodedata.normalize("NFD", answer), text, _FLAGS):
                return True
    return False
