"""KILT's formats: query JSONL, knowledge source JSONL, and passage TSV with page ids.

Formats as published with Petroni et al., 2021, and Maillard et al., 2021 (the TSV).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from taser_jax.data.files import json_lines
from taser_jax.data.id_index import RepeatFinder
from taser_jax.data.readers import dpr
from taser_jax.data.readers.located import checked_passages, id_field, string_field
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage, check_id

# Paragraph and character in it. A whole paragraph ends at this character.
Position = tuple[int, int]
PARAGRAPH_END = (1 << 31) - 1

_COLUMNS = ("id", "text", "title")
_PAGE = "wikipedia_id"
_PARAGRAPH = "paragraph_id"


class Outputs(enum.Enum):
    """Whether a query must have outputs; KILT's blind test sets have none."""

    REQUIRED = "required"
    OPTIONAL = "optional"


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


@dataclasses.dataclass(frozen=True, slots=True)
class KiltPassage:
    """A passage with its position in its page.

    Attributes:
        passage: with the page's id.
        span: its position in the page; None if the file does not give it.
    """

    passage: Passage
    span: Span | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Provenance:
    """The location of evidence for an output.

    Attributes:
        page_id: the Wikipedia page; empty if the file has null.
        title: the page's title.
        passage_id: id of the passage, if the file gives it (KILT's own files do not).
        span: paragraphs, and characters if given; None if only the page is known.
    """

    page_id: str
    title: str = ""
    passage_id: str = ""
    span: Span | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One correct output of a query.

    Attributes:
        answer: the answer, or None if the output has only provenance.
        provenance: the set of evidence for it; None if the field is absent.
    """

    answer: str | None
    provenance: tuple[Provenance, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class KiltQuery:
    """One line of a query file.

    Attributes:
        where: file:line it was read from.
        id: its id.
        text: the field `input`.
        outputs: the correct outputs.
        record: the original line, for writing it again.
    """

    where: str
    id: str
    text: str
    outputs: tuple[Output, ...]
    record: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """One line of a knowledge source.

    Attributes:
        where: file:line it was read from.
        id: the page's `wikipedia_id`.
        title: its `wikipedia_title`.
        paragraphs: its `text`; KILT's first paragraph is the title.
    """

    where: str
    id: str
    title: str
    paragraphs: tuple[str, ...]


def read_queries(path: FilePath, *, outputs: Outputs = Outputs.REQUIRED) -> Iterator[KiltQuery]:
    """Queries of a KILT file: one {id, input, output: [{answer, provenance: [...]}]} per line.

    Args:
        path: local or gs://, plain or `.gz`.
        outputs: whether a line without outputs is an error.

    Yields:
        Queries in the file's order.

    Raises:
        DataError: malformed input or a repeated id; names file:line, the field and the fix.
    """
    line_of_id: dict[str, int] = {}
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        id = id_field(record, "id", where=where)
        check_id(id, where=f"{where}, field 'id'")
        if id in line_of_id:
            raise DataError(
                f"the id {id!r} was already used on line {line_of_id[id]}",
                where=f"{where}, field 'id'",
                expected="a unique id for each query",
                fix="remove the duplicate or rename it",
            )
        line_of_id[id] = line
        text = string_field(record, "input", where)
        if not text.strip():
            raise DataError(
                "the input is empty",
                where=f"{where}, field 'input'",
                expected="the question, claim, mention or dialogue",
                fix="remove the line",
            )
        yield KiltQuery(where, id, text, _outputs(record, where, outputs), record)


def read_passages(
    path: FilePath, *, empty: EmptyPassages = EmptyPassages.ERROR
) -> Iterator[KiltPassage]:
    """Passages of a TSV with a header: id, text, title, the page's id, and optionally more.

    Maillard's files have six columns, of which the last two are unused here. kilt_mini has five;
    the last, paragraph_id, gives a passage's position in its page. The page's id is the column
    wikipedia_id, or else the fourth.

    Args:
        path: local or gs://, plain or `.gz`.
        empty: what to do with passages without text.

    Yields:
        Passages in the file's order, as they are read.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    places: list[Span | None] = [None]
    readings = itertools.count()

    def located() -> Iterator[tuple[int, Passage]]:
        # The checks may read the file again for a message, which must not move the current
        # position.
        current: list[Span | None] = places if next(readings) == 0 else [None]
        for line, one in _located_passages(path):
            current[0] = one.span
            yield line, one.passage

    for passage in checked_passages(path, located, empty):
        yield KiltPassage(passage, places[0])


def read_pages(path: FilePath) -> Iterator[Page]:
    """Pages of a knowledge source, {wikipedia_id, wikipedia_title, text: [paragraphs]} per line.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Pages in the file's order.

    Raises:
        DataError: malformed input or a repeated id; names file:line, the field and the fix.
    """
    finder = RepeatFinder()
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        id = id_field(record, "wikipedia_id", "_id", where=where)
        if not id:
            raise DataError(
                "no page id",
                where=f"{where}, field 'wikipedia_id'",
                expected="a KILT knowledge source: wikipedia_id, wikipedia_title, text",
                fix="if it is a file of passages, give it as PASSAGES, a TSV",
            )
        # Passages are named after their page.
        check_id(id, where=f"{where}, field 'wikipedia_id'")
        if (repeated := finder.add(id)) is not None:
            _raise_if_repeated(path, repeated)
        paragraphs = record.get("text")
        if not isinstance(paragraphs, list) or not all(isinstance(p, str) for p in paragraphs):
            raise DataError(
                f"found a {type(paragraphs).__name__}",
                where=f"{where}, field 'text'",
                expected="a list of paragraphs, each a string",
            )
        yield Page(where, id, string_field(record, "wikipedia_title", where), tuple(paragraphs))
    if (repeated := finder.flush()) is not None:
        _raise_if_repeated(path, repeated)


