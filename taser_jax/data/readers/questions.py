"""Questions of any format: DPR's JSON and `.qa.csv`, BEIR's and KILT's JSON lines, plain tables.

DPR's formats as published with Karpukhin et al., 2020, and as pyserini writes the same topics.
"""

from __future__ import annotations

import ast
import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.readers import kilt
from taser_jax.data.readers.fields import (
    Role,
    first_of,
    is_json,
    plain_rows,
    positives,
    quoted_passages,
    read_records,
    roles_of,
    tagged_blocks,
    wrong_columns,
)
from taser_jax.data.readers.located import Context, Question, id_field, string_field, string_list
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import typed


class _Context(msgspec.Struct):
    text: str
    title: str | None = None
    passage_id: str | int | None = None
    psg_id: str | int | None = None


class _DprContexts(msgspec.Struct):
    positive_ctxs: list[_Context] = []
    negative_ctxs: list[_Context] = []
    hard_negative_ctxs: list[_Context] = []


def read_questions(path: FilePath, *, pairs: bool = False) -> Iterator[Question]:
    r"""Questions of a file, whose name and first record decide how it is read.

    JSON or JSON lines of {input, output}: KILT's (`kilt.read_queries`).

    JSON, JSON lines, Parquet or a table with a header, of {question, answers, id} or synonyms
    (`fields.Role`), with DPR's positive_ctxs, negative_ctxs and hard_negative_ctxs where there are
    any (a context is {title, text} and optionally passage_id or psg_id), or with the passages of
    anchor/positive/negative pairs.

    JSON lines of {_id, text}: BEIR's.

    `.csv`, in DPR's way without a header: the question, a tab, and a Python list literal of
    answers, either bare or in quotes with the inner quotes doubled.

    TREC's topics, <top> with <num> and <title>.

    Other names: a table of id and text, separated by tabs.

    Example:
        A line of a .qa.csv: `who wrote it\t["Ada Lovelace", "Lovelace"]`

    Args:
        path: local or gs://, plain or `.gz`.
        pairs: whether the file's own passages are the collection's: an answer is then a positive.

    Yields:
        Questions in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    name = os.fspath(path).removesuffix(".gz")
    if is_kilt(path):
        yield from map(kilt.as_question, kilt.read_queries(path))
    elif not name.endswith(".qa.csv") and (records := read_records(path)) is not None:
        for line, record in records:
            yield _question(record, f"{os.fspath(path)}:{line}", pairs=pairs)
    elif name.endswith(".csv"):
        yield from _qa_csv(path)
    elif next(numbered_lines(path), (0, ""))[1].lstrip().lower().startswith("<top"):
        yield from _topics(path)
    else:
        yield from _of_table(path)


def is_kilt(path: FilePath) -> bool:
    """Whether a file holds KILT's queries."""
    return is_json(path) and "input" in next(json_records(path), (0, {}))[1]


def _topics(path: FilePath) -> Iterator[Question]:
    """TREC's topics; the title is the query, or else the description."""
    for line, topic in tagged_blocks(path, "top"):
        fields = {}
        for name, text in re.findall(r"(?is)<(num|title|desc)>([^<]*)", topic):
            said = re.sub(r"(?i)^\s*(number|topic|description):", "", text)
            fields[name.lower()] = " ".join(said.split())
        where = f"{os.fspath(path)}:{line}"
        text = _non_empty(fields.get("title") or fields.get("desc") or "", where)
        yield Question(where=where, text=text, id=fields.get("num", ""))


def _of_table(path: FilePath) -> Iterator[Question]:
    for line, columns in plain_rows(path):
        where = f"{os.fspath(path)}:{line}"
        if len(columns) != 2:
            raise wrong_columns(where, len(columns), "2: query id and text")
        if not columns[0] or not columns[1].strip():
            raise DataError("the query's id or text is empty", where=where, fix="remove the line")
        yield Question(where=where, text=columns[1], id=columns[0])


def _qa_csv(path: FilePath) -> Iterator[Question]:
    for line, content in numbered_lines(path):
        if not content.strip():
            continue
        where = f"{os.fspath(path)}:{line}"
        try:
            columns = next(csv.reader([content.rstrip("\r\n")], delimiter="\t"))
        except csv.Error as error:
            fix = "remove the carriage return or NUL within the line"
            raise DataError(f"no columns: {error}", where=where, fix=fix) from error
        if len(columns) != 2:
            expected = '2: the question and a list of answers, such as ["Paris"]'
            raise wrong_columns(where, len(columns), expected)
        text, literal = columns
        try:
            answers = ast.literal_eval(literal.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            problem = f"found {literal[:60]!r}, which is not a list literal"
            fix = 'write the answers as a Python or JSON list, such as ["Paris"]'
            raise DataError(problem, where=f"{where}, field 'answers'", fix=fix) from error
        yield Question(
            where=where,
            text=_non_empty(text, where),
            answers=string_list(answers, f"{where}, field 'answers'"),
        )


def _question(record: Mapping[str, object], where: str, *, pairs: bool) -> Question:
    name = first_of(record, Role.QUESTION) or first_of(record, Role.TEXT) or "question"
    text = string_field(record, name, where)
    id = first_of(record, Role.ID) or first_of(record, Role.QUERY_ID)
    quoted = positives(record, where) if pairs or Role.POSITIVE in roles_of(record) else ()
    dpr = typed(record, _DprContexts, where=where, fix="write a list of {title, text}")
    return Question(
        where=where,
        text=_non_empty(text, where) if first_of(record, Role.QUESTION) else text,
        id=id_field(record, id, where=where) if id else "",
        answers=_answers(record, where),
        positives=_contexts(dpr.positive_ctxs) or quoted,
        hard_negatives=_contexts(dpr.hard_negative_ctxs)
        or quoted_passages(record, Role.NEGATIVE, where),
        negatives=_contexts(dpr.negative_ctxs),
    )


def _answers(record: Mapping[str, object], where: str) -> tuple[str, ...]:
    name = first_of(record, Role.ANSWERS)
    if name is None:
        return ()
    value = record[name]
    # One answer may stand alone, a list of them may not.
    if isinstance(value, str) and name != "answers":
        return (value,) if value.strip() else ()
    return string_list(value, f"{where}, field {name!r}")


def _non_empty(text: str, where: str) -> str:
    if not text.strip():
        where = f"{where}, field 'question'"
        raise DataError("the question is empty", where=where, fix="remove it")
    return text


def _contexts(quoted: Sequence[_Context]) -> tuple[Context, ...]:
    return tuple(
        Context(context.title or "", context.text, "" if id is None else str(id))
        for context in quoted
        for id in [context.psg_id if context.passage_id is None else context.passage_id]
    )
