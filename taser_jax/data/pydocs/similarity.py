"""Near-duplicate texts: Jaccard similarity of word shingles, without comparing all pairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from taser_jax.data.pydocs.parse import words


def shingles(text: str, size: int) -> frozenset[tuple[str, ...]]:
    """Every run of `size` words; the whole text if it is shorter."""
    tokens = words(text)
    if len(tokens) <= size:
        return frozenset([tuple(tokens)]) if tokens else frozenset()
    return frozenset(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))


def jaccard(a: frozenset[Hashable], b: frozenset[Hashable]) -> float:
    """Shared members over all members; 0 for two empty sets."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared) if shared else 0.0


def similar_pairs(
    sets: Sequence[frozenset[tuple[str, ...]]], threshold: float
) -> Iterator[tuple[int, int]]:
    """Every pair of sets whose Jaccard similarity reaches the threshold, exactly.

    Two sets at least as similar as `threshold` share a member among the `n - ceil(threshold n) + 1`
    rarest of each (prefix filtering: Chaudhuri, Ganti and Kaushik, ICDE 2006), so only sets that
    share a rare member are compared.

    Args:
        sets: the sets; empty ones match none.
        threshold: the lowest similarity, above 0.

    Yields:
        Positions (i, j), i < j, each pair once.
    """
    frequency = Counter(member for members in sets for member in members)
    holders: dict[tuple[str, ...], list[int]] = {}
    for j, members in enumerate(sets):
        rarest = sorted(members, key=lambda m: (frequency[m], m))
        prefix = rarest[: len(rarest) - math.ceil(threshold * len(rarest)) + 1]
        candidates: set[int] = set()
        for member in prefix:
            known = holders.setdefault(member, [])
            candidates.update(known)
            known.append(j)
        for i in sorted(candidates):
            if jaccard(sets[i], members) >= threshold:
                yield i, j


def components(size: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """For each of `size` items, the smallest item of its connected component."""
    parent = list(range(size))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for i, j in pairs:
        low, high = sorted((find(i), find(j)))
        parent[high] = low
    return [find(item) for item in range(size)]
