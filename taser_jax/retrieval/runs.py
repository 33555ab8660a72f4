"""Runs and qrels: retrieved and relevant passages, and their TREC files.

A row is a passage's row in the passage store. Results are ordered by score, best first; equal
scores by row, lowest first. Where a query has fewer than k results the rest is row -1, score -inf.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float32, Int32

from taser_jax.data.files import numbered_lines
from taser_jax.storage import artifacts
from taser_jax.storage.checksums import check_file
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import read_typed

NO_ROW = -1
_LARGEST = float(np.finfo(np.float32).max)
Qrels = dict[str, dict[int, int]]


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """Top k per query, in the order that this module's docstring defines.

    Attributes:
        rows: rows of the passage store, -1 where there is no result.
        scores: their scores, -inf where there is no result.
    """

    rows: Int32[np.ndarray, "queries k"]
    scores: Float32[np.ndarray, "queries k"]


@dataclasses.dataclass(frozen=True)
class Run:
    """Search results with the queries they belong to.

    Attributes:
        query_ids: one per row of `rows`.
        rows: rows of the passage store, -1 where there is no result.
        scores: their scores, -inf where there is no result.
    """

    query_ids: list[str]
    rows: Int32[np.ndarray, "queries k"]
    scores: Float32[np.ndarray, "queries k"]

    def __post_init__(self) -> None:
        if len(self.query_ids) != len(self.rows) or self.rows.shape != self.scores.shape:
            problem = f"rows {self.rows.shape} and scores {self.scores.shape}"
            raise DataError(f"{problem} for {len(self.query_ids)} query ids", where="Run")

    @classmethod
    def of(cls, query_ids: Sequence[str], result: SearchResult) -> Run:
        """Names the queries of a search result."""
        return cls(list(query_ids), result.rows, result.scores)

    @property
    def result(self) -> SearchResult:
        """The rows and scores without the query ids."""
        return SearchResult(self.rows, self.scores)


def top_k(rows: np.ndarray, scores: np.ndarray, k: int) -> SearchResult:
    """The k best candidates per query, each row once with its best score.

    Example:
        >>> result = top_k(np.array([[7, 4, 2, 7]]), np.array([[1.0, 3.0, 3.0, 2.0]]), 4)
        >>> result.rows.tolist(), result.scores.tolist()
        ([[2, 4, 7, -1]], [[3.0, 3.0, 2.0, -inf]])

    Args:
        rows: candidates in any order. [queries, candidates]; negative means none.
        scores: their scores. [queries, candidates]; NaN and -inf mean none.
        k: results to keep; missing ones are row -1, score -inf.
    """
    rows = np.asarray(rows, np.int64)
    scores = np.asarray(scores, np.float32)
    missing = (rows < 0) | np.isnan(scores) | np.isneginf(scores)
    last = np.iinfo(np.int64).max

    by_row = np.lexsort((-scores, np.where(missing, last, rows)), axis=-1)
    rows, scores, missing = (np.take_along_axis(x, by_row, 1) for x in (rows, scores, missing))
    missing[:, 1:] |= rows[:, 1:] == rows[:, :-1]

    rows = np.where(missing, last, rows)
    scores = np.where(missing, np.float32(-np.inf), scores)
    best = np.lexsort((rows, -scores), axis=-1)[:, :k]
    rows, scores = np.take_along_axis(rows, best, 1), np.take_along_axis(scores, best, 1)
    padding = ((0, 0), (0, k - rows.shape[1]))
    return SearchResult(
        np.pad(np.where(rows == last, NO_ROW, rows).astype(np.int32), padding, constant_values=-1),
        np.pad(scores, padding, constant_values=-np.inf),
    )


def among(
    rows: Int32[np.ndarray, "queries k"], own: Iterable[np.ndarray | Sequence[int]]
) -> Bool[np.ndarray, "queries k"]:
    """Which rows are among their query's `own`, such as its positives."""
    return np.stack([np.isin(line, of_query) for line, of_query in zip(rows, own, strict=True)])


