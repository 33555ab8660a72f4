"""Training batches from the token store: rows are a pure function of (seed, step)."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from taser_jax.data.batches import draws as sampling
from taser_jax.data.batches.draws import Purpose, Schedule, generator, task_number
from taser_jax.data.batches.stream import (
    BatchingConfig,
    FalseNegatives,
    Layout,
    Padding,
    PositiveChoice,
    Texts,
    TextSource,
    check_queries,
)
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import HostShare
from taser_jax.models.batch import Augmented, Batch, Embedded, EncoderInput, TokenGroups
from taser_jax.storage.artifacts import fingerprint_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import to_plain


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The rows of one global batch.

    Attributes:
        task: the task of all queries.
        query_rows: rows of the task's query set. [batch]
        passages: rows of the store: each query's positive, then its negatives.
        excluded: rows that do not count as negatives of each query, beside its positive here.
    """

    task: str
    query_rows: Int[np.ndarray, " batch"]
    passages: Int[np.ndarray, "batch passages_per_query"]
    excluded: Ragged

    @property
    def passage_rows(self) -> Int[np.ndarray, " passages"]:
        """Rows of the store; query i's positive is at i·(1+N), and its negatives follow."""
        return self.passages.reshape(-1)

    @property
    def positive_index(self) -> Int[np.ndarray, " batch"]:
        """Column of each query's positive."""
        return np.arange(0, self.passages.size, self.passages.shape[1], dtype=np.int32)

    @property
    def ignore(self) -> Bool[np.ndarray, "batch all_passages"]:
        """True where a passage does not count as a query's negative."""
        return self.ignored_by(np.arange(len(self.query_rows)))

    def ignored_by(
        self, queries: Int[np.ndarray, " some"]
    ) -> Bool[np.ndarray, "some all_passages"]:
        """The rows of `ignore` of some of the batch's queries."""
        ignore = sampling.occurs(sampling.take(self.excluded, queries), self.passage_rows)
        ignore[np.arange(len(queries)), self.positive_index[queries]] = False
        return ignore


