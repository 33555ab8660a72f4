"""What the readers yield: passages, questions and judgements with their places, or leave out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

import msgspec

from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

# Paragraph and character in it. A whole paragraph ends at this character.
Position = tuple[int, int]
PARAGRAPH_END = (1 << 31) - 1


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
        positives: gold first; a passage's id is a hash of its content if the file gives none.
        hard_negatives: passages that look relevant but are not.
        outputs: the correct outputs with the places of the positives, in files of KILT's format.
        record: the original line of such a file, for writing it again.
    """

    where: str
    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    positives: tuple[Passage, ...] = ()
    hard_negatives: tuple[Passage, ...] = ()
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
