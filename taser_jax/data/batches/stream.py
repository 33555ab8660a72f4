"""The interface between training and its source of batches, which works a few steps ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from taser_jax.data.batches.padding import OtherTexts
from taser_jax.models.batch import Batch
from taser_jax.storage.errors import ConfigError


@runtime_checkable
class Stream(Protocol):
    """The batches of every step, for one task or for each: a pure function of seed and step."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what decides a step's rows and tokens; the number of hosts does not."""

    @property
    def batches_per_epoch(self) -> dict[str, int]:
        """Task -> batches in one pass over it."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every query has been seen."""

    def batches(self, step: int) -> dict[str, Batch]:
        """This host's share of the step's batches, by task."""

    def on_texts(self, states: OtherTexts) -> Stream:
        """The same batches, with states of frozen blocks in place of tokens."""

    def query_rows(self, step: int) -> Mapping[str, np.ndarray]:
        """Rows of the queries in the step's global batches, by task."""


BatchT = TypeVar("BatchT")


def prefetch(
    make: Callable[[int], BatchT],
    start_step: int,
    stop_step: int,
    put: Callable[[BatchT], BatchT],
    *,
    depth: int = 2,
) -> Iterator[tuple[int, BatchT]]:
    """Yields (step, put(make(step))) for the steps in order; a thread works ahead.

    The thread starts with the first `next`. Closing the iterator early (`close()`, or leaving
    it to the garbage collector) stops and joins it.

    Args:
        make: step -> its batch, or its batches.
        start_step: first step.
        stop_step: the step after the last.
        put: moves a batch to the devices; called in the thread.
        depth: maximum number of batches held ready.

    Returns:
        An iterator over steps and batches.

    Raises:
        ConfigError: `depth` below 1. What `make` or `put` raise is raised at the step it
            belongs to.
    """
    if depth < 1:
        raise ConfigError(f"prefetch depth {depth}", expected="1 or more")
    return _prefetched(make, range(start_step, stop_step), put, depth)


def _prefetched(
    make: Callable[[int], BatchT], steps: range, put: Callable[[BatchT], BatchT], depth: int
) -> Iterator[tuple[int, BatchT]]:
    ready: queue.SimpleQueue[BatchT | BaseException] = queue.SimpleQueue()
    free = threading.Semaphore(depth)
    stopped = threading.Event()

    def work() -> None:
        try:
            for step in steps:
                free.acquire()
                if stopped.is_set():
                    return
                ready.put(put(make(step)))
        except BaseException as error:
            # Any exception: otherwise the reader would wait forever for a dead thread.
            ready.put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        for step in steps:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            free.release()
            yield step, item
    finally:
        stopped.set()
        free.release()
        thread.join()
