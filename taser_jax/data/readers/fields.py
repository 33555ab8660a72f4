"""Records of files by the names of their fields: tables, JSON, Parquet; judgements."""

from __future__ import annotations

import csv
import dataclasses
import enum
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

import msgspec
import numpy as np

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, normalized_content, text_hash
from taser_jax.storage.typed_files import typed

T = TypeVar("T")
Record = Mapping[str, object]
# A longer column means an unclosed quote that swallowed the following lines.
_LONGEST_FIELD = 1 << 24
_DELIMITERS = "\t,;|"
# Paragraph and character in it. A whole paragraph ends at this character.
Position = tuple[int, int]
PARAGRAPH_END = (1 << 31) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """One line of a qrels file.

    Attributes:
        where: file:line it was read from.
        query_id: the query.
        passage_id: the judged passage.
        relevance: grade; 0 and below mean not relevant.
    """

    where: str
    query_id: str
    passage_id: str
    relevance: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A piece of a page, from `start` up to but excluding `end`.

    Attributes:
        start: paragraph and character of the first character.
        end: paragraph and character after the last one.
    """

    start: Position
    end: Position

    def overlaps(self, other: Span) -> bool:
        """Whether the two spans share a character."""
        return self.start < other.end and other.start < self.end

    def whole_paragraphs(self) -> Span:
        """The paragraphs that the span touches."""
        return Span((self.start[0], 0), (self.end[0], PARAGRAPH_END))


class _Quoted(msgspec.Struct):
    """A passage that a record quotes: DPR's context, or a text alone."""

    text: str = ""
    title: str = ""
    passage_id: str | int = ""
    psg_id: str | int = ""


def placed(path: FilePath, numbered: Iterable[tuple[int, T]]) -> Iterator[tuple[str, T]]:
    """Yields (file:line, item) of (line number, item)."""
    return ((f"{os.fspath(path)}:{line}", item) for line, item in numbered)


def plain_rows(path: FilePath) -> Iterator[tuple[str, list[str]]]:
    """Yields (file:line, columns): tab-separated, a quote is an ordinary character."""
    for where, content in placed(path, numbered_lines(path)):
        if content := content.rstrip("\r\n"):
            yield where, content.split("\t")


