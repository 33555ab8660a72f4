"""A teacher's embeddings and scores of a batch's texts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int

from taser_jax.data.batches.draws import keys
from taser_jax.data.token_store.arrays import TokenizedQueries


@runtime_checkable
class TeacherRows(Protocol):
    """A teacher's embeddings of the token store's texts."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what decides the embeddings."""

    def queries(self, task: str, rows: np.ndarray) -> np.ndarray:
        """Embeddings of a task's training queries. [rows, teacher_dim], float32."""

    def passages(self, rows: np.ndarray) -> np.ndarray:
        """Embeddings of passages. [rows, teacher_dim], float32."""


class ScoreTable:
    """A teacher's scores of the queries' positives and hard negatives, by (query, passage).

    Args:
        queries: queries with a teacher's scores.
        num_rows: number of passages of the store.
    """

    def __init__(self, queries: TokenizedQueries, num_rows: int) -> None:
        assert queries.teacher is not None
        self._num_rows = num_rows
        pairs = np.concatenate(
            [keys(lists, num_rows) for lists in (queries.positives, queries.hard_negatives)]
        )
        scores = np.concatenate([queries.teacher.positives, queries.teacher.negatives])
        self._pairs, first = np.unique(pairs, return_index=True)
        self._scores = scores[first]

    def look_up(
        self,
        queries: Int[np.ndarray, " batch"],
        passages: Int[np.ndarray, "batch candidates"],
    ) -> Float32[np.ndarray, "batch candidates"]:
        """Scores of each query's passages; NaN where the teacher has none."""
        wanted = queries.astype(np.int64)[:, None] * self._num_rows + passages
        place = np.minimum(np.searchsorted(self._pairs, wanted), len(self._pairs) - 1)
        found = self._pairs[place] == wanted
        return np.where(found, self._scores[place], np.nan).astype(np.float32)
