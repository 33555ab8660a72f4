"""KILT's formats: query JSONL, and the knowledge source JSONL, which is cut into passages.

Formats as published with Petroni et al., 2021.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping

import msgspec

from taser_jax.data.files import json_lines
from taser_jax.data.readers.located import (
    PARAGRAPH_END,
    LocatedPassage,
    Provenance,
    Question,
    Span,
)
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, check_id
from taser_jax.storage.typed_files import typed

# Words per passage of a page that is cut, as in DPR's and Maillard's passages.
PASSAGE_WORDS = 100
_SECTION = "Section::::"
_FIX_PAGE = "write {wikipedia_id, wikipedia_title, text: [paragraph, ...]}"
_FIX_QUERY = "write {id, input, output: [{answer, provenance: [{wikipedia_id, title, ...}]}]}"
# The answers of fact checking; no passage contains them as answers.
_VERDICTS = frozenset({"SUPPORTS", "REFUTES", "DISPUTED", "NOT ENOUGH INFO"})


class _Provenance(msgspec.Struct):
    wikipedia_id: str | int | None = None
    title: str | None = None
    passage_id: str | int | None = None
    start_paragraph_id: int | None = None
    end_paragraph_id: int | None = None
    start_character: int | None = None
    end_character: int | None = None


class _Output(msgspec.Struct):
    answer: str | None = None
    provenance: list[_Provenance] | None = None


class _Query(msgspec.Struct):
    input: str
    id: str | int = ""
    output: list[_Output] = []


class _Page(msgspec.Struct):
    text: list[str]
    wikipedia_title: str
    wikipedia_id: str | int | None = None
    _id: str | int | None = None


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
    record: Mapping[str, object]


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
        query = typed(record, _Query, where=where, fix=_FIX_QUERY)
        id = check_id(str(query.id), where=f"{where}, field 'id'")
        if id in line_of_id:
            problem = f"the id {id!r} was already used on line {line_of_id[id]}"
            fix = "remove the duplicate or rename it"
            raise DataError(problem, where=f"{where}, field 'id'", fix=fix)
        line_of_id[id] = line
        if not query.input.strip():
            where = f"{where}, field 'input'"
            raise DataError("the input is empty", where=where, fix="remove the line")
        outputs = tuple(
            _output(output, f"{where}, output[{i}].provenance")
            for i, output in enumerate(query.output)
        )
        yield KiltQuery(where, id, query.input, outputs, record)


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
        page = typed(record, _Page, where=where, fix=_FIX_PAGE)
        # Passages are named after their page.
        id = _id(page._id if page.wikipedia_id is None else page.wikipedia_id)
        check_id(id, where=f"{where}, field 'wikipedia_id'")
        yield Page(line, id, page.wikipedia_title, tuple(page.text))


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
    located_words = [
        (match.group(), (number, match.start()), (number, match.end()))
        for number, text in enumerate(page.paragraphs)
        if number and _SECTION not in text
        for match in re.finditer(r"\S+", text)
    ]
    for number, start in enumerate(range(0, len(located_words), words)):
        window = located_words[start : start + words]
        text = " ".join(word for word, _, _ in window)
        passage = Passage(f"{page.id}.{number}", text, page.title, page.id)
        yield LocatedPassage(page.line, passage, Span(window[0][1], window[-1][2]))


def _output(output: _Output, where: str) -> Output:
    if output.provenance is None:
        return Output(output.answer, None)
    places = enumerate(output.provenance)
    return Output(output.answer, tuple(_provenance(p, f"{where}[{i}]") for i, p in places))


def _provenance(place: _Provenance, where: str) -> Provenance:
    return Provenance(
        page_id=_id(place.wikipedia_id).strip(),
        title=place.title or "",
        passage_id=_id(place.passage_id),
        span=_span(place, where),
    )


def _id(value: str | int | None) -> str:
    return "" if value is None else str(value)


def _span(place: _Provenance, where: str) -> Span | None:
    first, last = _position(place.start_paragraph_id), _position(place.end_paragraph_id)
    if first is None:
        return None
    last = first if last is None else last
    if last < first:
        where = f"{where}, field 'end_paragraph_id'"
        raise DataError(f"paragraphs {first} to {last}", where=where, fix="exchange them")
    start, end = _position(place.start_character), _position(place.end_character)
    span = Span((first, start or 0), (last, PARAGRAPH_END if end is None else end))
    return span if span.start < span.end else span.whole_paragraphs()


def _position(number: int | None) -> int | None:
    """A paragraph or character; KILT writes -1 for an unknown one."""
    return None if number is None or number < 0 else number
