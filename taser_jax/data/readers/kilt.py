"""KILT's formats: query JSONL, and the knowledge source JSONL, which is cut into passages.

Formats as published with Petroni et al., 2021.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import msgspec

from taser_jax.data.files import json_lines
from taser_jax.data.readers.located import LocatedPassage, Output, Question, Span
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


class _Query(msgspec.Struct):
    input: str
    id: str | int = ""
    output: tuple[Output, ...] = ()


class Page(msgspec.Struct):
    """One line of a knowledge source; KILT's first paragraph is the title."""

    text: list[str]
    wikipedia_title: str
    wikipedia_id: str | int | None = None
    _id: str | int | None = None


def read_queries(path: FilePath) -> Iterator[Question]:
    """Queries of a KILT file: one {id, input, output: [{answer, provenance: [...]}]} per line.

    Verdicts are no answers.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Queries in the file's order; those of blind test sets have no output.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        query = typed(record, _Query, where=where, fix=_FIX_QUERY)
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


def read_pages(path: FilePath, *, words: int = PASSAGE_WORDS) -> Iterator[LocatedPassage]:
    """Passages of a knowledge source, {wikipedia_id, wikipedia_title, text: [paragraphs]} per line.

    Args:
        path: local or gs://, plain or `.gz`.
        words: words per passage.

    Yields:
        The windows of each page (`chunk_page`), in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        page = typed(record, Page, where=where, fix=_FIX_PAGE)
        # Passages are named after their page.
        id = page._id if page.wikipedia_id is None else page.wikipedia_id
        check_id("" if id is None else str(id), where=f"{where}, field 'wikipedia_id'")
        for number, (text, span) in enumerate(chunk_page(page.text, words=words)):
            passage = Passage(f"{id}.{number}", text, page.wikipedia_title, str(id))
            yield LocatedPassage(line, passage, span)


def chunk_page(paragraphs: list[str], *, words: int) -> Iterator[tuple[str, Span]]:
    """Cuts a page into disjoint windows of its words, like DPR's and Maillard's passages.

    Example:
        The paragraphs "Bern", "Bern is a city." and "Bears live there.", at 5 words, give
        "Bern is a city. Bears" and "live there."

    Args:
        paragraphs: of the page; the first (the title) and the headings are skipped.
        words: words per passage, separated by white space.

    Yields:
        Texts with their positions in the page, in its order.
    """
    located_words = [
        (match.group(), (number, match.start()), (number, match.end()))
        for number, text in enumerate(paragraphs)
        if number and _SECTION not in text
        for match in re.finditer(r"\S+", text)
    ]
    for start in range(0, len(located_words), words):
        window = located_words[start : start + words]
        text = " ".join(word for word, _, _ in window)
        yield text, Span(window[0][1], window[-1][2])
