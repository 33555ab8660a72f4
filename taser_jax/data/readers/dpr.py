"""DPR's formats: passages TSV, training JSON or JSONL, and `.qa.csv` or JSONL questions.

Formats as published with Karpukhin et al., 2020, and as pyserini writes the same topics.
"""

from __future__ import annotations

import ast
import csv
import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.readers import located
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage

_REQUIRED_COLUMNS = ("id", "text", "title")
_PAGE_COLUMNS = ("wikipedia_id", "page_id")
# A longer passage means an unclosed quote that swallowed the following lines.
_LONGEST_FIELD = 1 << 24


def read_passages(
    path: FilePath, *, empty: EmptyPassages = EmptyPassages.ERROR
) -> Iterator[Passage]:
    r"""Passages of a `psgs_w100.tsv`-like file.

    A header names the columns: id, text and title, in any order, and optionally wikipedia_id or
    page_id; others are ignored. Columns are tab-separated, with csv's double quotes.

    Args:
        path: local or gs://, plain or `.gz`.
        empty: what to do with passages without text.

    Yields:
        Passages in the file's order, as they are read.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    return located.checked_passages(path, functools.partial(_located_passages, path), empty)


def read_training(path: FilePath) -> Iterator[located.Question]:
    """Questions with their passages, from a DPR training or dev file.

    Reads one JSON array (as a stream) or JSON lines of {question, answers, positive_ctxs,
    negative_ctxs, hard_negative_ctxs}; a context is {title, text} and optionally passage_id
    or psg_id. Rows without positives are yielded too; the caller decides what to do with them.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Questions in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, record in json_records(path):
        where = f"{os.fspath(path)}:{line}"
        if "positive_ctxs" not in record:
            raise DataError(
                "no field 'positive_ctxs'",
                where=where,
                expected="DPR's training format: question, answers, positive_ctxs, ...",
                fix="read a file of questions and answers as .qa.csv, or with read_questions",
            )
        yield _question(record, where)


def read_questions(path: FilePath) -> Iterator[located.Question]:
    r"""Questions with their answers: `.qa.csv`, JSON or JSONL, by the file's name.

    A `.qa.csv` has, despite its name, tab-separated columns and no header: the question and a
    Python list literal of answers, either bare or in quotes with the inner quotes doubled. JSON
    and JSONL have {question, answers, id}; `answer` and `qid` are accepted too, and so are
    training files, whose passages are read as well.

    Example:
        A line of a .qa.csv: `who wrote it\t["Ada Lovelace", "Lovelace"]`

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Questions in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    if is_json(path):
        for line, record in json_records(path):
            yield _question(record, f"{os.fspath(path)}:{line}")
    else:
        yield from _qa_csv(path)


def is_json(path: FilePath) -> bool:
    """Whether the name is that of a JSON or JSON-lines file, gzipped or not."""
    return os.fspath(path).removesuffix(".gz").endswith((".json", ".jsonl"))


def _qa_csv(path: FilePath) -> Iterator[located.Question]:
    for line, content in numbered_lines(path):
        if not content.strip():
            continue
        where = f"{os.fspath(path)}:{line}"
        try:
            columns = next(csv.reader([content.rstrip("\r\n")], delimiter="\t"))
        except csv.Error as error:
            raise DataError(
                f"not tab-separated columns: {error}",
                where=where,
                expected="a question, a tab and a list of answers, without other line breaks",
                fix="remove the carriage return or NUL within the line",
            ) from error
        if len(columns) != 2:
            raise DataError(
                f"{len(columns)} tab-separated columns",
                where=where,
                expected='2: the question and a list of answers, such as ["Paris"]',
                fix="check for a missing tab, or an opening quote that is not closed",
            )
        text, literal = columns
        try:
            answers = ast.literal_eval(literal.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise DataError(
                f"found {literal[:60]!r}, which is not a list literal",
                where=f"{where}, field 'answers'",
                expected='a list of strings, such as ["Paris"]',
                fix="write the answers as a Python or JSON list",
            ) from error
        yield located.Question(
            where=where,
            text=_non_empty_question(text, where),
            answers=located.string_list(answers, f"{where}, field 'answers'"),
        )


def _question(record: Mapping[str, Any], where: str) -> located.Question:
    answers = record.get("answers", record.get("answer", []))
    return located.Question(
        where=where,
        text=_non_empty_question(located.string_field(record, "question", where), where),
        id=located.id_field(record, "qid", "id", "question_id", where=where),
        answers=located.string_list(answers, f"{where}, field 'answers'"),
        positives=_contexts(record, "positive_ctxs", where),
        hard_negatives=_contexts(record, "hard_negative_ctxs", where),
        negatives=_contexts(record, "negative_ctxs", where),
    )


def _non_empty_question(text: str, where: str) -> str:
    if not text.strip():
        raise DataError(
            "the question is empty", where=f"{where}, field 'question'", expected="some text"
        )
    return text


def _contexts(record: Mapping[str, Any], name: str, where: str) -> tuple[located.Context, ...]:
    value = record.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise DataError(
            f"found a {type(value).__name__}",
            where=f"{where}, field {name!r}",
            expected="a list of {title, text}",
        )
    contexts = []
    for number, context in enumerate(value):
        at = f"{where}, {name}[{number}]"
        if not isinstance(context, dict):
            raise DataError(f"found a {type(context).__name__}", where=at, expected="{title, text}")
        title = context.get("title")
        contexts.append(
            located.Context(
                title="" if title is None else located.string_field(context, "title", at),
                text=located.string_field(context, "text", at),
                id=located.id_field(context, "passage_id", "psg_id", where=at),
            )
        )
    return tuple(contexts)


def _located_passages(path: FilePath) -> Iterator[tuple[int, Passage]]:
    rows = csv_rows(path)
    header_line, header = next(rows, (1, []))
    header = [name.strip() for name in header]
    for name in _REQUIRED_COLUMNS:
        if name not in header:
            raise DataError(
                f"the header has no column {name!r}: {', '.join(header)[:120]}",
                where=f"{os.fspath(path)}:{header_line}",
                expected="a first line naming tab-separated columns id, text and title",
                fix=f"add the column {name!r} (it may be empty), or read the file as plain TSV",
            )
    id_at, text_at, title_at = (header.index(name) for name in _REQUIRED_COLUMNS)
    page_at = next((header.index(name) for name in _PAGE_COLUMNS if name in header), None)
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"{len(row)} tab-separated columns",
                where=f"{os.fspath(path)}:{line}",
                expected=f"{len(header)}: {', '.join(header)}",
                fix="check for a missing tab, or an opening quote that is not closed",
            )
        page = "" if page_at is None else row[page_at]
        yield line, Passage(row[id_at], row[text_at], row[title_at], page)


def csv_rows(path: FilePath) -> Iterator[tuple[int, list[str]]]:
    """Yields (first line of a row, columns); a quoted column may span lines."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader((line for _, line in numbered_lines(path)), delimiter="\t")
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"not valid TSV: {error}",
                where=f"{os.fspath(path)}:{start}",
                expected="tab-separated columns, double quotes around columns that contain quotes",
                fix="check for an opening quote that is not closed",
            ) from error
        if row:
            yield start, row
