"""Small changes of real files, as editors, disks, spreadsheets and other programs make them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

TOKENS = (
    *b"\x00 \xff \xc3 \xef\xbb\xbf \xe2\x80\xa8 \xc2\xa0 \x0c \\ud800".split(b" "),
    *b"\t \n \r\n \n\n \" ' \\ , : { } [ ] < >".split(b" "),
    *b'null true NaN Infinity -1 0 1e999 3.5 [] {} "" &amp; &x; <!--'.split(b" "),
    *(b"9" * 25, b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"x" * 5000),
)


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """The content after one to three changes."""
    for _ in range(rng.integers(1, 4)):
        content = _CHANGES[rng.integers(len(_CHANGES))](content, rng)
    return content


def _flip(content: bytes, rng: np.random.Generator) -> bytes:
    at = _place(content, rng)
    return content[:at] + bytes([rng.integers(256)]) + content[at + 1 :]


def _insert(content: bytes, rng: np.random.Generator) -> bytes:
    at = _place(content, rng)
    return content[:at] + TOKENS[rng.integers(len(TOKENS))] + content[at:]


def _delete(content: bytes, rng: np.random.Generator) -> bytes:
    at = _place(content, rng)
    return content[:at] + content[at + int(rng.integers(1, 20)) :]


def _repeat(content: bytes, rng: np.random.Generator) -> bytes:
    at = _place(content, rng)
    stop = at + int(rng.integers(1, 200))
    return content[:stop] + content[at:]


def _truncate(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: _place(content, rng)]


def _exchange_lines(content: bytes, rng: np.random.Generator) -> bytes:
    lines: Sequence[bytes] = content.splitlines(keepends=True)
    return b"".join(lines[i] for i in rng.permutation(len(lines)))


def _put_for_a_value(content: bytes, rng: np.random.Generator) -> bytes:
    """One token between separators becomes another."""
    parts = content.replace(b":", b",").split(b",")
    place = int(rng.integers(len(parts)))
    start = sum(len(part) + 1 for part in parts[:place])
    token = TOKENS[rng.integers(len(TOKENS))]
    return content[:start] + token + content[start + len(parts[place]) :]


def _place(content: bytes, rng: np.random.Generator) -> int:
    return int(rng.integers(len(content) + 1))


_CHANGES = (_flip, _insert, _delete, _repeat, _truncate, _exchange_lines, _put_for_a_value)
