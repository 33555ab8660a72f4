"""Records of files by the names of their fields: tables, JSON, Parquet; judgements."""

from __future__ import annotations

import collections
import csv
import enum
import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.readers.located import Judgement
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, normalized_content, text_hash

# A longer column means an unclosed quote that swallowed the following lines.
_LONGEST_FIELD = 1 << 24


def string_field(record: Mapping[str, object], name: str, where: str) -> str:
    """The value of a required string field."""
    value = record.get(name)
    if not isinstance(value, str):
        problem = f"no field {name!r}" if name not in record else f"found {value!r}, not a string"
        raise DataError(problem, where=f"{where}, field {name!r}", fix="write a string")
    return value


def id_field(record: Mapping[str, object], name: str | None, where: str) -> str:
    """The value of a field as a string (integers are converted); empty if there is none."""
    value = None if name is None else record.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        where = f"{where}, field {name!r}"
        raise DataError(f"found {value!r}", where=where, fix="write a string or an integer")
    return "" if value is None else str(value)


def string_list(value: object, where: str) -> tuple[str, ...]:
    """A value that must be a list of strings; numbers in it are converted."""
    items = value if isinstance(value, list | tuple) else None
    if items is None or any(not isinstance(item, str | int | float) for item in items):
        problem = f"found {repr(value)[:60]}, a {type(value).__name__}"
        raise DataError(problem, where=where, fix="write a list of strings, such as ['Paris']")
    return tuple(map(str, items))


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
        while (numbered := waiting.popleft() if waiting else next(lines, None)) is not None:
            taken.append(numbered)
            yield numbered[1]

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


def tagged_blocks(path: FilePath, tag: str) -> Iterator[tuple[int, str]]:
    """Yields (first line, content) of each <tag>...</tag> of TREC, on lines of their own."""
    start, lines = 0, list[str]()
    for line, content in numbered_lines(path):
        word = content.strip().lower()
        if re.match(rf"<{tag}\b", word):
            start, lines = line, []
        elif word == f"</{tag}>":
            yield start, "".join(lines)
        else:
            lines.append(content)


def wrong_columns(where: str, count: int, expected: str) -> DataError:
    """The error for a row of too few or too many columns."""
    fix = "check for a missing tab, tabs or newlines within a text, or a quote left open"
    return DataError(f"{count} columns, not {expected}", where=where, fix=fix)


_DELIMITERS = "\t,;|"


class Role(enum.Enum):
    """What a field holds; the value lists the names that it goes by, the usual one first."""

    ID = "id _id docid doc_id pid docno document_id"
    TITLE = "title heading headline subject name"
    TEXT = "text passage body content contents document abstract context definition"
    PAGE = "wikipedia_id page_id"
    PARAGRAPH = "paragraph_id"
    QUESTION = "question query anchor claim"
    ANSWERS = "answers answer response"
    POSITIVE = "positive positives pos positive_passages positive_ctxs"
    NEGATIVE = "negative negatives neg hard_negatives hard_negative hard_negative_ctxs"
    OTHER_NEGATIVE = "negative_ctxs"
    QUERY_ID = "query_id qid question_id topic_id topic"
    PASSAGE_ID = "passage_id corpus_id"
    RELEVANCE = "relevance score grade label rel judgment"

    @property
    def names(self) -> list[str]:
        """The names, the usual one first."""
        return self.value.split()


def roles_of(names: Iterable[str]) -> dict[Role, list[str]]:
    """The fields of each role.

    Example:
        >>> roles_of(["Query", "negative_1", "negative_2", "x"])[Role.NEGATIVE]
        ['negative_1', 'negative_2']
    """
    return _roles(tuple(names))


# Records of a file have few sets of fields.
@functools.lru_cache(maxsize=1024)
def _roles(names: tuple[str, ...]) -> dict[Role, list[str]]:
    names_of_role: dict[Role, list[str]] = {}
    for name in names:
        plain = re.sub(r"[\s-]+", "_", name.strip().lower())
        plain = re.sub(r"(?<=[a-z])_?\d+$", "", plain)
        for role in Role:
            if plain in role.names:
                names_of_role.setdefault(role, []).append(name)
    return names_of_role


def is_header(columns: Collection[str]) -> bool:
    """Whether a table's first row names its columns: two of them at least, by known names."""
    return sum(map(len, roles_of(columns).values())) >= 2


def first_of(record: Mapping[str, object], *roles: Role) -> str | None:
    """The field of the first of these roles that a record has; the usual name goes first."""
    names_of_role = roles_of(record)
    for role in roles:
        if names := names_of_role.get(role):
            return min(names, key=lambda name: name != role.names[0])
    return None


def content_id(title: str, text: str) -> str:
    """An id made of the content, so that equal passages without ids are one."""
    return f"{text_hash(normalized_content(title, text)):016x}"


def quoted_passages(record: Mapping[str, object], role: Role, where: str) -> tuple[Passage, ...]:
    """The passages that a record quotes in the fields of a role: texts, or {text, title}.

    Raises:
        DataError: a value that is neither.
    """
    contexts = []
    for name in roles_of(record).get(role, ()):
        value, at = record[name], f"{where}, field {name!r}"
        for quoted in value if isinstance(value, list) else [value]:
            parts = quoted if isinstance(quoted, dict) else {"text": quoted}
            text, title = parts.get("text") or "", parts.get("title") or ""
            if not isinstance(text, str) or not isinstance(title, str):
                fix = "write a text, a list of texts, or {text, title}"
                raise DataError(f"found {quoted!r}", where=at, fix=fix)
            if role is Role.TEXT and (field := first_of(record, Role.TITLE)):
                title = str(record[field] or "")
            id = id_field(parts, "passage_id", at) or id_field(parts, "psg_id", at)
            if id or text.strip() or title.strip():
                contexts.append(Passage(id or content_id(title, text), text, title))
    return tuple(contexts)


