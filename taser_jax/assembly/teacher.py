"""A teacher's embeddings for training, and the check that an objective has its teacher."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.query_embeddings import QueryEmbeddings
from taser_jax.storage.artifacts import fingerprint_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.training.distillation import TeacherInput, require
from taser_jax.training.objective import ObjectiveConfig


class EncodedTeacher:
    """A teacher's embeddings from `taser encode`, by the rows of a token store.

    Args:
        directory: the teacher's embeddings, of the same collection.
        store: the token store whose passages they embed.
        queries: task -> the queries that are trained on.

    Raises:
        DataError: a query that the teacher has not encoded, or other passages than the store's.
        FingerprintError: embeddings of another collection.
    """

    def __init__(
        self, directory: str, store: TokenStore, queries: Mapping[str, TokenizedQueries]
    ) -> None:
        collection = {"collection": store.metadata.collection_fingerprint}
        self._passages = Embeddings.open(directory, fingerprints=collection)
        if len(self._passages) != len(store):
            raise DataError(
                f"teacher embeddings of {len(self._passages)} passages",
                where=directory,
                expected=f"of the token store's {len(store)}",
            )
        self._queries = {
            task: QueryEmbeddings.of_split(
                directory, task, of_task.split, fingerprints=self._passages.fingerprints
            )
            for task, of_task in queries.items()
        }
        self._rows = {
            task: _rows_of(self._queries[task], of_task) for task, of_task in queries.items()
        }

    @property
    def dim(self) -> int:
        """Dimensions of the embeddings."""
        return self._passages.shape[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the embeddings' models, texts and queries."""
        queries = {task: found.fingerprints for task, found in self._queries.items()}
        return fingerprint_json([self._passages.fingerprints, queries])

    def queries(self, task: str, rows: np.ndarray) -> np.ndarray:
        """Embeddings of a task's training queries. [rows, dim], float32."""
        return self._queries[task].take(self._rows[task][rows]).astype(np.float32)

    def passages(self, rows: np.ndarray) -> np.ndarray:
        """Embeddings of passages. [rows, dim], float32."""
        return self._passages.take(rows).astype(np.float32)


def open_teacher(
    objective: ObjectiveConfig,
    directory: str | None,
    *,
    store: TokenStore | None,
    queries: Mapping[str, TokenizedQueries],
) -> EncodedTeacher | None:
    """The embeddings that an objective reads; None where it reads none.

    Args:
        objective: what is minimised.
        directory: embeddings of a teacher; None without.
        store: tokens; None in a dry run without data.
        queries: task -> queries to train on.

    Raises:
        ConfigError: the objective reads scores or embeddings that are missing, or does not read
            the embeddings that are given.
    """
    if TeacherInput.SCORES in objective.reads:
        for of_task in queries.values():
            require(of_task.teacher, TeacherInput.SCORES)
    if TeacherInput.EMBEDDINGS not in objective.reads:
        if directory is not None:
            raise ConfigError(
                "a teacher's embeddings are given, and the objective reads none",
                where="TrainingConfig.teacher_embeddings",
                expected="a guide, or a distillation with candidates = 'batch'",
                fix="set one of these, or leave the embeddings out",
            )
        return None
    given = require(directory, TeacherInput.EMBEDDINGS)
    return None if store is None else EncodedTeacher(given, store, queries)


def _rows_of(encoded: QueryEmbeddings, queries: TokenizedQueries) -> np.ndarray:
    """Where each query's embedding is."""
    place = {query_id: row for row, query_id in enumerate(encoded.query_ids)}
    missing = [query_id for query_id in queries.query_ids if query_id not in place]
    if missing:
        raise DataError(
            f"no teacher embedding of {len(missing)} of {len(queries)} queries of task "
            f"{queries.task!r}, such as {missing[0]!r}",
            where=str(encoded.directory),
            expected="embeddings of the queries that are trained on",
            fix="encode this token store's queries with the teacher (`taser encode`)",
        )
    return np.array([place[query_id] for query_id in queries.query_ids], np.int64)