def quoted_rows(path: FilePath, delimiter: str = "\t") -> Iterator[tuple[str, list[str]]]:
    """Yields (file:line of a row's beginning, columns), with csv's double quotes.

    A quoted column may span lines. A line whose quotes are not csv's is taken as it is.

    Example:
        A column `"a ""b"" c"` is `a "b" c`, and `"a" b`, which is none of csv's, is `"a" b`.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    lines = placed(path, numbered_lines(path))
    while True:
        lines, start = itertools.tee(lines)
        contents = (content for _, content in lines)
        try:
            row = next(csv.reader(contents, delimiter=delimiter, strict=True), None)
        except csv.Error:
            lines, start = itertools.tee(start)
            row = next(lines)[1].rstrip("\r\n").split(delimiter)
        if row is None:
            return
        if row:
            yield next(start)[0], row


def tagged_blocks(path: FilePath, tag: str) -> Iterator[tuple[str, str]]:
    """Yields (file:line, content) of each <tag>...</tag> of TREC, on lines of their own."""
    start, lines = "", list[str]()
    for where, content in placed(path, numbered_lines(path)):
        word = content.strip().lower()
        if re.match(rf"<{tag}\b", word):
            start, lines = where, []
        elif word == f"</{tag}>":
            yield start, "".join(lines)
        else:
            lines.append(content)


def xml_elements(path: FilePath, *tags: str) -> Iterator[tuple[str, Element]]:
    """Yields (file:line of its end, element) of these tags; what has been read is emptied.

    Raises:
        DataError: XML that is malformed or cut off, or that declares entities, which a few lines
            can make as large as the memory.
    """
    parser: XMLPullParser[Element] = XMLPullParser(["end"])
    where = os.fspath(path)
    try:
        for where, content in placed(path, numbered_lines(path)):
            if "<!ENTITY" in content:
                fix = "write what they stand for in their places, and remove <!ENTITY ...>"
                raise DataError("it declares entities", where=where, fix=fix)
            parser.feed(content)
            for event in parser.read_events():
                element = event[-1]
                assert isinstance(element, Element)
                if element.tag in tags:
                    yield where, element
                    # Millions of elements would fill the memory.
                    element.clear()
        parser.close()
    except ParseError as error:
        fix = "correct it (& in a text is &amp;), or copy the file again"
        raise DataError(f"not complete XML: {error}", where=where, fix=fix) from error


def wrong_columns(where: str, count: int, expected: str) -> DataError:
    """The error for a row of too few or too many columns."""
    fix = "check for a missing tab, tabs or newlines within a text, or a quote left open"
    return DataError(f"{count} columns, not {expected}", where=where, fix=fix)


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


def roles_of(names: Iterable[str]) -> dict[Role, list[str]]:
    """The fields of each role, those of the usual name first.

    Example:
        >>> roles_of(["Query", "negative_1", "negative_2", "x"])[Role.NEGATIVE]
        ['negative_1', 'negative_2']
    """
    return _roles(tuple(names))


# Records of a file have few sets of fields.
@functools.lru_cache(maxsize=1024)
def _roles(names: tuple[str, ...]) -> dict[Role, list[str]]:
    plain = {name: re.sub(r"[\s-]+", "_", name.strip().lower()) for name in names}
    plain = {name: re.sub(r"(?<=[a-z])_?\d+$", "", word) for name, word in plain.items()}
    fields = {
        role: [name for usual in role.value.split() for name in names if plain[name] == usual]
        for role in Role
    }
    return {role: of_role for role, of_role in fields.items() if of_role}


def first_of(record: Record, *roles: Role) -> str | None:
    """The field of the first of these roles that a record has; the usual name goes first."""
    names_of_role = roles_of(record)
    return next((names_of_role[role][0] for role in roles if role in names_of_role), None)


def string_of(record: Record, where: str, *roles: Role) -> str:
    """The field of the first of these roles as a string, integers too; empty if there is none.

    Raises:
        DataError: another value; names the field and the fix.
    """
    name = first_of(record, *roles)
    value = None if name is None else record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        where = f"{where}, field {name!r}"
        raise DataError(f"found {value!r}", where=where, fix="write a string or an integer")
    return "" if value is None else str(value)


def content_id(title: str, text: str) -> str:
    """An id made of the content, so that equal passages without ids are one."""
    return f"{text_hash(normalized_content(title, text)):016x}"


def quoted_passages(record: Record, role: Role, where: str) -> tuple[Passage, ...]:
    """The passages that a record quotes in the fields of a role: texts, or {text, title}.

    Raises:
        DataError: a value that is neither.
    """
    fix = "write a text, a list of texts, or {text, title}"
    contexts = []
    for name in roles_of(record).get(role, ()):
        value: Any = record[name]
        for content in value if isinstance(value, list) else [value]:
            parts = content if isinstance(content, dict) else {"text": content}
            quoted = typed(parts, _Quoted, where=f"{where}, field {name!r}", fix=fix)
            text, title = quoted.text, quoted.title
            if role is Role.TEXT and (field := first_of(record, Role.TITLE)):
                title = str(record[field] or "")
            id = str(quoted.passage_id) or str(quoted.psg_id)
            if id or text.strip() or title.strip():
                contexts.append(Passage(id or content_id(title, text), text, title))
    return tuple(contexts)


def positives(record: Record, where: str) -> tuple[Passage, ...]:
    """The passages that answer a record's question: its positives, or else its text or answer."""
    for role in (Role.POSITIVE, Role.TEXT, Role.ANSWERS):
        if contexts := quoted_passages(record, role, where):
            return contexts
    return ()


def is_undefined_term(record: Record) -> bool:
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


