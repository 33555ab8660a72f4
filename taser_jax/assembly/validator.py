"""Validation during training: DPR's loss over batches, and the gold's rank in a pool."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PyTree

from taser_jax.assembly.model_directory import embed
from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import (
    BatchingConfig,
    FalseNegatives,
    PositiveChoice,
    Texts,
    TextSource,
)
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Array, Role, static_task
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.storage.errors import ConfigError, DataError, check_known
from taser_jax.storage.progress import logger, track
from taser_jax.storage.records import DevelopmentSets
from taser_jax.storage.typed_files import Checked, Natural, Positive
from taser_jax.training.losses import contrastive_loss, positive_rank
from taser_jax.training.objective import ObjectiveConfig

# Lists differ in length: no name, which would have to stand for one number in a call.
Rows = Sequence[int] | Int[np.ndarray, " _"]
_POOL_PURPOSE = 20
# 2^26 float32 scores are 256 MiB on the device.
_SCORES_AT_ONCE = 1 << 26


@dataclasses.dataclass(frozen=True)
class PoolConfig(Checked):
    """The passages that the gold of each question is ranked against.

    Attributes:
        max_queries: maximum number of questions, drawn if there are more.
        hard_negatives: number of each question's first hard negatives in the pool.
        other_negatives: number of random passages in the pool per question.
    """

    RANGE_FIX: ClassVar[str] = "DPR's are 10,000, 30 and 30"

    max_queries: Positive = 10_000
    hard_negatives: Natural = 30
    other_negatives: Natural = 30


@dataclasses.dataclass(frozen=True)
class Pool:
    """A validation pool.

    Attributes:
        query_rows: rows of the query set, ascending. Shape [queries].
        passage_rows: distinct rows of the passage store, ascending. Shape [passages].
        positive_index: where in `passage_rows` each query's gold is. Shape [queries].
    """

    query_rows: Int[np.ndarray, " queries"]
    passage_rows: Int[np.ndarray, " passages"]
    positive_index: Int[np.ndarray, " queries"]


def select_pool(
    positives: Sequence[Rows],
    hard_negatives: Sequence[Rows],
    *,
    num_passages: int,
    config: PoolConfig,
) -> Pool:
    """Chooses the questions and the passages pooled over all of them.

    As in DPR, the pool holds each question's gold, its first hard negatives and other passages;
    the other ones are random rows of the collection. Unlike in DPR, there is one pool for any
    number of devices (DPR pools per process, so its numbers depend on how many there are), and
    a passage that several questions contribute is in it once.

    Example:
        positives [[4], [1, 9]], hard negatives [[7], [4]], no others: passages 1, 4, 7 (row 9 is
        no gold), golds at 1 and 0.

    Args:
        positives: rows of each question's positives, gold first; questions without any are
            left out.
        hard_negatives: rows of each question's hard negatives.
        num_passages: size of the passage store, from which others are drawn.
        config: sizes.

    Returns:
        The pool, a pure function of the arguments.
    """
    rows = np.asarray([i for i in range(len(positives)) if len(positives[i])], np.int64)
    rng = np.random.default_rng([0, _POOL_PURPOSE])
    if len(rows) > config.max_queries:
        rows = np.sort(rng.choice(rows, config.max_queries, replace=False))
    golds = np.asarray([positives[i][0] for i in rows.tolist()], np.int64)
    hard = [np.asarray(hard_negatives[i][: config.hard_negatives], np.int64) for i in rows.tolist()]
    # Drawn with replacement: the pool keeps one of equal rows.
    others = rng.integers(num_passages, size=len(rows) * config.other_negatives)
    passages = np.unique(np.concatenate([golds, *hard, others]))
    return Pool(
        query_rows=rows, passage_rows=passages, positive_index=np.searchsorted(passages, golds)
    )


def rank_in_pool(
    query_embeddings: Float[Array, "queries dim"],
    passage_embeddings: Float[Array, "passages dim"],
    *,
    positive_index: Int[Array, " queries"],
) -> Int[np.ndarray, " queries"]:
    """1-based rank of each query's gold among all passages of the pool, by inner product.

    Queries are scored block by block, so memory holds one block of scores beside the embeddings.
    On ties the earlier passage ranks first.

    Example:
        Query (1, 0); passages (0.5, 0), (2, 0), (1, 0), gold 2: rank 2.

    Args:
        query_embeddings: one row per query.
        passage_embeddings: one row per passage of the pool.
        positive_index: row of each query's gold among the passages.

    Returns:
        The ranks.
    """
    queries, golds = np.asarray(query_embeddings), np.asarray(positive_index, np.int32)
    passages = jnp.asarray(passage_embeddings, jnp.float32)
    block = min(max(1, _SCORES_AT_ONCE // len(passages)), len(queries))
    ranks = []
    for start in track(range(0, len(queries), block), "rank golds", unit="block"):
        rows = np.arange(start, start + block).clip(max=len(queries) - 1)
        ranks.append(np.asarray(_rank_block(queries[rows], passages, golds[rows])))
    return np.concatenate(ranks)[: len(queries)]


@jax.jit
def _rank_block(
    queries: Float[jax.Array, "block dim"],
    passages: Float[jax.Array, "passages dim"],
    positive_index: Int[jax.Array, " block"],
) -> Int[jax.Array, " block"]:
    scores = jnp.matmul(
        queries.astype(jnp.float32), passages.T, precision=jax.lax.Precision.HIGHEST
    )
    positive_score = jnp.take_along_axis(scores, positive_index[:, None], axis=1)[:, 0]
    return positive_rank(scores, positive_index=positive_index, positive_score=positive_score)


SPLIT = "validation"
"""Split of the queries that checkpoints are judged by."""


@dataclasses.dataclass(frozen=True)
class ValidationConfig(Checked):
    """How a checkpoint is judged.

    Attributes:
        batch_size: queries in a validation batch; DPR's loss depends on it.
        num_negatives: hard negatives per query in these batches.
        num_batches: batches per task, at most one pass; 0 leaves the loss out.
        pool: passages that the gold is ranked against, pooled over the queries of a task or, where
            sets are combined, of all; None leaves the rank out.
        tasks: tasks of the queries; empty means all training tasks that have any.
        sets: whether tasks or queries have equal weight.
    """

    batch_size: Positive = 64
    num_negatives: Natural = 1
    num_batches: Natural = 20
    pool: PoolConfig | None = PoolConfig(max_queries=1000)
    tasks: tuple[str, ...] = ()
    sets: DevelopmentSets = DevelopmentSets.APART

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured over all tasks."""
        loss = () if not self.num_batches else ("nll",)
        return loss if self.pool is None else (*loss, "average_rank", "mrr")


