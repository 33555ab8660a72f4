"""How batches are drawn, padded and made ahead."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import HostShare
from taser_jax.models.batch import EncoderInput, TokenGroups
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Checked, Natural, Positive


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
        seed: 0 or more.
        rates: task -> times its queries are seen per epoch; 1 by default.
    """

    batch_size: Positive
    num_negatives: Natural = 1
    false_negatives: FalseNegatives = FalseNegatives.MASK
    positives: PositiveChoice = PositiveChoice.SAMPLE
    # Not a `Seed`: `TaskBatchStream` gives each task one beyond 64 bits.
    seed: Natural = 0
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)


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
            "false_negatives to 'mask', which excludes a query's copies from its loss",
        )


@dataclasses.dataclass(frozen=True)
class Padding:
    """The lengths that texts of a batch are padded to.

    Attributes:
        buckets: ascending lengths; the texts of a batch are grouped by the one they are padded to.
            The length of the longest possible text is always one; without others, all texts are
            padded to it.
        multiple: group sizes are multiples of this: devices times chunks.
        steps: number of first steps whose batches decide the groups.
    """

    buckets: tuple[int, ...] = ()
    multiple: int = 1
    steps: int = 1024

    def __post_init__(self) -> None:
        buckets = list(self.buckets)
        if buckets != sorted(set(buckets)) or any(length < 1 for length in buckets):
            fix = "give ascending lengths above 0, such as [16, 32, 64, 128, 256]"
            where = "TrainingConfig.length_buckets"
            raise ConfigError(f"buckets of {buckets} tokens", where=where, fix=fix)


@runtime_checkable
class Texts(Protocol):
    """A token store's passages, or one split of its queries."""

    @property
    def lengths(self) -> Int[np.ndarray, " texts"]:
        """Real tokens of each text."""

    def tokens(self, rows: np.ndarray) -> EncoderInput:
        """The given rows, padded to one length: tokens, states, or queries with documents."""


@runtime_checkable
class TextSource(Protocol):
    """What a model reads: a token store's tokens, states, embeddings, or queries with documents."""

    @property
    def passages(self) -> Texts:
        """The texts of all passages."""

    def of_queries(self, queries: TokenizedQueries) -> Texts:
        """The texts of these queries, which may be a part of their split."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes and lengths of the groups in which one side of every batch is padded.

    Example:
        Four texts per batch, of 3, 5, 9, 30 and of 4, 7, 20, 21 tokens, in buckets of 8 and 32. The
        shorter two never have more than 4 and 7 tokens, the longer two 20 and 30: two groups of
        two, of 8 and of 32 tokens.

    Attributes:
        sizes: number of texts in each group, over all devices.
        lengths: tokens that the texts of each group are padded to, ascending.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls, lengths: Int[np.ndarray, "steps texts"], padding: Padding, *, longest: int
    ) -> Layout:
        """The least padding that holds every one of these batches.

        Args:
            lengths: real tokens of the texts of each batch.
            padding: buckets and multiple.
            longest: tokens of the longest possible text.
        """
        buckets = np.array([*(each for each in padding.buckets if each < longest), longest])
        # The i-th entry is the longest of the batches' i-th shortest texts.
        needed = np.sort(lengths, axis=1).max(axis=0)
        padded = buckets[np.searchsorted(buckets, needed)]
        padded = padded.reshape(-1, padding.multiple).max(axis=1)
        distinct, counts = np.unique(padded, return_counts=True)
        return cls(tuple((counts * padding.multiple).tolist()), tuple(distinct.tolist()))

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(texts, length) of each group."""
        return tuple(zip(self.sizes, self.lengths, strict=True))

    def __str__(self) -> str:
        return ", ".join(f"{size} x {length}" for size, length in self.groups)

    def holds(self, lengths: Int[np.ndarray, " texts"]) -> bool:
        """Whether texts of these lengths fit into the groups."""
        return bool((np.sort(lengths) <= np.repeat(self.lengths, self.sizes)).all())

    def group(self, texts: Texts, rows: Int[np.ndarray, " batch"], share: HostShare) -> TokenGroups:
        """This host's share of a global batch's texts, in groups.

        Args:
            texts: all texts of the side.
            rows: rows of the global batch.
            share: the part of each group, and of the batch, that this host makes.
        """
        order = np.argsort(texts.lengths[rows], kind="stable")
        place = np.empty(len(rows), np.int32)
        place[order] = np.arange(len(rows), dtype=np.int32)
        members = np.split(order, np.cumsum(self.sizes)[:-1])
        groups = tuple(
            texts.tokens(rows[member[share.rows(len(member))]]).resized(length)
            for member, length in zip(members, self.lengths, strict=True)
        )
        return TokenGroups(groups, place[share.rows(len(rows))])


# Quantile -> tokens of a text; 0 and 1 are the shortest and the longest text.
LengthQuantiles = Mapping[float, int]


def lengths_at(
    quantiles: LengthQuantiles, places: Float[np.ndarray, "*shape"]
) -> Int[np.ndarray, "*shape"]:
    """Tokens of the texts at given places of a distribution, between quantiles in a straight line.

    Example:
        >>> lengths_at({0: 8, 0.5: 12, 1: 30}, np.array([0.25, 0.5, 0.9])).tolist()
        [10, 12, 27]

    Args:
        quantiles: quantile -> tokens.
        places: from 0, the shortest text, to 1, the longest.
    """
    ascending = sorted(quantiles)
    tokens = np.interp(places, ascending, [quantiles[each] for each in ascending])
    return np.ceil(tokens).astype(np.int64)


def drawn_lengths(
    quantiles: LengthQuantiles, *, steps: int, texts: int
) -> Int[np.ndarray, "steps texts"]:
    """Tokens of texts drawn from a distribution, always the same ones."""
    return lengths_at(quantiles, np.random.default_rng(0).random((steps, texts)))


BatchT = TypeVar("BatchT")
# Batches held ready.
_AHEAD = 2


def prefetch(
    make: Callable[[int], BatchT], start_step: int, stop_step: int, put: Callable[[BatchT], BatchT]
) -> Iterator[tuple[int, BatchT]]:
    """Yields (step, put(make(step))) for the steps in order; a thread works ahead.

    The thread starts with the first `next`. Closing the iterator early (`close()`, or leaving
    it to the garbage collector) stops and joins it.

    Args:
        make: step -> its batch, or its batches.
        start_step: first step.
        stop_step: the step after the last.
        put: moves a batch to the devices; called in the thread.

    Yields:
        Steps and batches. What `make` or `put` raises is raised at the step it belongs to.
    """

    def work(step: int) -> BatchT:
        return put(make(step))

    steps = range(start_step, stop_step)
    waiting = iter(steps)
    worker = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = collections.deque(
            worker.submit(work, step) for step in itertools.islice(waiting, _AHEAD)
        )
        for step in steps:
            batch = ahead.popleft().result()
            ahead.extend(worker.submit(work, step) for step in itertools.islice(waiting, 1))
            yield step, batch
    finally:
        worker.shutdown(cancel_futures=True)
