"""Mined hard negatives on disk: one JSON line per query, readable in an editor.

A directory has `<task>.<split>.jsonl`, lines {"query_id": str, "rows": [int], "scores": [float]}
with the best passage first, and `metadata.json`, which records their sources and the counts of each
file. A line may also have

    "dropped": true                                     training leaves out the query
    "teacher": {"positives": [float], "negatives": [float]}   a teacher's scores of the query's
                                                        positives, in their order, and of `rows`
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
from jaxtyping import Float32, Int32

from taser_jax.storage import artifacts
from taser_jax.storage.checksums import check_file
from taser_jax.storage.errors import DataError

FORMAT_VERSION = 2
_REMAKE = "mine them again with `taser mine`, into a new directory"
_RESCORE = "score them again with `taser score`, into a new directory"
_FILES = "files"
_LARGEST_ROW = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class TeacherLine:
    """A teacher's scores of one query's passages.

    Attributes:
        positives: parallel to the query's positives in the collection.
        negatives: parallel to its rows in the file.
    """

    positives: Float32[np.ndarray, " positives"]
    negatives: Float32[np.ndarray, " negatives"]


@dataclasses.dataclass(frozen=True)
class QueryNegatives:
    """One line: the hard negatives of a query.

    Attributes:
        rows: rows of the passage store, best first.
        scores: the scores they were mined by, parallel to the rows.
        is_dropped: whether training leaves out the query because it has no negative.
        teacher: a teacher's scores; None where the file has none.
    """

    rows: Int32[np.ndarray, " negatives"]
    scores: Float32[np.ndarray, " negatives"]
    is_dropped: bool = False
    teacher: TeacherLine | None = None


def write_negatives(
    directory: artifacts.FilePath,
    task: str,
    split: str,
    *,
    query_ids: Sequence[str],
    rows: Sequence[Sequence[int] | np.ndarray],
    scores: Sequence[Sequence[float] | np.ndarray],
    metadata: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    dropped: Collection[str] = (),
    teacher: Sequence[TeacherLine] | None = None,
) -> pathlib.Path:
    """Writes one task's split; complete or not at all.

    Args:
        directory: created if missing; other tasks' files in it stay.
        task: the task's name.
        split: the split's name.
        query_ids: one per query.
        rows: rows of the passage store for each query, best first; -1 (no result) is skipped.
        scores: parallel to `rows`.
        metadata: facts common to all files of the directory; must have `collection_fingerprint` and
            `source`.
        facts: facts about this file, such as counts; stored in `metadata.json` under its name.
        dropped: ids of the queries that training leaves out.
        teacher: a teacher's scores of each query, whose rows then have no -1.

    Returns:
        The file written.

    Raises:
        DataError: lists that do not match, or a directory with other metadata.
        StorageError: the disk is full or the directory cannot be written.
    """
    directory = pathlib.Path(directory)
    where = f"negatives of task {task!r}, split {split!r}"
    if not len(query_ids) == len(rows) == len(scores):
        raise DataError(
            f"{len(query_ids)} queries, {len(rows)} lists of rows, {len(scores)} of scores",
            where=where,
            expected="as many of each",
        )
    lines = []
    for number, query_id in enumerate(query_ids):
        query_rows, query_scores = rows[number], scores[number]
        if len(query_rows) != len(query_scores):
            raise DataError(
                f"{len(query_rows)} rows and {len(query_scores)} scores",
                where=f"{where}, query {query_id!r}",
            )
        found = [
            (int(row), float(score))
            for row, score in zip(query_rows, query_scores, strict=True)
            if row >= 0
        ]
        record: dict[str, Any] = {
            "query_id": query_id,
            "rows": [row for row, _ in found],
            "scores": [score for _, score in found],
        }
        if query_id in dropped:
            record["dropped"] = True
        if teacher is not None:
            record["teacher"] = {
                "positives": [float(score) for score in teacher[number].positives],
                "negatives": [float(score) for score in teacher[number].negatives],
            }
        lines.append(json.dumps(record) + "\n")
    path = negatives_path(directory, task, split)
    _write_metadata(directory, metadata, {path.name: dict(facts or {})})
    artifacts.write_text(path, "".join(lines), recorded=True)
    return path


def read_metadata(directory: artifacts.FilePath) -> dict[str, Any]:
    """The record of how a directory's negatives were mined.

    Raises:
        DataError: no such directory, or one of another format version.
    """
    path = pathlib.Path(directory) / artifacts.METADATA
    if not path.is_file():
        raise DataError("no negatives here", where=str(path), fix=_REMAKE)
    metadata = artifacts.read_json(path, fix=_REMAKE)
    artifacts.check_version(metadata, FORMAT_VERSION, where=path, fix=_REMAKE)
    return metadata


def read_facts(directory: artifacts.FilePath, task: str, split: str) -> dict[str, Any]:
    """The facts about one task's split in `metadata.json`; empty if there are none."""
    files = read_metadata(directory).get(_FILES, {})
    return files.get(negatives_path(directory, task, split).name, {})


