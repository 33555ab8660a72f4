"""The interface that every index implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import ConfigError, DataError


@runtime_checkable
class EmbeddingRows(Protocol):
    """Row-aligned passage embeddings, in memory or on disk."""

    @property
    def shape(self) -> tuple[int, int]:
        """(number of passages, dimensions)."""

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Embeddings of rows start..stop. [stop-start, dim], float32 or bfloat16."""


@runtime_checkable
class Searcher(Protocol):
    """Top k passages by inner product.

    Attributes:
        fingerprints: those of the passages' embeddings; empty if unknown.
    """

    fingerprints: Mapping[str, str]

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query; row -1, score -inf where there are fewer."""


def check_search(query_embeddings: np.ndarray, k: int, *, dim: int) -> None:
    """Checks that k is positive and that queries are finite and have the passages' dimensions.

    Raises:
        ConfigError: naming k, or both dimensions.
        DataError: naming queries that are not finite.
    """
    if k < 1:
        raise ConfigError(f"k is {k}", where="search", expected="at least 1")
    if query_embeddings.ndim != 2 or query_embeddings.shape[1] != dim:
        raise ConfigError(
            f"query embeddings of shape {query_embeddings.shape}",
            where="search",
            expected=f"[queries, {dim}], as the passages were encoded",
            fix="encode queries and passages with the same model",
        )
    check_finite(query_embeddings, 0, what="query")


def check_finite(embeddings: np.ndarray, first: int, *, what: str) -> None:
    """Refuses embeddings that are NaN or infinite: a score with them would leave the row out.

    Args:
        embeddings: shape [rows, dim].
        first: number of the first row.
        what: what a row is: "query" or "passage".

    Raises:
        DataError: naming the first rows and how many there are.
    """
    embeddings = np.asarray(embeddings)
    # A sum is finite unless a term is not, or it overflows; rows are looked at only then.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(embeddings.sum(dtype=np.float32)):
            return
    bad = first + np.flatnonzero(~np.isfinite(embeddings.astype(np.float32)).all(axis=1))
    if len(bad):
        more = f" and {len(bad) - 10:,} more" if len(bad) > 10 else ""
        raise DataError(
            f"NaN or infinite numbers in {len(bad):,} rows: {', '.join(map(str, bad[:10]))}{more}",
            where=f"{what} embeddings",
            expected="finite numbers",
            fix="`taser verify` shows whether files were damaged; encode again into a new "
            "directory, with a checkpoint from before training diverged",
        )


def measure_recall(found: SearchResult, exact: SearchResult) -> float:
    """Share of the exact results that were found, over all queries.

    A found passage with the score of the last exact one counts, since ties are interchangeable.

    Args:
        found: an approximate search's results.
        exact: the exact top k of the same queries.
    """
    wanted = exact.rows >= 0
    last = np.where(wanted, exact.scores, np.inf).min(axis=1, keepdims=True)
    tolerance = 1e-5 * np.abs(np.where(wanted, exact.scores, 0)).max(axis=1, keepdims=True)
    hits = (found.rows >= 0) & (found.scores >= last - tolerance)
    return float(np.minimum(hits.sum(axis=1), wanted.sum(axis=1)).sum() / max(wanted.sum(), 1))
