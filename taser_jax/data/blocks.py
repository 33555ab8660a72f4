"""Cuts items into blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`; the last may be shorter.

    Example:
        >>> list(in_blocks("abc", 2))
        [['a', 'b'], ['c']]
    """
    remaining = iter(items)
    while block := list(itertools.islice(remaining, size)):
        yield block