def read_records(path: FilePath) -> Iterator[tuple[str, dict[str, object]]] | None:
    """(file:line, field -> value) of JSON, Parquet, Arrow, or a table with a header; else None.

    Columns of a table are separated by tabs, commas, semicolons or bars, whichever makes the first
    row a header.

    Raises:
        DataError: malformed input; names file:line and the fix.
    """
    if is_json(path):
        return placed(path, json_records(path))
    if os.fspath(path).endswith((".parquet", ".arrow")):
        return placed(path, enumerate(_arrow(path), start=1))
    for delimiter in _DELIMITERS:
        _, header = next(quoted_rows(path, delimiter), ("", []))
        # A header has two names at least that are known.
        if sum(map(len, roles_of(header).values())) >= 2:
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
    records = read_records(path)
    for where, record in _trec_judgements(path) if records is None else records:
        query = first_of(record, Role.QUERY_ID, Role.QUESTION)
        passage = first_of(record, Role.PASSAGE_ID, Role.ID)
        grade = first_of(record, Role.RELEVANCE)
        if query is None or passage is None or grade is None:
            problem = f"its columns are {', '.join(record)}"
            fix = "name them query-id, corpus-id and score"
            raise DataError(problem, where=where, fix=fix)
        try:
            relevance = int(np.int32(str(record[grade])))
        except (ValueError, OverflowError) as error:
            fix = "write an integer of 32 bits"
            problem = f"the grade is {record[grade]!r}"
            raise DataError(problem, where=where, fix=fix) from error
        yield Judgement(where, str(record[query]), str(record[passage]), relevance)


def _trec_judgements(path: FilePath) -> Iterator[tuple[str, dict[str, object]]]:
    for where, content in placed(path, numbered_lines(path)):
        columns = content.split()
        if columns and len(columns) != 4:
            expected = "TREC's 4, query id, 0, passage id and grade, nor named by a header"
            raise wrong_columns(where, len(columns), expected)
        if columns:
            yield where, {"query-id": columns[0], "corpus-id": columns[2], "score": columns[3]}


def _table(path: FilePath, delimiter: str) -> Iterator[tuple[str, dict[str, object]]]:
    rows = quoted_rows(path, delimiter)
    where, header = next(rows)
    header = [name.strip() for name in header]
    # Spreadsheets write empty columns, too.
    if len(names := list(filter(None, header))) > len(set(names)):
        problem = f"two columns have one name: {', '.join(names)}"
        raise DataError(problem, where=where, fix="rename or remove one of them")
    for where, row in rows:
        if len(row) != len(header):
            raise wrong_columns(where, len(row), f"{len(header)}: {', '.join(header)}")
        yield where, dict(zip(header, row, strict=True))


# Ends the name of a file that is one of several: "-00000-of-00003".
SHARD = re.compile(r"-\d{5}(-of-\d{5})$")


def first_shard(path: pathlib.Path) -> pathlib.Path:
    """The first of the files that a table is divided into; otherwise the file itself.

    Example:
        train-00001-of-00002.parquet goes with train-00000-of-00002.parquet.
    """
    return path.with_stem(SHARD.sub(r"-00000\1", path.stem))


def _arrow(path: FilePath) -> Iterator[dict[str, object]]:
    """Rows of a Parquet file, or of an Arrow file as Hugging Face's `datasets` writes it.

    A first shard stands for all.
    """
    import pyarrow.parquet

    file = pathlib.Path(path)
    shards = [each for each in sorted(file.parent.glob("*")) if first_shard(each) == file]
    for shard in map(os.fspath, shards or [file]):
        batches: Iterable[Any]
        try:
            if shard.endswith(".arrow"):
                batches = pyarrow.ipc.open_stream(pyarrow.memory_map(shard))
            else:
                batches = pyarrow.parquet.ParquetFile(shard).iter_batches()
            for batch in batches:
                yield from batch.to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            fix = "copy the file again, or write it as JSON lines"
            raise DataError(f"no rows of Arrow: {error}", where=shard, fix=fix) from error