class BatchStream:
    """Batches of one task each, the same on every host and after every restart.

    A pass over a task is a permutation of its queries, cut into batches. Queries from the pass's
    beginning complete its last batch, so that no batch repeats a query; the next pass shuffles
    again. A task with fewer queries than a batch repeats them within it (MASK only).

    A query's pool of hard negatives excludes duplicates and its positives (under KEEP: only those
    that may be trained on). Every step shuffles the pool anew and takes the first N; if it has
    fewer, random passages of the store that are none of the query's positives are added.

    With buckets, texts are padded in groups of similar length, which changes neither the texts of a
    batch nor their order after `TokenGroups.place`. All batches of a task have the same groups,
    chosen from the batches of the first steps; later batches that do not fit are padded to full
    length. So there is at most one shape per task, and one more.

    Example:
        queries = store.queries("nq", "train")
        stream = BatchStream(store, {"nq": queries}, BatchingConfig(batch_size=256))
        batch = stream.batch(step)

    Args:
        store: the passages' tokens.
        tasks: task -> queries to train on.
        config: how to draw.
        share: the part of each batch that this host makes.
        padding: the lengths to pad to.

    Attributes:
        config: how it draws.
        steps_per_epoch: batches of all tasks in an epoch.
        batches_per_epoch: task -> its batches in an epoch.

    Raises:
        ConfigError: settings with which no batch can be drawn.
        DataError: a query without a positive, or a row that the store does not have.
        FingerprintError: queries of another collection than the store's.
    """

    def __init__(
        self,
        store: TokenStore,
        tasks: Mapping[str, TokenizedQueries],
        config: BatchingConfig,
        *,
        share: HostShare = HostShare(),
        padding: Padding = Padding(),
    ) -> None:
        if config.batch_size % share.count:
            raise ConfigError(
                f"a batch of {config.batch_size} queries in {share.count} parts",
                expected=f"a multiple of {share.count}",
            )
        self._store = store
        self._tasks = dict(tasks)
        self._passages: Texts = store.passages
        self._queries: Mapping[str, Texts] = self._tasks
        self._set_draws(config)
        for task, queries in tasks.items():
            check_queries(task, queries, store, config)
        self._pools = {
            task: sampling.without(
                queries.hard_negatives, _never_negative(queries, config), len(store)
            )
            for task, queries in tasks.items()
        }
        for task, pools in self._pools.items():
            if short := int((pools.lengths < config.num_negatives).sum()):
                logger.info(
                    "%s: %d of %d queries lack hard negatives (%d each are drawn); random passages "
                    "of the store take their place",
                    *(task, short, len(tasks[task]), config.num_negatives),
                )
        self._host, self._share = share, share.rows(config.batch_size)
        self._padding = padding

    def _set_draws(self, config: BatchingConfig) -> None:
        self.config = config
        sizes = {task: len(queries) for task, queries in self._tasks.items()}
        self._schedule = Schedule(sizes, config)
        self.steps_per_epoch = self._schedule.steps_per_epoch
        self.batches_per_epoch = self._schedule.batches_per_epoch
        # The current orders of all tasks, and those of passes that have just ended.
        self._order = functools.lru_cache(maxsize=2 * len(self._tasks))(self._make_order)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of what decides a step's rows and tokens; the number of hosts does not."""
        passages = self._store.metadata.passages_fingerprint
        queries = {task: queries.fingerprint for task, queries in self._tasks.items()}
        sources = {"passages": passages, "queries": queries}
        return fingerprint_json(sources | to_plain(self.config))

    def reseeded(self, seed: int) -> BatchStream:
        """The same queries with another seed; shares everything that does not depend on it."""
        other = copy.copy(self)
        other.__dict__.pop("fingerprint", None)
        other._set_draws(dataclasses.replace(self.config, seed=seed))
        return other

    def task(self, step: int) -> str:
        """The task of a step's batch."""
        return self._schedule.turn(step)[0]

    def rows(self, step: int) -> StepRows:
        """The global batch of a step, as rows."""
        task, batch = self._schedule.turn(step)
        queries = self._query_rows(task, batch)
        positives = sampling.take(self._tasks[task].positives, queries)
        if self.config.positives is PositiveChoice.FIRST:
            chosen = positives.values[positives.offsets[:-1], None]
        else:
            chosen, _ = sampling.choose(positives, 1, self._generator(Purpose.POSITIVE, step))
        pools = sampling.take(self._pools[task], queries)
        rng = self._generator(Purpose.HARD_NEGATIVE, step)
        negatives, exist = sampling.choose(pools, self.config.num_negatives, rng)
        if not exist.all():
            rng = self._generator(Purpose.RANDOM_NEGATIVE, step)
            negatives = sampling.fill_at_random(negatives, exist, positives, len(self._store), rng)
        passages = np.concatenate([chosen, negatives], axis=1, dtype=np.int32)
        excluded = positives
        if self.config.false_negatives is FalseNegatives.KEEP:
            excluded = Ragged(np.zeros(len(queries) + 1, np.int64), np.zeros(0, np.int32))
        return StepRows(task, queries, passages, excluded)

    def query_rows(self, step: int) -> dict[str, Int[np.ndarray, " batch"]]:
        """Rows of the queries in the global batch, by task."""
        rows = self.rows(step)
        return {rows.task: rows.query_rows}

    def batches(self, step: int) -> dict[str, Batch]:
        """This host's share of a step's batch, by task."""
        return {self.task(step): self.batch(step)}

    def batch(self, step: int) -> Batch:
        """This host's share of a step's batch."""
        return self.padded_batch(step, grouped=self.fits(step))

    @functools.cached_property
    def layouts(self) -> dict[str, tuple[Layout, Layout]]:
        """Task -> groups of its queries and of its passages; empty without buckets."""
        if not self._padding.buckets:
            return {}
        lengths_of_task: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for step in range(self._padding.steps):
            lengths_of_task.setdefault(self.task(step), []).append(self._lengths(step))
        # One width for all tasks: batches padded in full then share a program.
        longest = max(queries.ids.shape[1] for queries in self._tasks.values())
        layouts = {}
        for task, lengths in sorted(lengths_of_task.items()):
            queries, passages = (np.stack(side) for side in zip(*lengths, strict=True))
            layouts[task] = (
                Layout.of(queries, self._padding, longest=longest),
                Layout.of(passages, self._padding, longest=self._store.passages.ids.shape[1]),
            )
        return layouts

    def on_texts(self, states: TextSource) -> BatchStream:
        """The same batches with states of frozen blocks, or queries with documents, for tokens."""
        stream = copy.copy(self)
        stream._passages = states.passages
        stream._queries = {task: states.of_queries(each) for task, each in self._tasks.items()}
        return stream

    def fits(self, step: int) -> bool:
        """Whether the task's groups hold a step's texts."""
        layouts = self.layouts.get(self.task(step))
        if layouts is None:
            return False
        pairs = zip(layouts, self._lengths(step), strict=True)
        return all(layout.holds(lengths) for layout, lengths in pairs)

    def padded_batch(self, step: int, *, grouped: bool) -> Batch:
        """This host's share of a step's batch, in its task's groups or padded to full length."""
        rows, share = self.rows(step), self._share
        queries, passages = self._queries[rows.task], self._passages
        query_rows, passage_rows = rows.query_rows[share], rows.passages[share].reshape(-1)
        texts: tuple[EncoderInput | TokenGroups, ...]
        if not grouped:
            texts = queries.tokens(query_rows), passages.tokens(passage_rows)
        else:
            layouts = self.layouts[rows.task]
            texts = (
                layouts[0].group(queries, rows.query_rows, self._host),
                layouts[1].group(passages, rows.passage_rows, self._host),
            )
        # Only queries have documents, and only passages come embedded.
        assert not isinstance(texts[0], Embedded)
        assert not isinstance(texts[1], Augmented)
        return Batch(
            queries=texts[0],
            passages=texts[1],
            positive_index=rows.positive_index[share],
            ignore=rows.ignored_by(share),
            query_rows=query_rows,
            passage_rows=passage_rows,
        )

    def _lengths(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a global batch's queries and passages."""
        rows = self.rows(step)
        queries = self._tasks[rows.task].lengths[rows.query_rows]
        return queries, self._store.passages.lengths[rows.passage_rows]

    def _generator(self, purpose: Purpose, step: int) -> np.random.Generator:
        return generator(self.config.seed, purpose, step)

    def _query_rows(self, task: str, batch: int) -> Int[np.ndarray, " batch"]:
        size = len(self._tasks[task])
        batch_size = self.config.batch_size
        whole_pass, at = divmod(batch, -(-size // batch_size))
        places = (at * batch_size + np.arange(batch_size)) % size
        return self._order(task, whole_pass)[places]

    def _make_order(self, task: str, whole_pass: int) -> Int[np.ndarray, " queries"]:
        rng = generator(self.config.seed, Purpose.QUERY_ORDER, task_number(task), whole_pass)
        return rng.permutation(len(self._tasks[task])).astype(np.int32)


def _never_negative(queries: TokenizedQueries, config: BatchingConfig) -> Ragged:
    """The positives of each query that must not be among its hard negatives."""
    keeps = config.false_negatives is FalseNegatives.KEEP
    if keeps and config.positives is PositiveChoice.FIRST:
        golds = queries.positives.values[queries.positives.offsets[:-1]]
        return Ragged(np.arange(len(golds) + 1), golds)
    return queries.positives
