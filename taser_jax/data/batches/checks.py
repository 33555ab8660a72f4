"""Checks of the queries that a batch stream trains on."""

from __future__ import annotations

import numpy as np

from taser_jax.data.batches.options import BatchingConfig, FalseNegatives
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError


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
            expected="a positive for every query that is trained on",
            fix="drop queries without a positive when preparing the collection",
        )
    for kind in ("positives", "hard_negatives"):
        rows: Ragged = getattr(queries, kind)
        bad = np.flatnonzero((rows.values < 0) | (rows.values >= len(store)))
        if len(bad):
            query = int(np.searchsorted(rows.offsets, bad[0], side="right")) - 1
            raise DataError(
                f"passage row {rows.values[bad[0]]}",
                where=f"{where}, {kind} of query {queries.query_ids[query]!r}",
                expected=f"a row of the store, 0 to {len(store) - 1}",
                fix="queries, negatives and passages must be of one collection",
            )
    most = int(queries.positives.lengths.max())
    if len(store) - most < config.num_negatives:
        raise ConfigError(
            f"{config.num_negatives} negatives per query from {len(store)} passages",
            where=where,
            expected=f"{len(store) - most} or fewer: a query has {most} positives",
        )
    if len(queries) < config.batch_size and config.false_negatives is FalseNegatives.KEEP:
        raise ConfigError(
            f"{len(queries)} queries do not fill a batch of {config.batch_size}",
            where=where,
            expected="at least as many queries as a batch: repeated queries are false negatives",
            fix=f"set batch_size to {len(queries)} or less, leave out the task, or set "
            "false_negatives to MASK, which excludes a query's copies from its loss",
        )
