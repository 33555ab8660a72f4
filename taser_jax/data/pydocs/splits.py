"""Splits objects into train, validation and test so that near-copies stay together."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from taser_jax.data.pydocs.objects import DocumentedObject
from taser_jax.data.pydocs.parse import words

SPLITS = ("train", "validation", "test")
_SAME_LEAF = 0.5
_SAME_TEXT = 0.9
_TEST_SHARE, _VALIDATION_SHARE = 0.22, 0.10


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The split and cluster of each object.

    Attributes:
        split: one of `SPLITS` per object.
        cluster: the number of each object's cluster; its texts are near-duplicates, and its objects
            share their gold.
    """

    split: tuple[str, ...]
    cluster: tuple[int, ...]


def split_of(family: str) -> str:
    """The split of a family of objects, by the SHA-256 of its name.

    Args:
        family: canonical name of the family's first object.
    """
    share = int.from_bytes(hashlib.sha256(family.encode()).digest()[:8], "big") / 2**64
    if share < _TEST_SHARE:
        return "test"
    return "validation" if share < _TEST_SHARE + _VALIDATION_SHARE else "train"


def assign(objects: Sequence[DocumentedObject]) -> Assignment:
    """Finds near-duplicates and splits the objects.

    Objects whose four-word shingles have a Jaccard similarity of at least 0.9 form a cluster.
    Clusters, and objects of the same last name with a similarity of at least 0.5, form a family,
    which lies in one split.

    Args:
        objects: all objects, in any order: only their text matters.
    """
    sets = [shingles(" ".join(e.text for e in o.doc.elements), 4) for o in objects]
    same_text = list(similar_pairs(sets, _SAME_TEXT))
    by_leaf: dict[str, list[int]] = {}
    for index, item in enumerate(objects):
        by_leaf.setdefault(item.leaf, []).append(index)
    same_leaf = [
        (i, j)
        for group in by_leaf.values()
        for position, i in enumerate(group)
        for j in group[position + 1 :]
        if jaccard(sets[i], sets[j]) >= _SAME_LEAF
    ]
    cluster = components(len(objects), same_text)
    family = components(len(objects), [*same_text, *same_leaf])
    names: dict[int, str] = {}
    for index, head in enumerate(family):
        names[head] = min(names.get(head, objects[index].name), objects[index].name)
    return Assignment(tuple(split_of(names[head]) for head in family), tuple(cluster))


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