def positives(record: Mapping[str, object], where: str) -> tuple[Passage, ...]:
    """The passages that answer a record's question: its positives, or else its text or answer."""
    for role in (Role.POSITIVE, Role.TEXT, Role.ANSWERS):
        if contexts := quoted_passages(record, role, where):
            return contexts
    return ()


def is_undefined_term(record: Mapping[str, object]) -> bool:
    """Whether a record is a thesaurus's term without a definition, which says nothing."""
    is_term = "name" in record and first_of(record, Role.TEXT) in ("definition", None)
    return is_term and not str(record.get("definition") or "").strip()


def is_pair(names: Iterable[str]) -> bool:
    """Whether records of these fields quote the passages of their questions."""
    roles = roles_of(names)
    quoting = (Role.POSITIVE, Role.TEXT, Role.ANSWERS)
    return Role.QUESTION in roles and any(role in roles for role in quoting)


def is_judgement(names: Collection[str]) -> bool:
    """Whether records of these fields judge passages by their ids."""
    roles = roles_of(names).keys()
    by_id = Role.PASSAGE_ID in roles or {Role.QUERY_ID, Role.ID} <= roles
    # With ranks or texts, scores are a system's.
    return by_id and Role.RELEVANCE in roles and Role.TEXT not in roles and "rank" not in names


def is_json(path: FilePath) -> bool:
    """Whether the name is that of a JSON or JSON-lines file, gzipped or not."""
    return os.fspath(path).removesuffix(".gz").endswith((".json", ".jsonl"))


def read_records(path: FilePath) -> Iterator[tuple[int, dict[str, object]]] | None:
    """Yields (line, field -> value) of JSON, Parquet, Arrow, or a table with a header; else None.

    Columns of a table are separated by tabs, commas, semicolons or bars, whichever makes the first
    row a header.

    Raises:
        DataError: malformed input; names file:line and the fix.
    """
    if is_json(path):
        return json_records(path)
    if os.fspath(path).endswith((".parquet", ".arrow")):
        return _arrow(path)
    for delimiter in _DELIMITERS:
        _, header = next(quoted_rows(path, delimiter), (0, []))
        if is_header(header):
            return _table(path, delimiter)
    return None


def read_qrels(path: FilePath) -> Iterator[Judgement]:
    """Relevance judgements in TREC's columns, or in those that a header names, as in BEIR's files.

    TREC: query id, iteration (ignored), passage id, grade, separated by white space.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Judgements in the file's order, those of grade 0 included.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, query_id, passage_id, grade in _judged(path):
        where = f"{os.fspath(path)}:{line}"
        try:
            relevance = int(np.int32(grade))
        except (ValueError, OverflowError) as error:
            fix = "write an integer of 32 bits"
            problem = f"the grade is {grade!r}"
            raise DataError(problem, where=f"{where}, last column", fix=fix) from error
        yield Judgement(where, query_id, passage_id, relevance)


def _judged(path: FilePath) -> Iterator[tuple[int, str, str, str]]:
    """Line, query, passage and grade."""
    if (records := read_records(path)) is not None:
        for line, record in records:
            query = first_of(record, Role.QUERY_ID, Role.QUESTION)
            passage = first_of(record, Role.PASSAGE_ID, Role.ID)
            grade = first_of(record, Role.RELEVANCE)
            if query is None or passage is None or grade is None:
                problem = f"its columns are {', '.join(record)}"
                fix = "name them query-id, corpus-id and score"
                raise DataError(problem, where=f"{os.fspath(path)}:1", fix=fix)
            yield line, str(record[query]), str(record[passage]), str(record[grade])
        return
    for line, content in numbered_lines(path):
        columns = content.split()
        if columns and len(columns) != 4:
            expected = "TREC's 4, query id, 0, passage id and grade, nor named by a header"
            raise wrong_columns(f"{os.fspath(path)}:{line}", len(columns), expected)
        if columns:
            yield line, columns[0], columns[2], columns[3]


def _table(path: FilePath, delimiter: str) -> Iterator[tuple[int, dict[str, object]]]:
    rows = quoted_rows(path, delimiter)
    header = [name.strip() for name in next(rows)[1]]
    for line, row in rows:
        if len(row) != len(header):
            expected = f"{len(header)}: {', '.join(header)}"
            raise wrong_columns(f"{os.fspath(path)}:{line}", len(row), expected)
        yield line, dict(zip(header, row, strict=True))


def _arrow(path: FilePath) -> Iterator[tuple[int, dict[str, object]]]:
    """Rows of a Parquet file, or of an Arrow file as Hugging Face's `datasets` writes it."""
    import pyarrow.parquet

    try:
        rows = 0
        if os.fspath(path).endswith(".arrow"):
            batches = iter(pyarrow.ipc.open_stream(pyarrow.memory_map(os.fspath(path))))
        else:
            batches = pyarrow.parquet.ParquetFile(os.fspath(path)).iter_batches()
        for batch in batches:
            for record in batch.to_pylist():
                rows += 1
                yield rows, record
    except (OSError, pyarrow.ArrowException) as error:
        fix = "copy the file again, or write it as JSON lines"
        raise DataError(f"no rows of Arrow: {error}", where=os.fspath(path), fix=fix) from error
