"""Mined hard negatives on disk: one JSON line per query, readable in an editor.

A directory has `<task>.<split>.jsonl`, lines {"query_id": str, "rows": [int], "scores": [float]}
with the best passage first, and `metadata.json`, which records their sources and the counts of each
file. A line with "dropped": true has a query that training leaves out.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Float32, Int32

from taser_jax.storage import artifacts
from taser_jax.storage.checksums import check_file
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import read_typed

FORMAT_VERSION = 2
_REMAKE = "mine them again with `taser mine` to a new directory"
_FILES = "files"
_Row = Annotated[int, msgspec.Meta(ge=0, le=np.iinfo(np.int32).max)]


class _Line(msgspec.Struct, omit_defaults=True):
    query_id: str
    rows: list[_Row]
    scores: list[float]
    dropped: bool = False


@dataclasses.dataclass(frozen=True)
class QueryNegatives:
    """One line: the hard negatives of a query.

    Attributes:
        rows: rows of the passage store, best first.
        scores: the scores they were mined by, parallel to the rows.
        is_dropped: whether training leaves out the query because it has no negative.
    """

    rows: Int32[np.ndarray, " negatives"]
    scores: Float32[np.ndarray, " negatives"]
    is_dropped: bool = False


def write_negatives(
    directory: artifacts.FilePath,
    task: str,
    split: str,
    *,
    query_ids: Sequence[str],
    rows: Sequence[Sequence[int] | np.ndarray],
    scores: Sequence[Sequence[float] | np.ndarray],
    metadata: Mapping[str, object],
    facts: Mapping[str, object] | None = None,
    dropped: Collection[str] = (),
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

    Returns:
        The file written.

    Raises:
        DataError: a directory with other metadata.
        StorageError: the disk is full or the directory cannot be written.
    """
    directory = pathlib.Path(directory)
    lines = []
    listed = zip(query_ids, map(np.asarray, rows), map(np.asarray, scores), strict=True)
    for id, of_query, scored in listed:
        has_result = of_query >= 0
        kept = of_query[has_result].tolist(), scored[has_result].tolist()
        lines.append(msgspec.json.encode(_Line(id, *kept, id in dropped)) + b"\n")
    path = negatives_path(directory, task, split)
    _write_metadata(directory, metadata, {path.name: dict(facts or {})})
    artifacts.write_bytes(path, b"".join(lines))
    return path


def read_metadata(directory: artifacts.FilePath) -> dict[str, Any]:
    """The record of how a directory's negatives were mined.

    Raises:
        DataError: no such directory, or one of another format version.
    """
    path = pathlib.Path(directory) / artifacts.METADATA
    if not path.is_file():
        raise DataError("no negatives here", where=str(path), fix=_REMAKE)
    return read_typed(path, dict[str, Any], fix=_REMAKE, version=FORMAT_VERSION)


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
        DataError: a malformed line, a repeated query, or none of `query_ids` in the file.
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
    line_of_query: dict[str, QueryNegatives] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            query_id, line = _parse(text, f"{path}:{number}")
            if query_id in line_of_query:
                raise DataError(f"query {query_id!r} is repeated", where=f"{path}:{number}")
            line_of_query[query_id] = line
    if query_ids and line_of_query.keys().isdisjoint(query_ids):
        absent = f"none of the {len(query_ids)} queries is here, such as {query_ids[0]!r}"
        raise DataError(absent, where=str(path), fix=_REMAKE)
    empty = QueryNegatives(np.zeros(0, np.int32), np.zeros(0, np.float32))
    return [line_of_query.get(query_id, empty) for query_id in query_ids]


def _parse(line: bytes, where: str) -> tuple[str, QueryNegatives]:
    try:
        record = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise DataError(f"not a line of negatives ({error})", where=where, fix=_REMAKE) from error
    if len(record.scores) != len(record.rows):
        counts = f"{len(record.scores)} scores of {len(record.rows)} rows"
        raise DataError(counts, where=f"{where}, query {record.query_id!r}", fix=_REMAKE)
    rows, scores = np.asarray(record.rows, np.int32), np.asarray(record.scores, np.float32)
    return record.query_id, QueryNegatives(rows, scores, record.dropped)


def _write_metadata(
    directory: pathlib.Path, metadata: Mapping[str, object], files: Mapping[str, object]
) -> None:
    new = {"format_version": FORMAT_VERSION, **metadata}
    others: dict[str, object] = {}
    if (directory / artifacts.METADATA).exists():
        old = read_metadata(directory)
        others = old.pop(_FILES, {})
        for name in sorted(new.keys() & old.keys()):
            if new[name] != old[name]:
                problem = f"it has negatives with {name} {old[name]!r}, not {new[name]!r}"
                fix = "write to a new directory, to keep the two kinds apart"
                raise DataError(problem, where=str(directory), fix=fix)
    artifacts.write_json(directory / artifacts.METADATA, {**new, _FILES: {**others, **files}})


def negatives_path(directory: artifacts.FilePath, task: str, split: str) -> pathlib.Path:
    """The file with the negatives of one task's split."""
    return artifacts.split_path(directory, task, split, ".jsonl")
