"""Plain tab-separated files: passages, queries, and qrels in TREC's or BEIR's columns.

As in MS MARCO's files there is no quoting: a quote is an ordinary character.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from taser_jax.data.files import numbered_lines
from taser_jax.data.readers.located import Judgement, Question, checked_passages
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage

_HEADERS = (["id", "text"], ["id", "text", "title"])
_QRELS_HEADER = "query-id"


def read_passages(
    path: FilePath, *, empty: EmptyPassages = EmptyPassages.ERROR
) -> Iterator[Passage]:
    """Passages, one per line: id, text and optionally title; a header of these names is skipped.

    Args:
        path: local or gs://, plain or `.gz`.
        empty: what to do with passages without text.

    Yields:
        Passages in the file's order, as they are read.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    return checked_passages(path, functools.partial(_located_passages, path), empty)


def read_queries(path: FilePath) -> Iterator[Question]:
    """Queries, one per line: id and text.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Queries in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, columns in _rows(path):
        where = f"{os.fspath(path)}:{line}"
        if line == 1 and columns == _HEADERS[0]:
            continue
        if len(columns) != 2:
            raise _wrong_columns(where, len(columns), "2: query id and text")
        if not columns[0] or not columns[1].strip():
            raise DataError(
                "the query's id or text is empty", where=where, expected="query id and text"
            )
        yield Question(where=where, text=columns[1], id=columns[0])


def read_qrels(path: FilePath) -> Iterator[Judgement]:
    """Relevance judgements in TREC's or BEIR's format.

    TREC: query id, iteration (ignored), passage id, grade, separated by white space. BEIR: a
    header starting with query-id, then query id, passage id and grade, separated by tabs.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Judgements in the file's order, those of grade 0 included.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    beir = False
    for line, content in numbered_lines(path):
        where = f"{os.fspath(path)}:{line}"
        if line == 1 and content.startswith(_QRELS_HEADER):
            beir = True
            continue
        if not content.strip():
            continue
        columns = content.rstrip("\r\n").split("\t") if beir else content.split()
        if len(columns) != (3 if beir else 4):
            raise _wrong_columns(
                where,
                len(columns),
                "3: query id, passage id, grade"
                if beir
                else "4: query id, 0, passage id, grade (TREC), or a BEIR header on line 1",
            )
        query_id, passage_id, grade = columns[0], columns[-2], columns[-1]
        try:
            relevance = int(grade)
        except ValueError as error:
            raise DataError(
                f"the grade is {grade!r}", where=f"{where}, last column", expected="an integer"
            ) from error
        yield Judgement(where, query_id, passage_id, relevance)


def _located_passages(path: FilePath) -> Iterator[tuple[int, Passage]]:
    for line, columns in _rows(path):
        if line == 1 and columns in _HEADERS:
            continue
        if len(columns) not in (2, 3):
            raise _wrong_columns(
                f"{os.fspath(path)}:{line}", len(columns), "2 or 3: id, text and optionally title"
            )
        yield line, Passage(*columns)


def _rows(path: FilePath) -> Iterator[tuple[int, list[str]]]:
    for line, content in numbered_lines(path):
        content = content.rstrip("\r\n")
        if content:
            yield line, content.split("\t")


def _wrong_columns(where: str, found: int, expected: str) -> DataError:
    return DataError(
        f"{found} columns",
        where=where,
        expected=expected,
        fix="check for missing tabs, and for tabs or newlines within a text",
    )
