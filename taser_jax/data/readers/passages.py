"""Passages of any format: tables, JSON lines, Parquet, TREC, thesauri, pages and text files."""

from __future__ import annotations

import dataclasses
import html.parser
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

import msgspec

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.readers import fields
from taser_jax.data.readers.located import PARAGRAPH_END, LeftOut, LocatedPassage, Span
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, check_id
from taser_jax.storage.typed_files import typed

# Words per passage of what is cut, as in DPR's and Maillard's passages.
PASSAGE_WORDS = 100
# Rows of a table without a header in which titles and texts are compared.
_COMPARED = 100
TEXT_SUFFIXES = (".txt", ".md", ".html", ".htm")
_SECTION = "Section::::"
_IDS = (fields.Role.ID, fields.Role.PASSAGE_ID)
_FIX_PAGE = "write {wikipedia_id, wikipedia_title, text: [paragraph, ...]}"


def read_passages(
    path: FilePath, left_out: LeftOut | None = None, *, words: int = PASSAGE_WORDS
) -> Iterator[LocatedPassage]:
    r"""Passages of a file or folder, whose name and first line decide how it is read.

    A table with a header that names the column text, in any place, and optionally id, title,
    wikipedia_id or page_id (else, as in Maillard's files, the fourth of six, if a number) and
    paragraph_id, or synonyms of these (`fields.Role`). Columns are separated by tabs, commas or
    semicolons, with csv's double quotes. JSON lines and Parquet have the same fields. Without ids,
    passages are numbered.

    A table without a header: id, text and optionally title, separated by tabs. A quote is an
    ordinary character, as in MS MARCO's files.

    Questions with passages, anchor/positive/negative or question/answer: each passage once.

    TREC's documents, <DOC> with <DOCNO>.

    Thesauri, of name and definition; terms without one say nothing and are skipped. MeSH's XML:
    a concept's name and scope note (MoMA, arXiv 2302.03754, appendix).

    KILT's knowledge source, which is cut into passages of `words` (`chunk_page`).

    A folder of .txt, .md and .html, also cut: title from the first heading, or the file's name.

    Args:
        path: local or gs://, plain or `.gz`; a folder must be local.
        left_out: takes what is left out; None refuses it.
        words: words per passage of what is cut.

    Yields:
        Passages in the file's order, as they are read. A title alone is a passage.

    Raises:
        DataError: malformed input, an id that run files cannot hold or that two texts have, or no
            passage; names file:line, the field and the fix.
    """
    left_out = left_out or LeftOut(strict=True)
    # Hashes take less memory than texts.
    content_of_id: dict[str, int] = {}
    for read in _located(path, words):
        passage, where = read.passage, f"{os.fspath(path)}:{read.line}, field"
        check_id(passage.id, where=f"{where} 'id'")
        content = content_of_id.get(passage.id)
        if content is not None:
            problem = f"the id {passage.id!r} was already used"
            fix = "remove the duplicate or rename it"
            error = DataError(problem, where=f"{where} 'id'", fix=fix)
            if content != hash(passage):
                raise error
            left_out.add("repeated passages", error)
            continue
        content_of_id[passage.id] = hash(passage)
        if passage.text.strip() or passage.title.strip():
            yield read
        else:
            fix = "remove it, or leave out --strict, which skips it"
            error = DataError("it is empty", where=f"{where} 'text'", fix=fix)
            left_out.add("empty passages", error)
    if not content_of_id:
        fix = (
            "check that it is the right file; terms need a definition, MeSH's concepts a ScopeNote"
        )
        raise DataError("there is no passage in it", where=os.fspath(path), fix=fix)


def _located(path: FilePath, words: int) -> Iterator[LocatedPassage]:
    name = os.fspath(path).removesuffix(".gz")
    if os.path.isdir(path):
        yield from _of_texts(pathlib.Path(path), words)
    elif (records := fields.read_records(path)) is not None:
        yield from _of_records(path, records, words)
    elif next(numbered_lines(path), (0, ""))[1].strip().upper() == "<DOC>":
        yield from _of_trec(path)
    elif name.endswith(".xml"):
        yield from _scope_notes(path)
    else:
        yield from _of_columns(path)


def _of_records(
    path: FilePath, records: Iterator[tuple[int, dict[str, object]]], words: int
) -> Iterator[LocatedPassage]:
    first = next(records, (0, {}))
    if fields.is_json(path) and isinstance(first[1].get("text"), list):
        yield from _of_pages(path, words)
        return
    located = itertools.chain([first] if first[1] else [], records)
    if fields.is_pair(first[1]):
        yield from _of_pairs(path, located)
        return
    has_ids = fields.first_of(first[1], *_IDS) is not None
    for number, (line, record) in enumerate(located):
        if fields.is_undefined_term(record):
            continue
        where = f"{os.fspath(path)}:{line}"
        passage = passage_of(record, where)
        if not has_ids:
            passage = dataclasses.replace(passage, id=str(number))
        paragraph = fields.first_of(record, fields.Role.PARAGRAPH)
        span = _paragraph_span(str(record[paragraph]), where) if paragraph else None
        yield LocatedPassage(line, passage, span)


