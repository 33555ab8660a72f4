"""Passages of any format: tables, JSON lines, Parquet, TREC, thesauri, pages and text files."""

from __future__ import annotations

import collections
import dataclasses
import html.parser
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

import msgspec

from taser_jax.data import files
from taser_jax.data.readers import fields
from taser_jax.data.readers.dialects import PASSAGE_WORDS, WORD
from taser_jax.data.readers.fields import PARAGRAPH_END, Record, Role, Span
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, check_id
from taser_jax.storage.typed_files import typed

# Rows of a table without a header in which titles and texts are compared.
_COMPARED = 100
_SECTION = "Section::::"
_SETTINGS = r"(---|\+{3}) *\r?\n(?:(?:[\w.-]+ *[:=]|[ \t#\[-]).*\n|\r?\n)+?\1 *(?:\r?\n|\Z)"
_TITLE = r"(?m)^title *[:=] *(?:[>|][+-]?\s+)?(['\"]?)(.*?(?:\n[ \t]+\S.*?)*)\1\s*$(?!\n[ \t])"
_IDS = (Role.ID, Role.PASSAGE_ID)
_FIX_PAGE = "write {wikipedia_id, wikipedia_title, text: [paragraph, ...]}"


@dataclasses.dataclass(frozen=True, slots=True)
class LocatedPassage:
    """A passage as read from its file.

    Attributes:
        where: file:line of its beginning.
        passage: the passage.
        span: its position in its page; None if the file does not give it.
    """

    where: str
    passage: Passage
    span: Span | None = None


class LeftOut:
    """What is left out of incomplete files: counted and listed, or refused.

    Args:
        strict: whether to refuse it.

    Attributes:
        counts: kind -> number.
        lines: file, line and reason of each.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.counts: collections.Counter[str] = collections.Counter()
        self.lines: list[str] = []

    def add(self, kind: str, problem: str, *, where: str, fix: str) -> None:
        """Counts and lists one case of a kind, or refuses it."""
        if self._strict:
            raise DataError(problem, where=where, fix=fix)
        self.counts[kind] += 1
        self.lines.append(f"{where}: {problem}")


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

    .txt, .md and .html, or a folder of them, also cut: title from the first heading, or the file's
    name.

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
        passage, where = read.passage, f"{read.where}, field 'id'"
        check_id(passage.id, where=where)
        if (content := content_of_id.get(passage.id)) is not None:
            problem = f"the id {passage.id!r} was already used"
            fix = "remove the duplicate or rename it"
            if content != hash(passage):
                raise DataError(problem, where=where, fix=fix)
            left_out.add("repeated passages", problem, where=where, fix=fix)
            continue
        content_of_id[passage.id] = hash(passage)
        if passage.text.strip() or passage.title.strip():
            yield read
        else:
            where = f"{read.where}, field 'text'"
            fix = "remove it, or leave out --strict, which skips it"
            left_out.add("empty passages", "it is empty", where=where, fix=fix)
    if not content_of_id:
        fix = "check that it is the file; terms need a definition, MeSH's concepts a ScopeNote"
        raise DataError("there is no passage in it", where=os.fspath(path), fix=fix)


def _located(path: FilePath, words: int) -> Iterator[LocatedPassage]:
    name = os.fspath(path).lower().removesuffix(".gz")
    if os.path.isdir(path):
        folder = pathlib.Path(path)
        yield from _of_texts(files.texts_among(files.visible_files(folder)), folder, words)
    elif (records := fields.read_records(path)) is not None:
        yield from _of_records(path, records, words)
    elif "".join(files.first_lines(path)).lstrip().lower().startswith("<doc>"):
        yield from _of_trec(path)
    elif name.endswith(".xml"):
        yield from _scope_notes(path)
    elif files.is_text(name) and "\t" not in "".join(files.first_lines(path)):
        yield from _of_texts([pathlib.Path(path)], pathlib.Path(path).parent, words)
    else:
        for row in _columns(path):
            yield LocatedPassage(row.where, Passage(*map(str, row.values.values())))


def _of_records(path: FilePath, records: Iterator[Record], words: int) -> Iterator[LocatedPassage]:
    if (first := next(records, None)) is None:
        return
    records = itertools.chain([first], records)
    if fields.is_json(path) and isinstance(first.values.get("text"), list):
        yield from _of_pages(records, words)
        return
    if first.is_pair():
        yield from _of_pairs(records)
        return
    has_ids = first.first(*_IDS) is not None
    for number, record in enumerate(records):
        if not _is_undefined_term(record):
            passage = passage_of(record)
            if not has_ids and not passage.id:
                passage = dataclasses.replace(passage, id=str(number))
            yield LocatedPassage(record.where, passage, _paragraph(record))


def _is_undefined_term(record: Record) -> bool:
    """Whether a record is a thesaurus's term without a definition, which says nothing."""
    is_term = "name" in record.values and record.first(Role.TEXT) in ("definition", None)
    return is_term and not str(record.values.get("definition") or "").strip()


