"""The task of each training step's batch.

Source: DPR's multi-set iterator (Karpukhin et al., 2020, released code): every global batch comes
from one data set, so that negatives are of the query's own kind.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import zlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from taser_jax.storage.errors import ConfigError


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


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step's position in the schedule.

    Attributes:
        task: the task of the batch.
        batch: number of earlier batches of that task, over all epochs.
    """

    task: str
    batch: int


@dataclasses.dataclass(frozen=True)
class _Order:
    """One epoch: the task of each step, and the number of its earlier steps in the epoch."""

    tasks: Int[np.ndarray, " steps"]
    occurrences: Int[np.ndarray, " steps"]


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
        batch_size: queries in a global batch.
        rates: task -> times its queries are seen per epoch; 1 by default.
        seed: 0 or more.

    Raises:
        ConfigError: a rate of an unknown task, or a rate that is not positive.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        batch_size: int,
        rates: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        rates = {} if rates is None else rates
        if not sizes:
            raise ConfigError("no task to train on")
        _check_rates(rates, sizes)
        self.tasks = sorted(sizes)
        self.batches_per_epoch = {
            task: max(1, int(math.ceil(sizes[task] / batch_size) * rates.get(task, 1)))
            for task in self.tasks
        }
        self.steps_per_epoch = sum(self.batches_per_epoch.values())
        self._seed = seed
        # Neighbouring steps belong to at most two epochs; making an order takes time linear in the
        # steps of the epoch.
        self._order = functools.lru_cache(maxsize=2)(self._make_order)

    def turn(self, step: int) -> Turn:
        """The task of a step and the number of its batch."""
        if step < 0:
            raise ConfigError(f"step {step}", expected="0 or more")
        epoch, at = divmod(step, self.steps_per_epoch)
        order = self._order(epoch)
        task = self.tasks[order.tasks[at]]
        before = epoch * self.batches_per_epoch[task]
        return Turn(task, before + int(order.occurrences[at]))

    def _make_order(self, epoch: int) -> _Order:
        counts = [self.batches_per_epoch[task] for task in self.tasks]
        tasks = np.repeat(np.arange(len(counts)), counts)
        generator(self._seed, Purpose.TASK_ORDER, epoch).shuffle(tasks)
        occurrences = np.empty_like(tasks)
        for number, count in enumerate(counts):
            occurrences[tasks == number] = np.arange(count)
        return _Order(tasks, occurrences)


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
    weight_sum, size_sum = sum(weights.values()), sum(sizes[task] for task in weights)
    return {task: weight / weight_sum * size_sum / sizes[task] for task, weight in weights.items()}


def _check_rates(rates: Mapping[str, float], tasks: Mapping[str, int]) -> None:
    for task, rate in rates.items():
        if task not in tasks:
            nearest = difflib.get_close_matches(task, tasks, n=1)
            found = f"a rate for task {task!r}, which is none of {', '.join(sorted(tasks))}"
            fix = f"did you mean {nearest[0]!r}?" if nearest else "leave it out"
            raise ConfigError(found, fix=fix)
        if not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate {rate} for task {task!r}", expected="a positive number")
