"""Splitting queries of one file, by hash or by place: the same on every machine."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from taser_jax.data.collections.store import SPLITS
from taser_jax.data.id_index import text_hash
from taser_jax.errors import ConfigError, DataError

Item = TypeVar("Item")
_HASHES = float(1 << 64)


def named_splits(name: str, where: str) -> tuple[str, ...]:
    """The splits that a name such as "train+validation" stands for.

    Raises:
        ConfigError: an unknown split, or one twice.
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
    """The split that a query falls into, by the hash of its task and id.

    Args:
        id: the query's id, or the part of it that must stay together.
        task: its task, so that equal ids of two tasks fall independently.
        splits: those to choose from.
        shares: share of each, relative to the others in `splits`.

    Raises:
        ConfigError: a share that is missing or not above 0.
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
    place = text_hash(f"{task}\t{id}") / _HASHES * sum(weights)
    for split, weight in zip(splits, weights, strict=True):
        if place < weight:
            return split
        place -= weight
    return splits[-1]


def without_last(items: Iterable[Item], count: int) -> Iterator[Item]:
    """All but the last `count`, read once; nothing where there are no more than those."""
    held: collections.deque[Item] = collections.deque()
    for item in items:
        held.append(item)
        if len(held) > count:
            yield held.popleft()


def last(items: Iterable[Item], count: int) -> Iterator[Item]:
    """The last `count`, read once; all where there are no more than those."""
    yield from collections.deque(items, maxlen=count)


def group_of(id: str, pattern: str | None, where: str) -> str:
    """The part of an id that decides its split: what the pattern finds, or all of it.

    Example:
        >>> group_of("talk7_3", "^[^_]+", "line 1")
        'talk7'

    Raises:
        DataError: the pattern finds nothing in the id.
    """
    if pattern is None:
        return id
    found = re.search(pattern, id)
    if found is None:
        raise DataError(
            f"the id {id!r} has nothing that {pattern!r} finds",
            where=f"{where}, field 'id'",
            fix="correct the pattern in split_groups, or leave the task out of it",
        )
    return found.group()


def sampled(ids: Iterable[str], *, task: str, count: int) -> frozenset[str]:
    """A random `count` of the ids, chosen by hash; all where there are no more.

    Args:
        ids: to choose from.
        task: so that tasks are sampled independently.
        count: how many.
    """
    ids = list(ids)
    if len(ids) <= count:
        return frozenset(ids)
    hashes = np.array([text_hash(f"sample\t{task}\t{id}") for id in ids], np.uint64)
    return frozenset(ids[i] for i in np.argsort(hashes, kind="stable")[:count])