def without_own(result: SearchResult, own: Int32[np.ndarray, " queries"], k: int) -> SearchResult:
    """Top k of each query without one row of its own.

    If queries are themselves passages (ArguAna's arguments), each finds itself first.

    Args:
        result: at least k + 1 results per query, so that k remain.
        own: the row to exclude for each query; -1 for none.
        k: results to keep.

    Source: BEIR (Thakur et al., 2021), whose evaluation excludes the document with the query's id.
    """
    scores = np.where(result.rows == own[:, None], np.float32(-np.inf), result.scores)
    return top_k(result.rows, scores, k)


def merge(results: Sequence[SearchResult], k: int) -> SearchResult:
    """Top k of several searches of the same queries; a row found twice counts once, at its best."""
    return top_k(
        np.concatenate([result.rows for result in results], axis=1),
        np.concatenate([result.scores for result in results], axis=1),
        k,
    )


def write_trec_run(
    path: artifacts.FilePath, run: Run, *, ids: Sequence[str], tag: str = "taser"
) -> None:
    """Writes TREC's six columns: query id, Q0, passage id, rank from 1, score, tag.

    Ids have no white space, which `check_id` refuses in collections. Scores are the shortest
    decimals that read back as the same float32. Missing results are not written, so a query without
    results has no line.

    Args:
        path: the file.
        run: rows refer to `ids`.
        ids: passage id of each row of the store.
        tag: name of the system, the last column, without white space.

    Raises:
        StorageError: the file cannot be written.
    """
    ordered = top_k(run.rows, run.scores, run.rows.shape[1])
    passages = {row: ids[row] for row in np.unique(ordered.rows).tolist() if row != NO_ROW}
    with artifacts.replacing(path) as scratch, open(scratch, "w", encoding="utf-8") as file:
        for query_id, rows, scores in zip(
            run.query_ids, ordered.rows.tolist(), ordered.scores, strict=True
        ):
            for rank, (row, score) in enumerate(zip(rows, scores, strict=True), start=1):
                if row == NO_ROW:
                    break
                file.write(f"{query_id} Q0 {passages[row]} {rank} {score!s} {tag}\n")


def read_trec_run(
    path: artifacts.FilePath,
    row_of: Callable[[str], int],
    *,
    query_ids: Sequence[str] | None = None,
) -> Run:
    """Reads TREC's six columns; the order comes from scores, as in trec_eval, not from ranks.

    Of several ids of one row, which has merged equal passages, the best score counts.

    Args:
        path: the file; gzipped where it ends in .gz.
        row_of: passage id -> row; raises DataError or KeyError where the id is unknown.
        query_ids: the run's queries, in this order; those without a line get no results. None
            takes those of the file, in its order.

    Raises:
        DataError: a line without six columns, a score that is no finite float32, an unknown
            passage, a passage twice for one query, or a query outside `query_ids`; with its line.
    """
    if not artifacts.is_remote(path):
        check_file(path, fix="run the command that wrote the run again, such as `taser search`")
    # Most passages are results of several queries.
    row_of = functools.cache(row_of)
    by_query: dict[str, dict[str, float]] = {id: {} for id in query_ids or ()}
    # Of queries without results: BM25 finds none in another language.
    has_none = bool(by_query) and os.path.isfile(path) and not os.path.getsize(path)
    for number, line in () if has_none else numbered_lines(path):
        columns = line.split()
        if not columns:
            continue
        where = f"{path}:{number}"
        if len(columns) != 6:
            fix = "write six: query id, Q0, passage id, rank, score, tag"
            raise DataError(f"{len(columns)} columns", where=where, fix=fix)
        query_id, _, passage_id, _, score_text, _ = columns
        if query_ids is not None and query_id not in by_query:
            fix = "read the run with the query set it was made for"
            raise DataError(f"query {query_id!r} is not in this query set", where=where, fix=fix)
        results = by_query.setdefault(query_id, {})
        try:
            row_of(passage_id)
        except (DataError, KeyError) as error:
            problem = f"passage {passage_id!r} is not in this collection"
            fix = "read the file with the collection it was made for"
            raise DataError(problem, where=where, fix=fix) from error
        if passage_id in results:
            raise DataError(f"passage {passage_id!r} twice for query {query_id!r}", where=where)
        try:
            score = float(score_text)
        except ValueError:
            score = math.nan
        # One string for all of its lines.
        results[sys.intern(passage_id)] = score
        if not abs(score) <= _LARGEST:
            problem = f"score {score_text!r} is no finite number of 32 bits"
            raise DataError(problem, where=where, fix="search again")
    k = max(map(len, by_query.values()), default=0)
    rows = np.full((len(by_query), k), NO_ROW, np.int64)
    scores = np.full((len(by_query), k), -np.inf, np.float32)
    for line_index, results in enumerate(by_query.values()):
        # Equal passages under two ids are one row.
        rows[line_index, : len(results)] = list(map(row_of, results))
        scores[line_index, : len(results)] = list(results.values())
    return Run.of(list(by_query), top_k(rows, scores, k))


