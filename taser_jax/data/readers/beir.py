"""BEIR directories: corpus.jsonl, queries.jsonl and qrels/<split>.tsv, plain or `.gz`.

Layout as published with Thakur et al., 2021.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from taser_jax.data.files import file_exists, json_lines
from taser_jax.data.readers import located
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage

# BEIR's name for a split's file -> ours.
SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def read_passages(
    directory: FilePath, *, empty: EmptyPassages = EmptyPassages.ERROR
) -> Iterator[Passage]:
    """Passages of corpus.jsonl: {_id, text} and optionally title.

    Args:
        directory: the data set's folder.
        empty: what to do with passages without text.

    Yields:
        Passages in the file's order, as they are read.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    path = corpus_file(directory)
    return located.checked_passages(path, functools.partial(_located_passages, path), empty)


def read_queries(directory: FilePath) -> Iterator[located.Question]:
    """Queries of queries.jsonl: {_id, text}.

    Args:
        directory: the data set's folder.

    Yields:
        All queries, of every split.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    path = queries_file(directory)
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        yield located.Question(
            where=where, text=located.string_field(record, "text", where), id=_id(record, where)
        )


def corpus_file(directory: FilePath) -> str:
    """The corpus.jsonl or corpus.jsonl.gz of a folder."""
    return _file(directory, "corpus.jsonl")


def queries_file(directory: FilePath) -> str:
    """The queries.jsonl or queries.jsonl.gz of a folder."""
    return _file(directory, "queries.jsonl")


def qrels_files(directory: FilePath) -> dict[str, str]:
    """Split -> its qrels file, for the splits in the folder."""
    found = {}
    for name, split in SPLITS.items():
        base = os.path.join(os.fspath(directory), "qrels", f"{name}.tsv")
        for path in (base, base + ".gz"):
            if file_exists(path):
                found[split] = path
                break
    return found


def _located_passages(path: FilePath) -> Iterator[tuple[int, Passage]]:
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        title = record.get("title")
        yield (
            line,
            Passage(
                id=_id(record, where),
                text=located.string_field(record, "text", where),
                title="" if title is None else located.string_field(record, "title", where),
            ),
        )


def _id(record: dict, where: str) -> str:
    id = located.id_field(record, "_id", where=where)
    if not id:
        raise DataError("no id", where=f"{where}, field '_id'", expected="a non-empty string")
    return id


def _file(directory: FilePath, name: str) -> str:
    base = os.path.join(os.fspath(directory), name)
    for path in (base, base + ".gz"):
        if file_exists(path):
            return path
    raise DataError(
        f"there is no {name} or {name}.gz",
        where=os.fspath(directory),
        expected="a BEIR folder: corpus.jsonl, queries.jsonl, qrels/*.tsv",
        fix="check the path's spelling",
    )