def _paragraph(record: Record) -> Span | None:
    if (field := record.first(Role.PARAGRAPH)) is None:
        return None
    if not (text := str(record.values[field]).strip()).isdecimal():
        fix = "write a whole number"
        raise DataError(f"found {text!r}", where=record.place(field), fix=fix)
    # Some number passages through all pages, beyond what a page index holds.
    paragraph = min(int(text), PARAGRAPH_END)
    return Span((paragraph, 0), (paragraph, PARAGRAPH_END))


def passage_of(record: Record) -> Passage:
    """A record's id (empty where it has none), text, title and page, by the names of its fields.

    Raises:
        DataError: no text, or a field that is no string.
    """
    text = record.string(Role.TEXT, required="text")
    page = record.string(Role.PAGE).strip() or _maillard(record.values)
    return Passage(record.string(*_IDS), text, record.string(Role.TITLE), page)


def _maillard(values: Mapping[str, object]) -> str:
    """The page of Maillard's six columns: the fourth, whatever its name, if it is a number."""
    if len(values) != 6 or list(values)[:3] != ["id", "text", "title"]:
        return ""
    # Other people's fourth field is a language, say: no page that passages share.
    page = str(list(values.values())[3]).strip()
    return page if page.isdecimal() else ""


def _of_pairs(records: Iterator[Record]) -> Iterator[LocatedPassage]:
    seen = set()
    for record in records:
        for context in (*record.positives(), *record.passages(Role.NEGATIVE)):
            if context.id not in seen:
                seen.add(context.id)
                yield LocatedPassage(record.where, context)


class _KiltPage(msgspec.Struct):
    """One line of a knowledge source; KILT's first paragraph is the title."""

    wikipedia_id: str | int
    wikipedia_title: str
    text: list[str]


def _of_pages(records: Iterator[Record], words: int) -> Iterator[LocatedPassage]:
    """The windows of each page (`chunk_page`) of a knowledge source, named after their page."""
    for record in records:
        page = typed(record.values, _KiltPage, where=record.where, fix=_FIX_PAGE)
        id = str(page.wikipedia_id)
        for number, (text, span) in enumerate(chunk_page(page.text, words=words)):
            passage = Passage(f"{id}.{number}", text, page.wikipedia_title, id)
            yield LocatedPassage(record.where, passage, span)


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


def _columns(path: FilePath) -> Iterator[Record]:
    """Rows of a table without a header, unless its second column seems to be the title."""
    expected = "2 or 3: id, text and optionally title"
    rows = fields.named(fields.plain_rows(path), ("id", "text", "title"), expected, optional=1)
    compared = list(itertools.islice(rows, _COMPARED))
    longer = [row for row in compared if len(row.string(Role.TEXT)) < len(row.string(Role.TITLE))]
    if len(longer) > len(compared) / 2:
        problem = "its third column, the title, is longer than the second, the text"
        fix = "name the columns in a first line, such as id<tab>title<tab>text"
        raise DataError(problem, where=os.fspath(path), fix=fix)
    return itertools.chain(compared, rows)


def _of_trec(path: FilePath) -> Iterator[LocatedPassage]:
    """Documents of TREC's SGML; the text is what is left without tags."""
    for where, document in files.tagged_blocks(path, "doc"):
        id = _tagged(document, "DOCNO")
        title = _tagged(document, "TITLE|HEADLINE|HEAD|TI")
        body = re.sub(r"(?is)<(DOCNO|TITLE|HEADLINE|HEAD|TI)>.*?</\1>|<[^>]*>", " ", document)
        yield LocatedPassage(where, Passage(id, " ".join(body.split()), title))


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
    parts = ("ConceptUI", "ScopeNote", "ConceptName/String")
    tags = ("Concept", "DescriptorRecord", "QualifierRecord")
    for where, element in files.xml_elements(path, *tags):
        if element.find("ScopeNote") is not None:
            texts = (" ".join((element.findtext(part) or "").split()) for part in parts)
            yield LocatedPassage(where, Passage(*texts))