def _raise_if_repeated(path: FilePath, id: str) -> None:
    # Reached only before an error: the finder stores hashes, so the lines are searched again here.
    lines = [
        line
        for line, record in json_lines(path)
        if id_field(record, "wikipedia_id", "_id", where=f"{os.fspath(path)}:{line}") == id
    ]
    if len(lines) > 1:
        raise DataError(
            f"the page {id!r} is already on line {lines[0]}",
            where=f"{os.fspath(path)}:{lines[1]}, field 'wikipedia_id'",
            expected="each page once",
            fix="remove the duplicate",
        )


def _outputs(record: Mapping[str, Any], where: str, outputs: Outputs) -> tuple[Output, ...]:
    value = record.get("output")
    if value is not None and not isinstance(value, list):
        raise DataError(
            f"found a {type(value).__name__}",
            where=f"{where}, field 'output'",
            expected="a list of {answer, provenance}",
        )
    if not value:
        if outputs is Outputs.OPTIONAL:
            return ()
        raise DataError(
            "no output",
            where=f"{where}, field 'output'",
            expected="one or more of {answer, provenance}",
            fix="remove the line, or set outputs = 'optional' for a blind test set",
        )
    return tuple(_output(item, f"{where}, output[{i}]") for i, item in enumerate(value))


def _output(item: object, where: str) -> Output:
    if not isinstance(item, dict):
        raise DataError(
            f"found a {type(item).__name__}", where=where, expected="{answer, provenance}"
        )
    answer = item.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise DataError(f"found {answer!r}", where=f"{where}, field 'answer'", expected="a string")
    provenance = item.get("provenance")
    if provenance is None:
        return Output(answer, None)
    if not isinstance(provenance, list):
        raise DataError(
            f"found a {type(provenance).__name__}",
            where=f"{where}, field 'provenance'",
            expected="a list of {wikipedia_id, title, ...}",
        )
    return Output(
        answer,
        tuple(_provenance(one, f"{where}.provenance[{i}]") for i, one in enumerate(provenance)),
    )


def _provenance(item: object, where: str) -> Provenance:
    if not isinstance(item, dict):
        raise DataError(
            f"found a {type(item).__name__}", where=where, expected="{wikipedia_id, title, ...}"
        )
    title = item.get("title")
    return Provenance(
        page_id=id_field(item, "wikipedia_id", where=where).strip(),
        title="" if title is None else string_field(item, "title", where),
        passage_id=id_field(item, "passage_id", where=where),
        span=_span(item, where),
    )


def _span(item: Mapping[str, Any], where: str) -> Span | None:
    first, last = _place(item, "start_paragraph_id", where), _place(item, "end_paragraph_id", where)
    if first is None:
        return None
    last = first if last is None else last
    if last < first:
        raise DataError(
            f"paragraphs {first} to {last}",
            where=f"{where}, field 'end_paragraph_id'",
            expected="a paragraph not before start_paragraph_id",
        )
    start, end = _place(item, "start_character", where), _place(item, "end_character", where)
    span = Span((first, start or 0), (last, PARAGRAPH_END if end is None else end))
    return span if span.start < span.end else span.whole_paragraphs()


def _place(item: Mapping[str, Any], name: str, where: str) -> int | None:
    value = item.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DataError(
            f"found {value!r}", where=f"{where}, field {name!r}", expected="a whole number"
        )
    # KILT writes -1 for an unknown position.
    return None if value is None or value < 0 else value


def _located_passages(path: FilePath) -> Iterator[tuple[int, KiltPassage]]:
    rows = dpr.csv_rows(path)
    header_line, header = next(rows, (1, []))
    header = [name.strip() for name in header]
    if len(header) < 4 or any(name not in header[:4] for name in _COLUMNS):
        raise DataError(
            f"columns {', '.join(header)[:120]}",
            where=f"{os.fspath(path)}:{header_line}",
            expected="a first line naming tab-separated columns id, text, title, wikipedia_id "
            "and optionally more",
            fix="add the header and the page's id, or prepare the file with `taser prepare dpr`",
        )
    id_at, text_at, title_at = (header.index(name) for name in _COLUMNS)
    page_at = header.index(_PAGE) if _PAGE in header else 3
    paragraph_at = header.index(_PARAGRAPH) if _PARAGRAPH in header else None
    for line, row in rows:
        where = f"{os.fspath(path)}:{line}"
        if len(row) != len(header):
            raise DataError(
                f"{len(row)} tab-separated columns",
                where=where,
                expected=f"{len(header)}: {', '.join(header)}",
                fix="check for a missing tab, or an opening quote that is not closed",
            )
        page = row[page_at].strip()
        if not page:
            raise DataError(
                "the page's id is empty",
                where=f"{where}, field {header[page_at]!r}",
                expected="the wikipedia_id that provenance refers to",
            )
        span = None if paragraph_at is None else _paragraph_span(row[paragraph_at], where)
        yield line, KiltPassage(Passage(row[id_at], row[text_at], row[title_at], page), span)


def _paragraph_span(text: str, where: str) -> Span:
    if not text.strip().isdecimal():
        raise DataError(
            f"found {text!r}", where=f"{where}, field {_PARAGRAPH!r}", expected="a whole number"
        )
    return Span((int(text), 0), (int(text), PARAGRAPH_END))
