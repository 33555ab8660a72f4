"""How batches are drawn, and the interface of their source, which works a few steps ahead."""

from __future__ import annotations

import dataclasses
import enum
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from taser_jax.data.batches.padding import OtherTexts
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Batch
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError, check_fields
from taser_jax.storage.typed_files import Checked, Seed


class FalseNegatives(enum.Enum):
    """Treatment of a passage of the batch that is also a positive of another query.

    MASK: it is left out of that query's loss, and so is a copy of the query's own positive.
    KEEP: it counts as that query's negative, as in DPR and TASER; so does one of the query's own
        positives if it is among the query's hard negatives and never trained on (TASER's P2
        excludes only the gold passage).
    """

    MASK = "mask"
    KEEP = "keep"


class PositiveChoice(enum.Enum):
    """Which of several positives a step trains on: a random one, or the first (gold)."""

    SAMPLE = "sample"
    FIRST = "first"


@dataclasses.dataclass(frozen=True)
class BatchingConfig(Checked):
    """How batches are drawn.

    Attributes:
        batch_size: queries in a global batch.
        num_negatives: hard negatives per query.
        false_negatives: MASK, or KEEP as in the papers.
        positives: SAMPLE, or FIRST as in the papers.
        queue_steps: number of preceding steps whose passages are negatives too, without gradients,
            unless they are positives of the query; 0 keeps no queue.
        seed: 0 or more.
        rates: task -> times its queries are seen per epoch; 1 by default.
    """

    batch_size: int
    num_negatives: int = 1
    false_negatives: FalseNegatives = FalseNegatives.MASK
    positives: PositiveChoice = PositiveChoice.SAMPLE
    queue_steps: int = 0
    seed: Seed = 0
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "batch_size", is_valid=lambda n: n >= 1, expected="1 or more")
        counts = ("num_negatives", "queue_steps", "seed")
        check_fields(self, *counts, is_valid=lambda n: n >= 0, expected="0 or more")


def check_queries(
    task: str, queries: TokenizedQueries, store: TokenStore, config: BatchingConfig
) -> None:
    """Checks that batches can be drawn from a task's queries.

    Raises:
        ConfigError: too few queries or passages for a batch.
        DataError: no queries, a query without a positive, or a row that the store does not have.
        FingerprintError: queries of another collection than the store's.
    """
    where = f"task {task!r}, split {queries.split!r}"
    if queries.collection_fingerprint:
        require_equal(
            where,
            {"collection": queries.collection_fingerprint},
            {"collection": store.metadata.collection_fingerprint},
            "take queries and passages from one token store",
        )
    if not len(queries):
        raise DataError("no queries", where=where, fix="leave out the task")
    empty = np.flatnonzero(queries.positives.lengths == 0)
    if len(empty):
        raise DataError(
            f"query {queries.query_ids[empty[0]]!r} has no positive"
            + (f" (nor have {len(empty) - 1} others)" if len(empty) > 1 else ""),
            where=where,
            fix="drop queries without a positive when preparing the collection",
        )
    for kind in ("positives", "hard_negatives"):
        rows: Ragged = getattr(queries, kind)
        bad = np.flatnonzero((rows.values < 0) | (rows.values >= len(store)))
        if len(bad):
            query = int(np.searchsorted(rows.offsets, bad[0], side="right")) - 1
            raise DataError(
                f"passage row {rows.values[bad[0]]}, where the store has 0 to {len(store) - 1}",
                where=f"{where}, {kind} of query {queries.query_ids[query]!r}",
                fix="take queries, negatives and passages of one collection",
            )
    most = int(queries.positives.lengths.max())
    if len(store) - most < config.num_negatives:
        problem = f"{config.num_negatives} negatives per query from {len(store)} passages"
        expected = f"{len(store) - most} or fewer: a query has {most} positives"
        raise ConfigError(problem, where=where, expected=expected)
    if len(queries) < config.batch_size and config.false_negatives is FalseNegatives.KEEP:
        raise ConfigError(
            f"{len(queries)} queries do not fill a batch of {config.batch_size}",
            where=where,
            fix=f"set batch_size to {len(queries)} or less, leave out the task, or set "
            "false_negatives to MASK, which excludes a query's copies from its loss",
        )


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