_contrastive_loss = jax.jit(contrastive_loss, static_argnames="temperature")


class Validator:
    """Parameters -> metrics, each a mean over tasks or over their queries.

    Metrics: `nll`, `average_rank`, `mrr`, and `mrr/<task>` for each task.

    Args:
        model: the dual encoder.
        store: tokens.
        tasks: task -> its validation queries; tasks without any are left out by the caller. Queries
            without a positive are left out here.
        config: sizes.
        objective: the objective, for its temperature.
        partitioner: devices; every host calls this with the same arguments.
        texts: what the model reads; the store itself where it reads tokens.
        false_negatives: what the loss makes of known positives among a query's negatives.
        buckets: lengths that texts, sorted by length, are padded to; none pads to the store's.
    """

    def __init__(
        self,
        model: DualEncoder,
        store: TokenStore,
        tasks: Mapping[str, TokenizedQueries],
        config: ValidationConfig,
        *,
        objective: ObjectiveConfig,
        partitioner: Partitioner,
        texts: TextSource,
        false_negatives: FalseNegatives = FalseNegatives.MASK,
        buckets: Sequence[int] = (),
    ) -> None:
        check_validated_tasks(tasks, config)
        partitioner.check_batch_size(config.batch_size)
        self._config, self._store, self._partitioner = config, store, partitioner
        devices = partitioner.batch_devices
        self._tasks = tasks = {task: _with_positives(tasks[task]) for task in config.tasks or tasks}
        self._passages = texts.passages
        self._queries = {task: texts.of_queries(queries) for task, queries in tasks.items()}
        self._query_tasks = model.query_tasks
        self._temperature, self._buckets = objective.temperature, np.array(sorted(buckets), int)
        self._streams = {
            task: BatchStream(
                store,
                {task: queries},
                BatchingConfig(
                    # Of distinct queries, at least one for each device.
                    batch_size=min(
                        config.batch_size, max(devices, len(queries) // devices * devices)
                    ),
                    # Without hard negatives of their own, queries share each other's golds.
                    num_negatives=config.num_negatives if len(queries.hard_negatives.values) else 0,
                    false_negatives=false_negatives,
                    positives=PositiveChoice.FIRST,
                ),
            )
            for task, queries in tasks.items()
        }
        self._encode_tokens = _encoder(model, partitioner.replicated)

    def __call__(self, params: PyTree) -> dict[str, float]:
        """Validates all tasks."""
        metrics = {}
        if self._config.num_batches:
            losses = [self._losses(task, params) for task in self._tasks]
            metrics["nll"] = self._mean(losses)
        if self._config.pool is None:
            return metrics
        combined = self._config.sets is DevelopmentSets.COMBINED
        pools = [list(self._tasks)] if combined else [[task] for task in self._tasks]
        ranks = {
            task: of_task for pool in pools for task, of_task in self._ranks(pool, params).items()
        }
        metrics["average_rank"] = self._mean(list(ranks.values()))
        metrics["mrr"] = self._mean([1.0 / of_task for of_task in ranks.values()])
        if len(ranks) > 1:
            metrics |= {
                f"mrr/{task}": float((1.0 / of_task).mean()) for task, of_task in ranks.items()
            }
        return metrics

    def _mean(self, by_task: Sequence[np.ndarray]) -> float:
        """Mean over tasks or over their queries; tasks with nothing in the pool are left out."""
        if self._config.sets is DevelopmentSets.COMBINED:
            return float(np.concatenate(by_task).mean())
        return float(np.mean([values.mean() for values in by_task]))

    def _losses(self, task: str, params: PyTree) -> Float[np.ndarray, " queries"]:
        """For each query the mean loss of its batch: batches of tasks may differ in size."""
        stream = self._streams[task]
        batches = min(self._config.num_batches, stream.steps_per_epoch)
        drawn = [stream.rows(step) for step in range(batches)]
        # Each text once, however many batches have it.
        queries, query_places = np.unique(
            [batch.query_rows for batch in drawn], return_inverse=True
        )
        passages, places = np.unique([batch.passage_rows for batch in drawn], return_inverse=True)
        query_embeddings = self._encode(Role.QUERY, params, self._queries[task], queries, task=task)
        embeddings = self._encode(Role.PASSAGE, params, self._passages, passages)
        losses = [
            _contrastive_loss(
                query_embeddings[query_place],
                embeddings[place],
                positive_index=batch.positive_index,
                ignore=batch.ignore,
                temperature=self._temperature,
            ).loss
            for batch, query_place, place in zip(
                drawn, query_places.reshape(batches, -1), places.reshape(batches, -1), strict=True
            )
        ]
        return np.repeat(np.array(losses, np.float64), stream.config.batch_size)

    def _ranks(
        self, tasks: Sequence[str], params: PyTree
    ) -> dict[str, Int[np.ndarray, " queries"]]:
        """Task -> 1-based ranks of its golds, among passages pooled over the tasks' queries."""
        assert self._config.pool is not None
        queries = [self._tasks[task] for task in tasks]
        pool = select_pool(
            list(itertools.chain.from_iterable(of_task.positives for of_task in queries)),
            list(itertools.chain.from_iterable(of_task.hard_negatives for of_task in queries)),
            num_passages=len(self._store),
            config=self._config.pool,
        )
        # Rows of the pool's queries ascend: those of a task are adjacent.
        starts = np.cumsum([0, *map(len, queries)])
        cuts = np.searchsorted(pool.query_rows, starts)
        embeddings, parts = [], {}
        for task, start, begin, end in zip(tasks, starts[:-1], cuts[:-1], cuts[1:], strict=True):
            if begin < end:
                parts[task] = slice(begin, end)
                rows, texts = pool.query_rows[begin:end] - start, self._queries[task]
                embeddings.append(self._encode(Role.QUERY, params, texts, rows, task=task))
        ranks = rank_in_pool(
            np.concatenate(embeddings),
            self._encode(Role.PASSAGE, params, self._passages, pool.passage_rows),
            positive_index=pool.positive_index,
        )
        return {task: ranks[part] for task, part in parts.items()}

    def _encode(
        self, role: Role, params: PyTree, texts: Texts, rows: np.ndarray, *, task: str | None = None
    ) -> np.ndarray:
        """Embeddings of rows, in blocks of similar length whose parts the hosts prepare."""
        name = static_task(self._query_tasks, task)
        size = self._config.batch_size * 2
        size += -size % self._partitioner.batch_devices
        mine = self._partitioner.host_share.rows(size)
        order = np.argsort(-texts.lengths[rows], kind="stable")
        blocks = []
        for start in range(0, len(rows), size):
            block = np.resize(rows[order[start : start + size]], size)
            tokens = texts.tokens(block[mine])
            wide_enough = self._buckets[self._buckets >= texts.lengths[block].max()]
            tokens = tokens.resized(int(min([*wide_enough, tokens.mask.shape[1]])))
            placed = self._partitioner.put_batch(tokens)
            blocks.append(np.asarray(self._encode_tokens(params, placed, role=role, task=name)))
        return np.concatenate(blocks)[np.argsort(order)]


def check_validated_tasks(tasks: Collection[str], config: ValidationConfig) -> None:
    """Checks that there is something to validate with.

    Args:
        tasks: those trained on that have the split.
        config: the split, and the tasks wanted.

    Raises:
        ConfigError: no task has the split, or one that is named does not.
    """
    if not tasks:
        raise ConfigError(
            f"no task has a split {SPLIT!r} to choose the best checkpoint with",
            where="TrainingConfig.validation",
            fix="run `taser prepare` with VALIDATION_SHARE=0.1, which makes one of training "
            "queries, or set TrainingConfig.validation=None",
        )
    check_known(config.tasks, tasks, where="ValidationConfig.tasks")


def _with_positives(queries: TokenizedQueries) -> TokenizedQueries:
    """The queries whose gold is in the collection; a loss cannot use the others."""
    rows = np.flatnonzero(queries.positives.lengths)
    where = f"task {queries.task!r}, split {queries.split!r}"
    if not len(rows):
        fix = "leave the task out, or set TrainingConfig.validation=None"
        raise DataError(f"none of {len(queries)} queries has a positive", where=where, fix=fix)
    if len(rows) == len(queries):
        return queries
    logger.info("%s: %d of %d queries have a positive", where, len(rows), len(queries))
    return queries_of(queries, rows)


# Validators of one model share what is compiled.
@functools.lru_cache(maxsize=4)
def _encoder(model: DualEncoder, replicated: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    encode = functools.partial(embed, model=model)
    return jax.jit(encode, out_shardings=replicated, static_argnames=("role", "task"))
