"""Questions of any format: DPR's JSON and `.qa.csv`, BEIR's and KILT's JSON lines, plain tables.

DPR's formats as published with Karpukhin et al., 2020, and as pyserini writes the same topics;
KILT's as published with Petroni et al., 2021.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterator, Mapping

import msgspec

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.readers import fields
from taser_jax.data.readers.located import Output, Question
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import typed

_NO_LITERAL = (TypeError, ValueError, SyntaxError, MemoryError, RecursionError)
_FIX_KILT = "write {id, input, output: [{answer, provenance: [{wikipedia_id, title, ...}]}]}"
# The answers of fact checking; no passage contains them as answers.
_VERDICTS = frozenset({"SUPPORTS", "REFUTES", "DISPUTED", "NOT ENOUGH INFO"})


def read_questions(path: FilePath, *, pairs: bool = False) -> Iterator[Question]:
    r"""Questions of a file, whose name and first record decide how it is read.

    JSON or JSON lines of {input, output}: KILT's (`read_kilt`).

    JSON, JSON lines, Parquet or a table with a header, of {question, answers, id} or synonyms
    (`fields.Role`), with the passages of anchor/positive/negative pairs, or DPR's positive_ctxs,
    negative_ctxs and hard_negative_ctxs (a context is {title, text} and optionally passage_id or
    psg_id).

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
        yield from read_kilt(path)
    elif not name.endswith(".qa.csv") and (records := fields.read_records(path)) is not None:
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
    return fields.is_json(path) and "input" in next(json_records(path), (0, {}))[1]


class _KiltQuery(msgspec.Struct):
    input: str
    id: str | int = ""
    output: tuple[Output, ...] = ()


def read_kilt(path: FilePath) -> Iterator[Question]:
    """Queries of a KILT file, lines or an array of {id, input, output: [{answer, provenance}]}.

    Verdicts are no answers.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Queries in the file's order; those of blind test sets have no output.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, record in json_records(path):
        where = f"{os.fspath(path)}:{line}"
        query = typed(record, _KiltQuery, where=where, fix=_FIX_KILT)
        if not query.input.strip():
            where = f"{where}, field 'input'"
            raise DataError("the input is empty", where=where, fix="remove the line")
        answers = dict.fromkeys(output.answer for output in query.output if output.answer)
        yield Question(
            where=where,
            text=query.input,
            id=str(query.id),
            answers=tuple(answer for answer in answers if answer not in _VERDICTS),
            outputs=query.output,
            record=record,
        )


def _topics(path: FilePath) -> Iterator[Question]:
    """TREC's topics; the title is the query, or else the description."""
    for line, topic in fields.tagged_blocks(path, "top"):
        parts = {}
        for name, text in re.findall(r"(?is)<(num|title|desc)>([^<]*)", topic):
            said = re.sub(r"(?i)^\s*(number|topic|description):", "", text)
            parts[name.lower()] = " ".join(said.split())
        where = f"{os.fspath(path)}:{line}"
        text = _non_empty(parts.get("title") or parts.get("desc") or "", where)
        yield Question(where=where, text=text, id=parts.get("num", ""))


def _of_table(path: FilePath) -> Iterator[Question]:
    for line, columns in fields.plain_rows(path):
        where = f"{os.fspath(path)}:{line}"
        if len(columns) != 2:
            raise fields.wrong_columns(where, len(columns), "2: query id and text")
        yield Question(where=where, text=_non_empty(columns[1], where), id=columns[0])


def _qa_csv(path: FilePath) -> Iterator[Question]:
    for line, row in fields.quoted_rows(path):
        where = f"{os.fspath(path)}:{line}"
        if len(row) != 2:
            expected = '2: the question and a list of answers, such as ["Paris"]'
            raise fields.wrong_columns(where, len(row), expected)
        question, answers = row
        yield _question({"question": question, "answers": answers}, where, pairs=False)


def _question(record: Mapping[str, object], where: str, *, pairs: bool) -> Question:
    name = (
        fields.first_of(record, fields.Role.QUESTION)
        or fields.first_of(record, fields.Role.TEXT)
        or "question"
    )
    text = fields.string_field(record, name, where)
    id = fields.first_of(record, fields.Role.ID, fields.Role.QUERY_ID)
    quoted = fields.quoted_passages(record, fields.Role.POSITIVE, where)
    return Question(
        where=where,
        text=_non_empty(text, where) if fields.first_of(record, fields.Role.QUESTION) else text,
        id=fields.id_field(record, id, where),
        answers=_answers(record, where),
        positives=fields.positives(record, where) if pairs else quoted,
        # As in DPR, a question without hard negatives falls back on its other negatives.
        hard_negatives=fields.quoted_passages(record, fields.Role.NEGATIVE, where)
        or fields.quoted_passages(record, fields.Role.OTHER_NEGATIVE, where),
    )


def _answers(record: Mapping[str, object], where: str) -> tuple[str, ...]:
    name = fields.first_of(record, fields.Role.ANSWERS)
    if name is None:
        return ()
    value = record[name]
    # One answer may stand alone, a list of them may not.
    if isinstance(value, str) and name != "answers":
        return (value,) if value.strip() else ()
    if isinstance(value, str) and value.lstrip().startswith("["):
        # In a table's column a list is written as in DPR's .qa.csv.
        with contextlib.suppress(*_NO_LITERAL):
            value = ast.literal_eval(value.strip())
    return fields.string_list(value, f"{where}, field {name!r}")


def _non_empty(text: str, where: str) -> str:
    if not text.strip():
        where = f"{where}, field 'question'"
        raise DataError("the question is empty", where=where, fix="remove it")
    return text
