"""Splits the queries of one file by hash or position, in the same way on every machine."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from taser_jax.data.collections.store import SPLITS
from taser_jax.data.id_index import hash_share, text_hash
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Query

Item = TypeVar("Item")


def named_splits(name: str, where: str) -> tuple[str, ...]:
    """The splits in a name such as "train+validation".

    Raises:
        ConfigError: an unknown or repeated split.
    """
    splits = tuple(name.split("+"))
    if len(set(splits)) < len(splits) or not set(splits) <= set(SPLITS):
        raise ConfigError(
            f"split {name!r}",
            where=where,
            expected=f"of {', '.join(SPLITS)}, several joined by '+'",
        )
    return splits


def split_of(id: str, *, task: str, splits: Sequence[str], shares: Mapping[str, float]) -> str:
    """The split of a query, by the hash of its task and id.

    Args:
        id: the query's id, or the part of it that must stay together.
        task: its task, so that equal ids of two tasks are split independently.
        splits: the splits to choose from.
        shares: share of each, relative to the others in `splits`.

    Raises:
        ConfigError: a share is missing or not above 0.
    """
    weights = [shares.get(split, 0.0) for split in splits]
    if min(weights) <= 0:
        raise ConfigError(
            f"shares {dict(shares)}",
            where=f"task {task!r}",
            expected=f"a share above 0 for each of {', '.join(splits)}",
        )
    if len(splits) == 1:
        return splits[0]
    place = hash_share(f"{task}\t{id}") * sum(weights)
    for split, weight in zip(splits, weights, strict=True):
        if place < weight:
            return split
        place -= weight
    return splits[-1]


def without_last(items: Iterable[Item], count: int) -> Iterator[Item]:
    """All but the last `count`, read once; nothing if there are no more than these."""
    held: collections.deque[Item] = collections.deque()
    for item in items:
        held.append(item)
        if len(held) > count:
            yield held.popleft()


def last(items: Iterable[Item], count: int) -> Iterator[Item]:
    """The last `count`, read once; all if there are no more than these."""
    yield from collections.deque(items, maxlen=count)


def group_of(id: str, pattern: str | None, where: str) -> str:
    """The part of an id that decides its split: the match of the pattern, or the whole id.

    Example:
        >>> group_of("talk7_3", "^[^_]+", "line 1")
        'talk7'

    Raises:
        DataError: the pattern does not match.
    """
    if pattern is None:
        return id
    found = re.search(pattern, id)
    if found is None:
        raise DataError(
            f"the pattern {pattern!r} does not match the id {id!r}",
            where=f"{where}, field 'id'",
            fix="correct the pattern in split_groups, or leave the task out of it",
        )
    return found.group()


def sampled(ids: Iterable[str], *, task: str, count: int) -> frozenset[str]:
    """A random sample of `count` ids, chosen by hash; all if there are no more.

    Args:
        ids: the ids to choose from.
        task: the task, so that tasks are sampled independently.
        count: size of the sample.
    """
    ids = list(ids)
    if len(ids) <= count:
        return frozenset(ids)
    hashes = np.array([text_hash(f"sample\t{task}\t{id}") for id in ids], np.uint64)
    return frozenset(ids[i] for i in np.argsort(hashes, kind="stable")[:count])


def divide_by_positives(
    queries: Sequence[Query], *, share: float
) -> tuple[list[Query], list[Query]]:
    """Divides queries by a hash of their positive passages, so that no passage is on both sides.

    Queries that share a positive, directly or through other queries, stay together. The hash does
    not depend on the task: where each query has one positive, tasks of one collection are divided
    by the same passages.

    Args:
        queries: queries with rows of positives.
        share: expected share of the second part.

    Returns:
        Both parts, each in the order given; a query without a positive is in the first.
    """
    groups: dict[int, int] = {}

    def group(row: int) -> int:
        while groups.setdefault(row, row) != row:
            groups[row] = groups[groups[row]]
            row = groups[row]
        return row

    for query in queries:
        for row in query.positives[1:]:
            first, second = sorted((group(query.positives[0]), group(row)))
            groups[second] = first
    parts: tuple[list[Query], list[Query]] = ([], [])
    for query in queries:
        held_out = bool(query.positives) and (
            hash_share(f"positive\t{group(query.positives[0])}") < share
        )
        parts[held_out].append(query)
    return parts