LISTS, CONFIDENCE, FUSED_LISTS = "ranked lists", "confidence", "fused lists"
_VERSION = 1
_ARRAYS, _QUERY_IDS = "arrays.npz", "query_ids.json"


class _Metadata(artifacts.Metadata, frozen=True):
    columns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class QueryArrays:
    """Arrays of the same queries.

    Attributes:
        kind: LISTS, CONFIDENCE or FUSED_LISTS.
        query_ids: one per line of each array.
        arrays: name -> [queries, ...].
        fingerprints: fingerprints of their sources.
        columns: names along the second axis; for confidences, the specialists.
    """

    kind: str
    query_ids: list[str]
    arrays: Mapping[str, np.ndarray]
    fingerprints: Mapping[str, str]
    columns: tuple[str, ...] = ()

    @property
    def run(self) -> Run:
        """The lists."""
        return Run(self.query_ids, self.arrays["rows"], self.arrays["scores"])

    def save(self, directory: artifacts.FilePath) -> None:
        """Writes the artefact, its metadata last."""
        directory = pathlib.Path(directory)
        write_arrays(directory / _ARRAYS, self.arrays)
        artifacts.write_json(directory / _QUERY_IDS, self.query_ids)
        metadata = {"kind": self.kind, "format_version": _VERSION, "columns": list(self.columns)}
        artifacts.write_json(
            directory / artifacts.METADATA, {**metadata, "fingerprints": dict(self.fingerprints)}
        )

    @classmethod
    def open(
        cls,
        directory: artifacts.FilePath,
        kind: str,
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> QueryArrays:
        """Opens a finished artefact.

        Args:
            directory: where it is.
            kind: the required kind.
            fingerprints: required fingerprints of its sources.

        Raises:
            DataError: nothing finished there, another kind, or a damaged file.
            FingerprintError: it was made from something else.
        """
        directory = pathlib.Path(directory)
        again = f"delete {directory}, then run the same command again, or name another directory"
        metadata = artifacts.read_metadata(
            directory, kind, _VERSION, _Metadata, fingerprints=fingerprints, fix=again
        )
        arrays = read_arrays(directory / _ARRAYS, fix=again)
        query_ids = read_typed(directory / _QUERY_IDS, list[str], fix=again)
        return cls(kind, query_ids, arrays, metadata.fingerprints, metadata.columns)


def write_arrays(path: artifacts.FilePath, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes named arrays into one file."""
    with artifacts.replacing(path) as scratch, open(scratch, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_arrays(path: artifacts.FilePath, *, fix: str) -> dict[str, np.ndarray]:
    """What `write_arrays` wrote.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except artifacts.ARRAY_ERRORS as error:
        raise DataError(f"missing or damaged: {error}", where=str(path), fix=fix) from error


def is_finished(directory: artifacts.FilePath) -> bool:
    """Whether a finished artefact of any kind is there."""
    return (pathlib.Path(directory) / artifacts.METADATA).is_file()