def read_negatives(
    directory: artifacts.FilePath,
    task: str,
    split: str,
    query_ids: Sequence[str],
    *,
    collection_fingerprint: str | None = None,
) -> list[QueryNegatives]:
    """The file's lines, aligned with `query_ids`; a query that is not in it has no rows.

    Args:
        directory: where `write_negatives` wrote.
        task: the task's name.
        split: the split's name.
        query_ids: the queries to read; others in the file are skipped.
        collection_fingerprint: that of the collection to use them with; None skips the check.

    Raises:
        DataError: a malformed line, a repeated query, none of `query_ids` in the file, or a
            teacher's scores of some queries only.
        FingerprintError: mined from another collection.
    """
    metadata = read_metadata(directory)
    if collection_fingerprint is not None:
        artifacts.require_equal(
            str(directory),
            {"collection": str(metadata["collection_fingerprint"])},
            {"collection": collection_fingerprint},
            _REMAKE,
        )
    path = negatives_path(directory, task, split)
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.jsonl")))
        raise DataError("no such file", where=str(path), expected=f"one of {there}", fix=_REMAKE)
    check_file(path, fix=_REMAKE)
    found: dict[str, QueryNegatives] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in _decoded(file, path):
            query_id, negatives = _parse(line, f"{path}:{number}")
            if query_id in found:
                raise DataError(f"query {query_id!r} is repeated", where=f"{path}:{number}")
            found[query_id] = negatives
    if query_ids and found.keys().isdisjoint(query_ids):
        raise DataError(
            f"none of the {len(query_ids)} queries is here",
            where=str(path),
            expected=f"query ids like {query_ids[0]!r}",
            fix=_REMAKE,
        )
    absent = QueryNegatives(np.zeros(0, np.int32), np.zeros(0, np.float32))
    lines = [found.get(query_id, absent) for query_id in query_ids]
    _check_teacher(lines, query_ids, str(path))
    return lines


def _decoded(file: IO[str], path: pathlib.Path) -> Iterator[tuple[int, str]]:
    try:
        yield from enumerate(file, start=1)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error})", where=str(path), fix=_REMAKE) from error


def _check_teacher(lines: Sequence[QueryNegatives], query_ids: Sequence[str], where: str) -> None:
    unscored = [
        query_id for query_id, line in zip(query_ids, lines, strict=True) if line.teacher is None
    ]
    if unscored and len(unscored) < len(lines):
        raise DataError(
            f"{len(unscored)} of {len(lines)} queries have no teacher scores, such as "
            f"{unscored[0]!r}",
            where=where,
            expected="scores of every query, or of none",
            fix=_RESCORE,
        )


def _parse(line: str, where: str) -> tuple[str, QueryNegatives]:
    try:
        record = json.loads(line)
        query_id, rows, scores = record["query_id"], record["rows"], record["scores"]
        teacher = record.get("teacher")
        if teacher is not None:
            teacher = teacher["positives"], teacher["negatives"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"not a line of negatives ({error})", where=where, fix=_REMAKE) from error
    if not isinstance(query_id, str):
        raise DataError(f"query_id is {query_id!r}", where=where, expected="a string")
    if not isinstance(rows, list) or not all(
        type(row) is int and 0 <= row <= _LARGEST_ROW for row in rows
    ):
        raise DataError(
            "rows is not a list of rows", where=where, expected="whole numbers, 0 or more"
        )
    mined = _numbers(scores, f"scores of query {query_id!r}", where, fix=_REMAKE, count=len(rows))
    if teacher is not None:
        what = f"teacher scores of query {query_id!r}"
        teacher = TeacherLine(
            _numbers(teacher[0], what, where, fix=_RESCORE),
            _numbers(teacher[1], what, where, fix=_RESCORE, count=len(rows)),
        )
    is_dropped = record.get("dropped") is True
    return query_id, QueryNegatives(np.asarray(rows, np.int32), mined, is_dropped, teacher)


def _numbers(
    values: object, what: str, where: str, *, fix: str, count: int | None = None
) -> Float32[np.ndarray, " numbers"]:
    """A list of finite numbers, `count` of them where that is known."""
    if not isinstance(values, list) or not all(
        type(value) in (int, float) and math.isfinite(value) for value in values
    ):
        raise DataError(
            f"{what} that are not all finite numbers",
            where=where,
            expected="lists of finite numbers",
            fix=fix,
        )
    if count is not None and len(values) != count:
        raise DataError(
            f"{len(values)} {what}", where=where, expected=f"{count}, one for each row", fix=fix
        )
    return np.asarray(values, np.float32)


def _write_metadata(
    directory: pathlib.Path, metadata: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    for name in ("collection_fingerprint", "source"):
        if name not in metadata:
            raise DataError(f"metadata without {name!r}", where=str(directory))
    new = {"format_version": FORMAT_VERSION, **metadata}
    known: dict[str, Any] = {}
    if (directory / artifacts.METADATA).exists():
        old = read_metadata(directory)
        known = old.pop(_FILES, {})
        for name in new.keys() & old.keys():
            if new[name] != old[name]:
                raise DataError(
                    f"it has negatives with {name} {old[name]!r}",
                    where=str(directory),
                    expected=f"{name} {new[name]!r}",
                    fix="write to a new directory, to keep the two kinds apart",
                )
    artifacts.write_json(directory / artifacts.METADATA, {**new, _FILES: {**known, **files}})


def negatives_path(directory: artifacts.FilePath, task: str, split: str) -> pathlib.Path:
    """The file with the negatives of one task's split."""
    return artifacts.split_path(directory, task, split, ".jsonl")