def passage_of(record: Mapping[str, object], where: str) -> Passage:
    """A record's id (empty where it has none), text, title and page, by the names of its fields.

    Raises:
        DataError: no text, or a field that is no string.
    """
    id = fields.id_field(record, fields.first_of(record, *_IDS), where)
    text = fields.string_field(record, fields.first_of(record, fields.Role.TEXT) or "text", where)
    page = _optional(record, fields.Role.PAGE, where) or _maillard(record)
    return Passage(id, text, _optional(record, fields.Role.TITLE, where), page.strip())


def _optional(record: Mapping[str, object], role: fields.Role, where: str) -> str:
    name = fields.first_of(record, role)
    return "" if name is None or record[name] is None else fields.string_field(record, name, where)


def _maillard(record: Mapping[str, object]) -> str:
    """The page of Maillard's six columns: the fourth, whatever its name, if it is a number."""
    values = list(record.values())
    if len(values) != 6 or list(record)[:3] != ["id", "text", "title"]:
        return ""
    # Other people's fourth field is a language, say: no page that passages share.
    page = str(values[3]).strip()
    return page if page.isdecimal() else ""


def _of_pairs(
    path: FilePath, records: Iterator[tuple[int, dict[str, object]]]
) -> Iterator[LocatedPassage]:
    seen = set()
    for line, record in records:
        where = f"{os.fspath(path)}:{line}"
        for context in (
            *fields.positives(record, where),
            *fields.quoted_passages(record, fields.Role.NEGATIVE, where),
        ):
            if context.id not in seen:
                seen.add(context.id)
                yield LocatedPassage(line, context)


class _KiltPage(msgspec.Struct):
    """One line of a knowledge source; KILT's first paragraph is the title."""

    text: list[str]
    wikipedia_title: str
    wikipedia_id: str | int | None = None
    _id: str | int | None = None


def _of_pages(path: FilePath, words: int) -> Iterator[LocatedPassage]:
    """The windows of each page (`chunk_page`) of a knowledge source."""
    for line, record in json_records(path):
        where = f"{os.fspath(path)}:{line}"
        page = typed(record, _KiltPage, where=where, fix=_FIX_PAGE)
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


def _of_columns(path: FilePath) -> Iterator[LocatedPassage]:
    rows = fields.plain_rows(path)
    compared = list(itertools.islice(rows, _COMPARED))
    if sum(len(text) < len(title) for _, (_, text, title) in _threes(compared)) > len(compared) / 2:
        problem = "its third column, the title, is longer than the second, the text"
        fix = "name the columns in a first line, such as id<tab>title<tab>text"
        raise DataError(problem, where=os.fspath(path), fix=fix)
    for line, columns in itertools.chain(compared, rows):
        if len(columns) not in (2, 3):
            expected = "2 or 3: id, text and optionally title"
            raise fields.wrong_columns(f"{os.fspath(path)}:{line}", len(columns), expected)
        yield LocatedPassage(line, Passage(*columns))


