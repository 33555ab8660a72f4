"""KILT's formats: query JSONL, and the knowledge source JSONL, which is cut into passages.

Formats as published with Petroni et al., 2021.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from taser_jax.data.files import json_lines
from taser_jax.data.readers.located import (
    PARAGRAPH_END,
    LocatedPassage,
    Provenance,
    Question,
    Span,
    id_field,
    string_field,
)
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, check_id

# Words per passage of a page that is cut, as in DPR's and Maillard's passages.
PASSAGE_WORDS = 100
_SECTION = "Section::::"
# The answers of fact checking; no passage contains them as answers.
_VERDICTS = frozenset({"SUPPORTS", "REFUTES", "DISPUTED", "NOT ENOUGH INFO"})


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
        line: its line.
        id: the page's `wikipedia_id`.
        title: its `wikipedia_title`.
        paragraphs: its `text`; KILT's first paragraph is the title.
    """

    line: int
    id: str
    title: str
    paragraphs: tuple[str, ...]


def read_queries(path: FilePath) -> Iterator[KiltQuery]:
    """Queries of a KILT file: one {id, input, output: [{answer, provenance: [...]}]} per line.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Queries in the file's order; those of blind test sets have no output.

    Raises:
        DataError: malformed input or a repeated id; names file:line, the field and the fix.
    """
    line_of_id: dict[str, int] = {}
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        id = check_id(id_field(record, "id", where=where), where=f"{where}, field 'id'")
        if id in line_of_id:
            found = f"the id {id!r} was already used on line {line_of_id[id]}"
            fix = "remove the duplicate or rename it"
            raise DataError(found, where=f"{where}, field 'id'", fix=fix)
        line_of_id[id] = line
        text = string_field(record, "input", where)
        if not text.strip():
            where = f"{where}, field 'input'"
            raise DataError("the input is empty", where=where, fix="remove the line")
        yield KiltQuery(where, id, text, _outputs(record, where), record)


def as_question(query: KiltQuery) -> Question:
    """A query as the question of any format; verdicts are no answers."""
    answers = [output.answer for output in query.outputs if output.answer]
    return Question(
        where=query.where,
        text=query.text,
        id=query.id,
        answers=tuple(answer for answer in dict.fromkeys(answers) if answer not in _VERDICTS),
        provenance=tuple(place for output in query.outputs for place in output.provenance or ()),
        record={**query.record, "id": query.id},
    )


def read_pages(path: FilePath) -> Iterator[Page]:
    """Pages of a knowledge source, {wikipedia_id, wikipedia_title, text: [paragraphs]} per line.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Pages in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        at = f"{where}, field 'wikipedia_id'"
        id = id_field(record, "wikipedia_id", "_id", where=where)
        if not id:
            raise DataError("no page id", where=at, fix="give each page its wikipedia_id")
        # Passages are named after their page.
        check_id(id, where=at)
        paragraphs = record.get("text")
        if not isinstance(paragraphs, list) or not all(isinstance(p, str) for p in paragraphs):
            found = f"found a {type(paragraphs).__name__}"
            fix = "write a list of paragraphs, each a string"
            raise DataError(found, where=f"{where}, field 'text'", fix=fix)
        title = string_field(record, "wikipedia_title", where)
        yield Page(line, id, title, tuple(paragraphs))


def chunk_page(page: Page, *, words: int = PASSAGE_WORDS) -> Iterator[LocatedPassage]:
    """Cuts a page into disjoint windows of its words, like DPR's and Maillard's passages.

    Passage ids are the page's id and a number: 12.0, 12.1, ...

    Example:
        A page 7 of the paragraphs "Bern", "Bern is a city." and "Bears live there.", at 5 words:
        7.0 "Bern is a city. Bears", 7.1 "live there."

    Args:
        page: the page; its first paragraph (the title) and its headings are skipped.
        words: words per passage, separated by white space.

    Yields:
        Passages with their positions in the page, in its order.
    """
    found = [
        (match.group(), (number, match.start()), (number, match.end()))
        for number, text in enumerate(page.paragraphs)
        if number and _SECTION not in text
        for match in re.finditer(r"\S+", text)
    ]
    for number, start in enumerate(range(0, len(found), words)):
        window = found[start : start + words]
        text = " ".join(word for word, _, _ in window)
        passage = Passage(f"{page.id}.{number}", text, page.title, page.id)
        yield LocatedPassage(page.line, passage, Span(window[0][1], window[-1][2]))


def _outputs(record: Mapping[str, Any], where: str) -> tuple[Output, ...]:
    outputs = _list_field(record, "output", where, fix="write a list of {answer, provenance}")
    return tuple(_output(item, f"{where}, output[{i}]") for i, item in enumerate(outputs or ()))


def _output(item: object, where: str) -> Output:
    if not isinstance(item, dict):
        found = f"found a {type(item).__name__}"
        raise DataError(found, where=where, fix="write {answer, provenance}")
    answer = item.get("answer")
    if answer is not None and not isinstance(answer, str):
        where = f"{where}, field 'answer'"
        raise DataError(f"found {answer!r}", where=where, fix="write a string")
    fix = "write a list of {wikipedia_id, title, ...}"
    places = _list_field(item, "provenance", where, fix=fix)
    if places is None:
        return Output(answer, None)
    provenance = (_provenance(one, f"{where}.provenance[{i}]") for i, one in enumerate(places))
    return Output(answer, tuple(provenance))


def _list_field(
    record: Mapping[str, Any], name: str, where: str, *, fix: str
) -> list[object] | None:
    value = record.get(name)
    if value is not None and not isinstance(value, list):
        where = f"{where}, field {name!r}"
        raise DataError(f"found a {type(value).__name__}", where=where, fix=fix)
    return value


def _provenance(item: object, where: str) -> Provenance:
    if not isinstance(item, dict):
        found = f"found a {type(item).__name__}"
        raise DataError(found, where=where, fix="write {wikipedia_id, title, ...}")
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
        where = f"{where}, field 'end_paragraph_id'"
        raise DataError(f"paragraphs {first} to {last}", where=where, fix="exchange them")
    start, end = _place(item, "start_character", where), _place(item, "end_character", where)
    span = Span((first, start or 0), (last, PARAGRAPH_END if end is None else end))
    return span if span.start < span.end else span.whole_paragraphs()


def _place(item: Mapping[str, Any], name: str, where: str) -> int | None:
    value = item.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        where = f"{where}, field {name!r}"
        raise DataError(f"found {value!r}", where=where, fix="write a whole number")
    # KILT writes -1 for an unknown position.
    return None if value is None or value < 0 else value
