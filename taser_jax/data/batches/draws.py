"""What a step draws: its task, by the schedule, and lists of rows, one per query.

Source of the schedule: DPR's multi-set iterator (Karpukhin et al., 2020, released code): every
global batch comes from one data set, so that negatives are of the query's own kind.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import zlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import ConfigError, did_you_mean


class Purpose(enum.IntEnum):
    """Separates random draws for different purposes from the same seed."""

    TASK_ORDER = 1
    QUERY_ORDER = 2
    POSITIVE = 3
    HARD_NEGATIVE = 4
    RANDOM_NEGATIVE = 5


def generator(seed: int, purpose: Purpose, *numbers: int) -> np.random.Generator:
    """A generator that depends only on its arguments."""
    return np.random.default_rng([seed, int(purpose), *numbers])


def task_number(task: str) -> int:
    """A number for a task that does not depend on other tasks."""
    return zlib.crc32(task.encode("utf-8"))


class Schedule:
    """The order of data sets: a pure function of (seed, step).

    An epoch has max(1, int(ceil(size / batch_size) * rate)) batches of each data set, in an order
    shuffled by seed and epoch. A set's batches are counted over all epochs, so that a set with a
    rate above 1 passes over its queries more than once per epoch.

    Example:
        sizes {"nq": 100, "trec": 10}, batch_size 10, rates {"trec": 4}: epochs of 10 batches of nq
        and 4 of trec.

    Args:
        sizes: task -> number of its queries.
        config: queries in a global batch, seed, and rates: task -> times its queries are seen per
            epoch, 1 by default.

    Raises:
        ConfigError: a rate of an unknown task, or a rate that is not positive.
    """

    def __init__(self, sizes: Mapping[str, int], config: BatchingConfig) -> None:
        if not sizes:
            fix = "run `taser tokenize` for tasks that have training queries"
            raise ConfigError("no task to train on", where="training queries", fix=fix)
        _check_rates(config.rates, sizes)
        self.tasks = sorted(sizes)
        whole = {task: math.ceil(sizes[task] / config.batch_size) for task in self.tasks}
        self.batches_per_epoch = {
            task: max(1, int(count * config.rates.get(task, 1))) for task, count in whole.items()
        }
        self.steps_per_epoch = sum(self.batches_per_epoch.values())
        self._seed = config.seed
        # Neighbouring steps belong to at most two epochs; making an order takes time linear in the
        # steps of the epoch.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def turn(self, step: int) -> tuple[str, int]:
        """The task of a step, and the number of its earlier batches, over all epochs."""
        if step < 0:
            raise ConfigError(f"step {step}", expected="0 or more")
        epoch, at = divmod(step, self.steps_per_epoch)
        tasks, occurrences = self._order(epoch)
        task = self.tasks[tasks[at]]
        before = epoch * self.batches_per_epoch[task]
        return task, before + int(occurrences[at])

    def _make_order(
        self, epoch: int
    ) -> tuple[Int[np.ndarray, " steps"], Int[np.ndarray, " steps"]]:
        """The task of each step of an epoch, and the number of its earlier steps in it."""
        counts = [self.batches_per_epoch[task] for task in self.tasks]
        tasks = np.repeat(np.arange(len(counts)), counts)
        generator(self._seed, Purpose.TASK_ORDER, epoch).shuffle(tasks)
        occurrences = np.empty_like(tasks)
        for number, count in enumerate(counts):
            occurrences[tasks == number] = np.arange(count)
        return tasks, occurrences


def rates_from_weights(weights: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    """Rates that give each task its share of the batches.

    SeqIO mixtures have weights, unnormalised shares of the batches; `Schedule` takes rates, the
    times that a task's queries are seen per epoch. rate_t = (w_t / Σw) · (Σn / n_t), which
    keeps the epoch's length.

    Example:
        >>> rates_from_weights({"nq": 1.0, "trec": 1.0}, {"nq": 90, "trec": 10})
        {'nq': 0.5555555555555556, 'trec': 5.0}

    Args:
        weights: task -> weight, for exactly the tasks of `sizes`.
        sizes: task -> number of its queries.

    Raises:
        ConfigError: a task without a weight, a weight without a task, or one that is not positive.
    """
    _check_rates(weights, sizes)
    missing = sorted(sizes.keys() - weights.keys())
    if missing:
        raise ConfigError(f"no weight for task {missing[0]!r}", fix="give every task a weight")
    # A task without queries has a rate, too: `check_queries` names it.
    counts = {task: max(sizes[task], 1) for task in weights}
    weight_sum, size_sum = sum(weights.values()), sum(counts.values())
    # One division: weights that are the sizes give exactly 1, and every batch of an epoch.
    return {
        task: weight * size_sum / (weight_sum * counts[task]) for task, weight in weights.items()
    }


def _check_rates(rates: Mapping[str, float], tasks: Mapping[str, int]) -> None:
    for task, rate in rates.items():
        if task not in tasks:
            problem = f"a rate for task {task!r}, which is none of {', '.join(sorted(tasks))}"
            raise ConfigError(problem, fix=did_you_mean(task, tasks) or "leave it out")
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate {rate} for task {task!r}", expected="a positive number")


def take(lists: Ragged, rows: Int[np.ndarray, " queries"]) -> Ragged:
    """The lists of the given rows, packed again."""
    starts, lengths = lists.offsets[rows], lists.offsets[rows + 1] - lists.offsets[rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    at = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return Ragged(offsets, lists.values[at])


def queries_of(queries: TokenizedQueries, rows: Int[np.ndarray, " kept"]) -> TokenizedQueries:
    """The given queries, in the order of the rows, with their own fingerprint."""
    return dataclasses.replace(
        queries,
        ids=queries.ids[rows],
        lengths=queries.lengths[rows],
        positives=take(queries.positives, rows),
        hard_negatives=take(queries.hard_negatives, rows),
        query_ids=[queries.query_ids[row] for row in rows],
        fingerprint=fingerprint([queries.fingerprint, rows]),
    )


def keys(lists: Ragged, num_rows: int) -> Int[np.ndarray, " total"]:
    """One integer for each (list, row) pair: list · num_rows + row."""
    return np.repeat(np.arange(len(lists)), lists.lengths) * num_rows + lists.values


def without(lists: Ragged, excluded: Ragged, num_rows: int) -> Ragged:
    """Each list without duplicates and without the rows of the parallel `excluded` list.

    Example:
        >>> pools, positives = Ragged.from_lists([[5, 3, 5]]), Ragged.from_lists([[3]])
        >>> without(pools, positives, num_rows=9)[0].tolist()
        [5]
    """
    pairs = np.unique(keys(lists, num_rows))
    pairs = pairs[~np.isin(pairs, keys(excluded, num_rows))]
    offsets = np.searchsorted(pairs, np.arange(len(lists) + 1) * num_rows)
    return Ragged(offsets.astype(np.int64), (pairs % num_rows).astype(np.int32))


def choose(
    lists: Ragged, count: int, rng: np.random.Generator
) -> tuple[Int[np.ndarray, "queries count"], Bool[np.ndarray, "queries count"]]:
    """The first `count` entries of each list after a shuffle: a uniform sample without replacement.

    Runs the first `count` steps of a Fisher-Yates shuffle for all lists at once. The lists are not
    copied: the current entry at a position follows from the earlier swaps.

    Args:
        lists: one list per query.
        count: number to choose from each.
        rng: draws [queries, count] numbers, regardless of the lists' lengths.

    Returns:
        The chosen values, and which of them exist; a list shorter than `count` gives all of its
        entries first, then zeros.
    """
    lengths = lists.lengths
    draws = rng.random((len(lists), count))
    swapped = np.zeros((count, len(lists)), np.int64)
    displaced = np.zeros((count, len(lists)), np.int64)
    places = np.zeros((len(lists), count), np.int64)

    def holds(place: np.ndarray, before: int) -> np.ndarray:
        value = place
        for earlier in range(before):
            value = np.where(swapped[earlier] == place, displaced[earlier], value)
        return value

    for j in range(count):
        left = np.maximum(lengths - j, 0)
        swapped[j] = j + (draws[:, j] * left).astype(np.int64)
        displaced[j] = holds(np.full(len(lists), j), j)
        places[:, j] = holds(swapped[j], j)
    exists = np.arange(count)[None, :] < lengths[:, None]
    values = np.zeros((len(lists), count), np.int32)
    at = (lists.offsets[:-1, None] + places)[exists]
    values[exists] = lists.values[at]
    return values, exists


def fill_at_random(
    values: Int[np.ndarray, "queries count"],
    exists: Bool[np.ndarray, "queries count"],
    excluded: Ragged,
    num_rows: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, "queries count"]:
    """Fills missing entries with random rows, distinct within a query and not in `excluded`.

    Args:
        values: rows of each query.
        exists: False at the entries to fill.
        excluded: rows that a query must not get; at least `count` others must remain.
        num_rows: rows are drawn from 0 to num_rows - 1.
        rng: the draws.

    Returns:
        A filled copy of `values`.
    """
    values = values.copy()
    queries, columns = np.nonzero(~exists)
    owners = np.broadcast_to(np.arange(len(values))[:, None], values.shape)[exists]
    taken = np.concatenate([keys(excluded, num_rows), owners * num_rows + values[exists]])
    while len(queries):
        drawn = rng.integers(num_rows, size=len(queries))
        pairs = queries * num_rows + drawn
        fresh = np.zeros(len(pairs), bool)
        fresh[np.unique(pairs, return_index=True)[1]] = True
        fresh &= ~np.isin(pairs, taken)
        values[queries[fresh], columns[fresh]] = drawn[fresh]
        taken = np.concatenate([taken, pairs[fresh]])
        queries, columns = queries[~fresh], columns[~fresh]
    return values


def occurs(
    lists: Ragged, passage_rows: Int[np.ndarray, " passages"]
) -> Bool[np.ndarray, "queries passages"]:
    """Whether each passage is in each query's list.

    Example:
        >>> occurs(Ragged.from_lists([[4], [9, 7]]), np.array([7, 4, 7])).astype(int)
        array([[0, 1, 0],
               [1, 0, 1]])
    """
    is_in_list = np.zeros((len(lists), len(passage_rows)), bool)
    order = np.argsort(passage_rows, kind="stable")
    ordered = passage_rows[order]
    first = np.searchsorted(ordered, lists.values, side="left")
    copies = np.searchsorted(ordered, lists.values, side="right") - first
    queries = np.repeat(np.repeat(np.arange(len(lists)), lists.lengths), copies)
    within = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    is_in_list[queries, order[np.repeat(first, copies) + within]] = True
    return is_in_list