def _threes(rows: list[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    return ((line, columns) for line, columns in rows if len(columns) == 3)


def _of_trec(path: FilePath) -> Iterator[LocatedPassage]:
    """Documents of TREC's SGML; the text is what is left without tags."""
    for line, document in fields.tagged_blocks(path, "doc"):
        id = _tagged(document, "DOCNO")
        title = _tagged(document, "TITLE|HEADLINE|HEAD|TI")
        body = re.sub(r"(?is)<(DOCNO|TITLE|HEADLINE|HEAD|TI)>.*?</\1>|<[^>]*>", " ", document)
        yield LocatedPassage(line, Passage(id, " ".join(body.split()), title))


def _tagged(document: str, names: str) -> str:
    match = re.search(rf"(?is)<({names})>(.*?)</\1>", document)
    return " ".join(re.sub(r"<[^>]*>", " ", match[2]).split()) if match else ""


def _scope_notes(path: FilePath) -> Iterator[LocatedPassage]:
    """Concepts of MeSH with a scope note, at the lines where they end; white space is joined.

    Example:
        <Concept><ConceptUI>M0000001</ConceptUI><ConceptName><String>Calcimycin</String>
        </ConceptName><ScopeNote>An ionophorous ...</ScopeNote></Concept> is the passage M0000001
        with title "Calcimycin".
    """
    parser: XMLPullParser[Element] = XMLPullParser(["end"])
    parts = ("ConceptUI", "ScopeNote", "ConceptName/String")
    line = 0
    try:
        for line, content in numbered_lines(path):
            parser.feed(content)
            for event in parser.read_events():
                element = event[-1]
                assert isinstance(element, Element)
                if element.tag == "Concept" and element.find("ScopeNote") is not None:
                    texts = (" ".join((element.findtext(part) or "").split()) for part in parts)
                    yield LocatedPassage(line, Passage(*texts))
                # Millions of elements would fill the memory.
                if element.tag in ("Concept", "DescriptorRecord", "QualifierRecord"):
                    element.clear()
        parser.close()
    except ParseError as error:
        where, fix = f"{os.fspath(path)}:{line}", "download or copy the file again"
        raise DataError(f"not complete XML: {error}", where=where, fix=fix) from error


def text_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The text files of a folder and of those in it, sorted."""
    named = (path for path in folder.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES)
    # A copied site may have folders of such names.
    return sorted(path for path in named if not path.is_dir())


def _of_texts(folder: pathlib.Path, words: int) -> Iterator[LocatedPassage]:
    for path in text_files(folder):
        content = "".join(line for _, line in numbered_lines(path)) if path.stat().st_size else ""
        name = re.sub(r"\s+", "_", path.relative_to(folder).as_posix())
        title, paragraphs = _title_and_paragraphs(path, content)
        for number, text in enumerate(_windows(paragraphs, words) or [""]):
            yield LocatedPassage(1, Passage(f"{name}#{number}", text, title if text else "", name))


def _title_and_paragraphs(path: pathlib.Path, content: str) -> tuple[str, list[str]]:
    if path.suffix.lower() in (".html", ".htm"):
        page = _Page()
        page.feed(content)
        page.close()
        content, title = "".join(page.text), "".join(page.title or page.heading)
    else:
        # In code "#" begins a comment.
        code = r"(?ms)^ *(```|~~~)[^`\n]*\n.*?(^ *\1|\Z)"
        prose = re.sub(code, lambda block: " " * len(block[0]), content)
        heading = re.search(r"(?m)^#{1,6}[ \t]+(.+?)\s*#*$", prose)
        if path.suffix.lower() != ".md":
            heading = None
        title = heading[1] if heading else ""
        # A title is no paragraph of its own.
        if heading:
            content = content[: heading.start()] + content[heading.end() :]
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", content)]
    return " ".join(title.split()) or path.stem, [part for part in paragraphs if part]


def _windows(paragraphs: list[str], words: int) -> list[str]:
    """Paragraphs joined to passages of up to `words` words; longer ones are cut.

    What is shorter than a fifth, such as a heading, is joined to what follows in any case.

    Example:
        of 3 words: "a b", "c", "d e f g" are "a b c", "d e f", "g".
    """
    windows: list[list[str]] = []
    for paragraph in paragraphs:
        split = paragraph.split()
        if windows and (len(windows[-1]) + len(split) <= words or len(windows[-1]) < words / 5):
            split = windows.pop() + split
        windows += [split[at : at + words] for at in range(0, len(split), words)]
    return [" ".join(window) for window in windows]


class _Page(html.parser.HTMLParser):
    """Collects a page's title, its first heading and its text, blocks as paragraphs."""

    _SILENT = ("script", "style", "nav")
    _BLOCKS = (
        *("p", "div", "li", "tr", "section", "article", "blockquote", "pre"),
        *("td", "th", "br", "dt", "dd"),
    )
    _HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")

    def __init__(self) -> None:
        super().__init__()
        self.title: list[str] = []
        self.heading: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self._headings = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if tag in self._HEADINGS:
            # Headings do not nest: one without an end tag ends here.
            for heading in {*self._HEADINGS} & {*self._open}:
                self.handle_endtag(heading)
        if tag in (*self._SILENT, *self._HEADINGS, "title"):
            self._open.append(tag)
        if tag in (*self._BLOCKS, *self._HEADINGS):
            self.text.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass
        self._headings += tag in self._HEADINGS
        if tag in (*self._BLOCKS, *self._HEADINGS):
            self.text.append("\n\n")

    def handle_data(self, data: str) -> None:
        if "title" in self._open:
            self.title.append(data)
        elif not self.title and not self._headings and {*self._HEADINGS} & {*self._open}:
            self.heading.append(data)
        elif not {*self._SILENT} & {*self._open}:
            self.text.append(data)


def _paragraph_span(text: str, where: str) -> Span:
    if not text.strip().isdecimal():
        where = f"{where}, field {fields.Role.PARAGRAPH.value!r}"
        raise DataError(f"found {text!r}", where=where, fix="write a whole number")
    return Span((int(text), 0), (int(text), PARAGRAPH_END))
