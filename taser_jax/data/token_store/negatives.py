"""Mined hard negatives on disk: one JSON line per query, readable in an editor.

A directory has `<task>.<split>.jsonl`, lines {"query_id": str, "rows": [int], "scores": [float]}
with the best passage first, and `metadata.json`, which records their sources.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.artifacts import (
    METADATA,
    FilePath,
    check_version,
    read_json,
    require_equal,
    split_path,
    write_json,
    write_text,
)
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.errors import DataError

FORMAT_VERSION = 1
_REMAKE = "mine them again with `taser mine`, into a new directory"


def write_negatives(
    directory: FilePath,
    task: str,
    split: str,
    *,
    query_ids: Sequence[str],
    rows: Sequence[Sequence[int] | np.ndarray],
    scores: Sequence[Sequence[float] | np.ndarray],
    metadata: Mapping[str, Any],
) -> pathlib.Path:
    """Writes one task's split; complete or not at all.

    Args:
        directory: created if missing; other tasks' files in it stay.
        task: the task's name.
        split: the split's name.
        query_ids: one per query.
        rows: rows of the passage store for each query, best first; -1 (no result) is skipped.
        scores: parallel to `rows`.
        metadata: common to all files of the directory; must have `collection_fingerprint` and
            `source`.

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
    for query_id, query_rows, query_scores in zip(query_ids, rows, scores, strict=True):
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
        record = {
            "query_id": query_id,
            "rows": [row for row, _ in found],
            "scores": [score for _, score in found],
        }
        lines.append(json.dumps(record) + "\n")
    path = negatives_path(directory, task, split)
    _write_metadata(directory, metadata)
    write_text(path, "".join(lines))
    return path


def read_metadata(directory: FilePath) -> dict[str, Any]:
    """The record of how a directory's negatives were mined.

    Raises:
        DataError: no such directory, or one of another format version.
    """
    path = pathlib.Path(directory) / METADATA
    if not path.is_file():
        raise DataError("no negatives here", where=str(path), fix=_REMAKE)
    metadata = read_json(path, fix=_REMAKE)
    check_version(metadata, FORMAT_VERSION, where=path, fix=_REMAKE)
    return metadata


def read_negatives(
    directory: FilePath,
    task: str,
    split: str,
    query_ids: Sequence[str],
    *,
    collection_fingerprint: str | None = None,
) -> Ragged:
    """Mined rows, aligned with `query_ids`; a query that is not in the file has an empty list.

    Args:
        directory: where `write_negatives` wrote.
        task: the task's name.
        split: the split's name.
        query_ids: the queries to read; others in the file are skipped.
        collection_fingerprint: that of the collection to use them with; None skips the check.

    Raises:
        DataError: a malformed line, a repeated query, or none of `query_ids` in the file.
        FingerprintError: mined from another collection.
    """
    metadata = read_metadata(directory)
    if collection_fingerprint is not None:
        require_equal(
            str(directory),
            {"collection": str(metadata["collection_fingerprint"])},
            {"collection": collection_fingerprint},
            _REMAKE,
        )
    path = negatives_path(directory, task, split)
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.jsonl")))
        raise DataError("no such file", where=str(path), expected=f"one of {there}", fix=_REMAKE)
    found: dict[str, np.ndarray] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            query_id, rows = _parse(line, f"{path}:{number}")
            if query_id in found:
                raise DataError(f"query {query_id!r} is repeated", where=f"{path}:{number}")
            found[query_id] = rows
    if query_ids and found.keys().isdisjoint(query_ids):
        raise DataError(
            f"none of the {len(query_ids)} queries is here",
            where=str(path),
            expected=f"query ids like {query_ids[0]!r}",
            fix=_REMAKE,
        )
    empty = np.zeros(0, np.int32)
    return Ragged.from_lists(found.get(query_id, empty) for query_id in query_ids)


def _parse(line: str, where: str) -> tuple[str, np.ndarray]:
    try:
        record = json.loads(line)
        query_id, rows = record["query_id"], record["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"not a line of negatives ({error})", where=where, fix=_REMAKE) from error
    if not isinstance(query_id, str):
        raise DataError(f"query_id is {query_id!r}", where=where, expected="a string")
    if not isinstance(rows, list) or not all(type(row) is int and row >= 0 for row in rows):
        raise DataError(
            "rows is not a list of rows", where=where, expected="whole numbers, 0 or more"
        )
    return query_id, np.asarray(rows, np.int32)


def _write_metadata(directory: pathlib.Path, metadata: Mapping[str, Any]) -> None:
    for name in ("collection_fingerprint", "source"):
        if name not in metadata:
            raise DataError(f"metadata without {name!r}", where=str(directory))
    new = {"format_version": FORMAT_VERSION, **metadata}
    if (directory / METADATA).exists():
        old = read_metadata(directory)
        for name in new.keys() & old.keys():
            if new[name] != old[name]:
                raise DataError(
                    f"it has negatives with {name} {old[name]!r}",
                    where=str(directory),
                    expected=f"{name} {new[name]!r}",
                    fix="write to a new directory, to keep the two kinds apart",
                )
    write_json(directory / METADATA, new)


def negatives_path(directory: FilePath, task: str, split: str) -> pathlib.Path:
    """The file with the negatives of one task's split."""
    return split_path(directory, task, split, ".jsonl")
