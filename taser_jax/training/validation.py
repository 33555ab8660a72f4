"""DPR's validation: loss over development batches, and rank of the gold in a pool of passages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from taser_jax.models.batch import Array
from taser_jax.storage import progress
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import Checked, Natural, Positive
from taser_jax.training.losses import positive_rank

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

    Raises:
        DataError: no question has a positive.
    """
    rows = np.asarray([i for i in range(len(positives)) if len(positives[i])], np.int64)
    if not len(rows):
        problem = f"none of {len(positives)} validation queries has a positive passage"
        raise DataError(problem, where="validation pool", fix="prepare queries that have some")
    rng = np.random.default_rng([0, _POOL_PURPOSE])
    if len(rows) > config.max_queries:
        rows = np.sort(rng.choice(rows, config.max_queries, replace=False))
    golds = np.asarray([positives[i][0] for i in rows.tolist()], np.int64)
    hard = [np.asarray(hard_negatives[i][: config.hard_negatives], np.int64) for i in rows.tolist()]
    # Drawn with replacement: the pool keeps one of equal rows.
    others = rng.integers(num_passages, size=len(rows) * config.other_negatives)
    passages = np.unique(np.concatenate([golds, *hard, others]))
    return Pool(
        query_rows=rows,
        passage_rows=passages,
        positive_index=np.searchsorted(passages, golds),
    )


def rank_in_pool(
    query_embeddings: Float[Array, "queries dim"],
    passage_embeddings: Float[Array, "passages dim"],
    *,
    positive_index: Int[Array, " queries"],
    block: int | None = None,
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
        block: queries scored at once; None keeps the scores within 256 MiB.

    Returns:
        The ranks.
    """
    queries, golds = np.asarray(query_embeddings), np.asarray(positive_index, np.int32)
    passages = jnp.asarray(passage_embeddings, jnp.float32)
    if block is None:
        block = max(1, _SCORES_AT_ONCE // len(passages))
    block = min(block, len(queries))
    ranks = []
    for start in progress.track(range(0, len(queries), block), "rank golds", unit="block"):
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