def _of_texts(
    paths: list[pathlib.Path], folder: pathlib.Path, words: int
) -> Iterator[LocatedPassage]:
    for path in paths:
        is_empty = path.exists() and not path.stat().st_size
        content = "" if is_empty else "".join(line for _, line in files.numbered_lines(path))
        name = re.sub(r"\s+", "_", path.relative_to(folder).as_posix())
        title, paragraphs = _title_and_paragraphs(path, content)
        for number, text in enumerate(_windows(paragraphs, words) or [""]):
            passage = Passage(f"{name}#{number}", text, title if text else "", name)
            yield LocatedPassage(str(path), passage)


def _title_and_paragraphs(path: pathlib.Path, content: str) -> tuple[str, list[str]]:
    title = ""
    name, _, ending = path.name.removesuffix(".gz").rpartition(".")
    # Of the settings that Jekyll's, Hugo's and Obsidian's pages begin with, the title counts.
    if ending.lower() != "txt" and (settings := re.match(_SETTINGS, content)):
        content = content[settings.end() :]
        named = re.search(_TITLE, settings[0])
        title = named[2] if named else ""
    if ending.lower() in ("html", "htm"):
        page = _Page()
        page.feed(content)
        page.close()
        title = title or "".join(page.title)
        content = "\n\n".join("".join(block) for block in page.blocks)
    elif ending.lower() == "md":
        # In code "#" begins a comment.
        code = r"(?ms)^ *(```|~~~)[^`\n]*\n.*?(^ *\1|\Z)"
        prose = re.sub(code, lambda block: " " * len(block[0]), content)
        if not title and (heading := re.search(r"(?m)^#{1,6}[ \t]+(.+?)\s*#*$", prose)):
            # A title is no paragraph of its own.
            title = heading[1]
            content = content[: heading.start()] + content[heading.end() :]
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", content)]
    return " ".join(title.split()) or name, [part for part in paragraphs if part]


def _windows(paragraphs: list[str], words: int) -> list[str]:
    """Paragraphs joined to passages of up to `words` words; longer ones are cut.

    What is shorter than a fifth, such as a heading, is joined to what follows in any case. Where a
    script has no spaces between words, each letter counts as one.

    Example:
        of 3 words: "a b", "c", "d e f g" are "a b c", "d e f", "g".
    """
    windows: list[list[str]] = []
    for paragraph in paragraphs:
        split = WORD.findall(f"{paragraph} ")
        if windows and (len(windows[-1]) + len(split) <= words or len(windows[-1]) < words / 5):
            split = windows.pop() + split
        windows += [split[at : at + words] for at in range(0, len(split), words)]
    return ["".join(window).rstrip() for window in windows]


class _Page(html.parser.HTMLParser):
    """Collects a page's title, or else its first heading, and its blocks."""

    _ASIDE = "title|script|style|nav|svg"
    _BLOCK = r"p|div|li|t[rdh]|d[td]|[bh]r|h[1-6]|pre|\w+quote|\w*caption|section|article|main|"
    _BLOCK += "header|footer|aside|option|button|summary"

    def __init__(self) -> None:
        super().__init__()
        self.title: list[str] = []
        self._block: list[str] = []
        self.blocks = [self._block]
        self._aside: list[str] = []

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        # As browsers do it; Python's refuses unknown names.
        return self.parse_bogus_comment(i, report)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        if re.fullmatch(self._ASIDE, tag):
            self._aside.append(tag)
        self._end_block(tag)
        is_heading = not self._aside and re.fullmatch("h[1-6]", tag)
        if is_heading and not "".join(self.title).strip():
            self._block = self.title

    def handle_endtag(self, tag: str) -> None:
        if tag in self._aside:
            while self._aside.pop() != tag:
                pass
        self._end_block(tag)

    def _end_block(self, tag: str) -> None:
        if re.fullmatch(self._BLOCK, tag):
            self._block = []
            self.blocks.append(self._block)

    def handle_data(self, data: str) -> None:
        # A picture may have a title, too.
        if self._aside == ["title"]:
            self.title.append(data)
        elif not self._aside:
            self._block.append(data)
