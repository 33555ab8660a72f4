"""Shared by the readers: records with their places, checks on fields, and what is left out."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

import msgspec

from taser_jax.data.files import in_blocks
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, SeenTexts, check_id

# Paragraph and character in it. A whole paragraph ends at this character.
Position = tuple[int, int]
PARAGRAPH_END = (1 << 31) - 1
_BLOCK = 1 << 14


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
class LocatedPassage:
    """A passage as read from its file.

    Attributes:
        line: its first line.
        passage: the passage.
        span: its position in its page; None if the file does not give it.
    """

    line: int
    passage: Passage
    span: Span | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """A passage quoted in a question file.

    Attributes:
        title: may be empty.
        text: the body.
        id: the passage's id in its collection, or a hash of its content if the file gives none.
    """

    title: str
    text: str
    id: str


class Provenance(msgspec.Struct, frozen=True):
    """The location of evidence for an answer, as KILT's files have it.

    Attributes:
        wikipedia_id: the page.
        title: the page's title.
        passage_id: id of the passage, if the file gives it (KILT's own files do not).
        start_paragraph_id: the first paragraph; without it only the page is known.
        end_paragraph_id: the last one.
        start_character: in the first paragraph; KILT writes -1 where it is not known.
        end_character: in the last one, after the evidence.
    """

    wikipedia_id: str | int | None = None
    title: str | None = None
    passage_id: str | int | None = None
    start_paragraph_id: int | None = None
    end_paragraph_id: int | None = None
    start_character: int | None = None
    end_character: int | None = None

    @property
    def page_id(self) -> str:
        """The page; empty if the file has none."""
        return "" if self.wikipedia_id is None else str(self.wikipedia_id).strip()

    @property
    def passage(self) -> str:
        """The passage's id; empty if the file has none."""
        return "" if self.passage_id is None else str(self.passage_id)

    @property
    def span(self) -> Span | None:
        """The paragraphs, and the characters if they are known."""
        first = _position(self.start_paragraph_id)
        if first is None:
            return None
        last = _position(self.end_paragraph_id)
        start, end = _position(self.start_character), _position(self.end_character)
        span = Span(
            (first, start or 0),
            (first if last is None else last, PARAGRAPH_END if end is None else end),
        )
        return span if span.start < span.end else span.whole_paragraphs()


def _position(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


class Output(msgspec.Struct, frozen=True):
    """One correct output of a query of KILT's.

    Attributes:
        answer: the answer, or None if the output has only provenance.
        provenance: the set of evidence for it; None if the field is absent.
    """

    answer: str | None = None
    provenance: tuple[Provenance, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question as read from its file, before its passages are mapped to rows.

    Attributes:
        where: file:line it was read from.
        text: the question.
        id: empty if the file gives none.
        answers: strings or patterns.
        positives: gold first.
        hard_negatives: passages that look relevant but are not.
        outputs: the correct outputs with the places of the positives, in files of KILT's format.
        record: the original line of such a file, for writing it again.
    """

    where: str
    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    positives: tuple[Context, ...] = ()
    hard_negatives: tuple[Context, ...] = ()
    outputs: tuple[Output, ...] = ()
    record: Mapping[str, object] | None = None

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Places of all outputs."""
        return tuple(place for output in self.outputs for place in output.provenance or ())


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

    def add(self, kind: str, error: DataError) -> None:
        """Counts and lists one case of a kind; raises the error if strict."""
        if self._strict:
            raise error
        self.counts[kind] += 1
        self.lines.append(f"{error.where}: {error.problem}")


def checked_passages(
    path: FilePath, located: Callable[[], Iterator[LocatedPassage]], left_out: LeftOut
) -> Iterator[LocatedPassage]:
    """Passages of a file; leaves out those without any text, and repeated ones.

    Args:
        path: the file, for messages.
        located: starts reading the file.
        left_out: takes what is left out.

    Yields:
        Passages in the file's order. A title alone is a passage.

    Raises:
        DataError: no passage; an id that is empty or that run files cannot hold, or one that is
            used for two different texts, with both lines.
    """
    seen = SeenTexts()
    repeated: list[LocatedPassage] = []
    block: list[LocatedPassage] = []
    for block in in_blocks(located(), _BLOCK):
        for read in block:
            check_id(read.passage.id, where=f"{os.fspath(path)}:{read.line}, field 'id'")
        repeats = seen.add([read.passage.id for read in block])
        for read, is_repeated in zip(block, repeats, strict=True):
            if is_repeated:
                repeated.append(read)
            elif read.passage.text.strip() or read.passage.title.strip():
                yield read
            else:
                where = f"{os.fspath(path)}:{read.line}, field 'text'"
                fix = "remove it, or leave out --strict, which skips it"
                left_out.add("empty passages", DataError("it is empty", where=where, fix=fix))
    if not block:
        fix = (
            "check that it is the right file; terms need a definition, MeSH's concepts a ScopeNote"
        )
        raise DataError("there is no passage in it", where=os.fspath(path), fix=fix)
    if repeated:
        _check_repeated(path, located, repeated, left_out)


def _check_repeated(
    path: FilePath,
    located: Callable[[], Iterator[LocatedPassage]],
    repeated: list[LocatedPassage],
    left_out: LeftOut,
) -> None:
    # Reading again, for repeated ids only, avoids keeping every id and text in memory.
    ids = {again.passage.id for again in repeated}
    first: dict[str, LocatedPassage] = {}
    for again in located():
        if again.passage.id in ids:
            first.setdefault(again.passage.id, again)
    for again in repeated:
        before = first[again.passage.id]
        error = DataError(
            f"the id {again.passage.id!r} was already used on line {before.line}",
            where=f"{os.fspath(path)}:{again.line}, field 'id'",
            fix="remove the duplicate or rename it",
        )
        # Equal lines: another id has the same 64-bit hash, which is as good as impossible.
        if again.line == before.line or again.passage != before.passage:
            raise error
        left_out.add("repeated passages", error)


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
