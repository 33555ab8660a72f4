"""Files of columns: rows with their lines, and qrels in TREC's or BEIR's columns."""

from __future__ import annotations

import collections
import csv
import os
from collections.abc import Iterator

from taser_jax.data.files import numbered_lines
from taser_jax.data.readers.located import Judgement
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError

# A longer column means an unclosed quote that swallowed the following lines.
_LONGEST_FIELD = 1 << 24
QRELS_HEADERS = ("query-id\t", "query_id\t", "qid\t")


def plain_rows(path: FilePath) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, columns): tab-separated, a quote is an ordinary character."""
    for line, content in numbered_lines(path):
        if content := content.rstrip("\r\n"):
            yield line, content.split("\t")


def quoted_rows(path: FilePath, delimiter: str = "\t") -> Iterator[tuple[int, list[str]]]:
    """Yields (first line of a row, columns), with csv's double quotes.

    A quoted column may span lines. A line whose quotes are not csv's is taken as it is.

    Example:
        A column `"a ""b"" c"` is `a "b" c`, and `"a" b`, which is none of csv's, is `"a" b`.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    lines = numbered_lines(path)
    waiting: collections.deque[tuple[int, str]] = collections.deque()
    taken: list[tuple[int, str]] = []

    def contents() -> Iterator[str]:
        while (one := waiting.popleft() if waiting else next(lines, None)) is not None:
            taken.append(one)
            yield one[1]

    while True:
        taken.clear()
        try:
            row = next(csv.reader(contents(), delimiter=delimiter, strict=True), None)
        except csv.Error:
            waiting.extendleft(reversed(taken[1:]))
            row = taken[0][1].rstrip("\r\n").split(delimiter)
        if row is None:
            return
        if row:
            yield taken[0][0], row


def wrong_columns(where: str, found: int, expected: str) -> DataError:
    """The error for a row of too few or too many columns."""
    return DataError(
        f"{found} tab-separated columns, not {expected}",
        where=where,
        fix="check for a missing tab, tabs or newlines within a text, or a quote left open",
    )


def read_qrels(path: FilePath) -> Iterator[Judgement]:
    """Relevance judgements in TREC's or BEIR's format.

    TREC: query id, iteration (ignored), passage id, grade, separated by white space. BEIR: a
    header starting with query-id (or query_id, qid), then query id, passage id and grade,
    separated by tabs.

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
        if line == 1 and content.startswith(QRELS_HEADERS):
            beir = True
            continue
        if not content.strip():
            continue
        columns = content.rstrip("\r\n").split("\t") if beir else content.split()
        if beir and len(columns) != 3:
            raise wrong_columns(where, len(columns), "3: query id, passage id, grade")
        if not beir and len(columns) != 4:
            trec = "4: query id, 0, passage id, grade (TREC), or a BEIR header on line 1"
            raise wrong_columns(where, len(columns), trec)
        query_id, passage_id, grade = columns[0], columns[-2], columns[-1]
        try:
            relevance = int(grade)
        except ValueError as error:
            where = f"{where}, last column"
            fix = "write an integer"
            raise DataError(f"the grade is {grade!r}", where=where, fix=fix) from error
        yield Judgement(where, query_id, passage_id, relevance)
