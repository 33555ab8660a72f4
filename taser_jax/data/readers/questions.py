"""Questions of any format, DPR's, BEIR's, KILT's, TREC's and plain tables, and judgements.

DPR's formats as published with Karpukhin et al., 2020, and as pyserini writes the same topics;
KILT's as published with Petroni et al., 2021.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from taser_jax.data.files import first_lines, json_records, tagged_blocks, xml_elements
from taser_jax.data.readers import fields
from taser_jax.data.readers.fields import PARAGRAPH_END, Record, Role, Span
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage
from taser_jax.storage.typed_files import typed

_FIX_KILT = "write {id, input, output: [{answer, provenance: [{wikipedia_id, title, ...}]}]}"
# The answers of fact checking; no passage contains them as answers.
_VERDICTS = frozenset({"SUPPORTS", "REFUTES", "DISPUTED", "NOT ENOUGH INFO"})

# Parts of TREC's topics that may be their number, and what is asked; "" is the whole topic.
_NUMBERS = ("num", "number", "id", "identifier")
_ASKED = ("title", "query", "question", "description", "desc", "summary", "note", "")


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

        def known(place: int | None, otherwise: int) -> int:
            return otherwise if place is None or place < 0 else place

        if (first := known(self.start_paragraph_id, -1)) < 0:
            return None
        last = known(self.end_paragraph_id, first)
        end = known(self.end_character, PARAGRAPH_END)
        span = Span((first, known(self.start_character, 0)), (last, end))
        return span if span.start < span.end else span.whole_paragraphs()


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


def read_questions(path: FilePath, *, pairs: bool = False) -> Iterator[Question]:
    r"""Questions of a file, whose name and first record decide how it is read.

    JSON or JSON lines of {input, output}: KILT's (`read_kilt`).

    JSON, JSON lines, Parquet or a table with a header, of {question, answers, id} or synonyms
    (`fields.Role`), with the passages of anchor/positive/negative pairs, or DPR's positive_ctxs,
    negative_ctxs and hard_negative_ctxs (a context is {title, text} and optionally passage_id or
    psg_id). Of pairs, the rows of a question are one, unless they have ids of their own and no
    grade (relevance, label); what is graded 0 or below is a hard negative. SQuAD's articles are
    such pairs of a question and its paragraph.

    JSON lines of {_id, text}: BEIR's.

    `.csv`, in DPR's way without a header: the question, a tab, and a Python list literal of
    answers, either bare or in quotes with the inner quotes doubled.

    TREC's topics, <top> with <num> and <title>, or XML of <topic number="1">: the title or query,
    or else the question, description, summary or note, or else all words.

    Other names: a table of id and text, separated by tabs.

    Example:
        A line of a .qa.csv: `who wrote it\t["Ada Lovelace", "Lovelace"]`

    Args:
        path: local or gs://, plain or `.gz`.
        pairs: whether the file's own passages are the collection's: an answer is then a positive.

    Yields:
        Questions in the file's order.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    if is_kilt(path):
        yield from read_kilt(path)
        return
    rows: dict[tuple[str, str], Question] = {}
    for record in _records(path):
        question = _question(record, pairs=pairs)
        key = (question.text, question.id if record.first(Role.RELEVANCE) is None else "")
        if not pairs or not question.text.strip():
            yield question
        elif (asked := rows.setdefault(key, question)) is not question:
            rows[key] = dataclasses.replace(
                asked,
                answers=asked.answers + question.answers,
                positives=asked.positives + question.positives,
                hard_negatives=asked.hard_negatives + question.hard_negatives,
            )
    yield from rows.values()


def _records(path: FilePath) -> Iterator[Record]:
    name = os.fspath(path).lower().removesuffix(".gz")
    if not name.endswith(".qa.csv") and (records := fields.read_records(path)) is not None:
        return records
    if tag := topic_tag(path):
        return _topics(path, tag)
    if name.endswith(".csv"):
        expected = '2: a question and answers, such as ["Paris"]'
        return fields.named(fields.quoted_rows(path), ("question", "answers"), expected)
    return fields.named(fields.plain_rows(path), ("id", "question"), "2: query id and text")


def is_kilt(path: FilePath) -> bool:
    """Whether a file holds KILT's queries."""
    return fields.is_json(path) and "input" in next(json_records(path), (0, {}))[1]


class _KiltQuery(msgspec.Struct):
    input: str
    id: str | int = ""
    output: tuple[Output, ...] = ()


def read_kilt(path: FilePath) -> Iterator[Question]:
    """Queries of a KILT file, lines or an array of {id, input, output: [{answer, provenance}]}.

    Verdicts are no answers.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Queries in the file's order; those of blind test sets have no output.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    for record in fields.read_json(path):
        query = typed(record.values, _KiltQuery, where=record.where, fix=_FIX_KILT)
        answers = dict.fromkeys(output.answer for output in query.output if output.answer)
        yield Question(
            where=record.where,
            text=query.input,
            id=str(query.id),
            answers=tuple(answer for answer in answers if answer not in _VERDICTS),
            outputs=query.output,
            record=record.values,
        )


def topic_tag(path: FilePath) -> str:
    """The tag of each topic in a file of TREC's: top in SGML, topic in XML; else empty."""
    start = "\n".join(first_lines(path, 20))
    match = re.match(r"(?i)(<[^>]*>[\s\]>]*)*?<(?:\w+:)?(top|topic)\b", start.lstrip())
    return match[2] if match else ""


def _topics(path: FilePath, tag: str) -> Iterator[Record]:
    for topic in _sgml_topics(path) if tag.lower() == "top" else _xml_topics(path, tag):
        id, text = (next(filter(None, map(topic.values.get, of)), "") for of in (_NUMBERS, _ASKED))
        yield Record(topic.where, {"id": id, "question": text})


def _sgml_topics(path: FilePath) -> Iterator[Record]:
    for where, topic in tagged_blocks(path, "top"):
        parts = {}
        for name, text in re.findall(r"(?is)<(num|title|desc)>([^<]*)", topic):
            said = re.sub(r"(?i)^\s*(number|topic|description):", "", text)
            parts[name.lower()] = " ".join(said.split())
        yield Record(where, parts)


def _xml_topics(path: FilePath, tag: str) -> Iterator[Record]:
    for where, topic in xml_elements(path, tag):
        texts = {part.tag.lower(): part for part in topic} | {"": topic}
        words = {name: " ".join(part.itertext()).split() for name, part in texts.items()}
        yield Record(where, topic.attrib | {name: " ".join(text) for name, text in words.items()})


def _question(record: Record, *, pairs: bool = False) -> Question:
    answers = _answers(record, pairs=pairs)
    positives = record.positives() if pairs else record.passages(Role.POSITIVE)
    if not (pairs or positives) and (field := record.first(Role.PASSAGE_ID)):
        ids = fields.as_list(record.values[field])
        named = ids if isinstance(ids, list) else [ids]
        positives = tuple(Passage(str(id), "") for id in named if id not in (None, ""))
    # As in DPR, a question without hard negatives falls back on its other negatives.
    negatives = record.passages(Role.NEGATIVE) or record.passages(Role.OTHER_NEGATIVE)
    if pairs and record.is_refuted():
        answers, positives, negatives = (), (), positives + negatives
    return Question(
        where=record.where,
        text=record.string(Role.QUESTION, Role.TEXT, required="question"),
        id=record.string(Role.ID, Role.QUERY_ID),
        answers=answers,
        positives=positives,
        hard_negatives=negatives,
    )


def _answers(record: Record, *, pairs: bool) -> tuple[str, ...]:
    field = record.first(Role.ANSWERS)
    if field is None:
        return ()
    value = fields.as_list(record.values[field])
    if isinstance(value, dict):
        # SQuAD's, as Hugging Face has it: {text, answer_start}.
        value = value.get("text", value)
    # One answer may stand alone; several in one string would be a passage of pairs, too.
    if isinstance(value, str) and (pairs or field != "answers"):
        return (value,) if value.strip() else ()
    fix = "write a list of strings, such as ['Paris']"
    answers = typed(value, list[str | int | float], where=record.place(field), fix=fix)
    return tuple(map(str, answers))


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


def read_qrels(path: FilePath) -> Iterator[Judgement]:
    """Relevance judgements in TREC's columns, or in those that a header names, as in BEIR's files.

    TREC: query id, iteration (ignored), passage id, grade, separated by white space; or without the
    iteration. A query's and a passage's id alone have the grade 1.

    Args:
        path: local or gs://, plain or `.gz`.

    Yields:
        Judgements in the file's order, those of grade 0 included.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
    """
    records = fields.read_records(path)
    if records is None:
        names = ["query-id", "iteration", "corpus-id", "score"]
        if (width := len("".join(first_lines(path)).split())) < len(names):
            names = ["query-id", "corpus-id", "score"][: max(width, 2)]
        expected = "TREC's 4, query id, 0, passage id and grade, nor named by a header"
        records = fields.named(fields.plain_rows(path, None), names, expected)
    for record in records:
        query = record.first(Role.QUERY_ID, Role.QUESTION)
        passage = record.first(Role.PASSAGE_ID, Role.ID)
        grade = record.first(Role.RELEVANCE)
        values, where = record.values, record.where
        if query is None or passage is None or (grade is None and len(values) > 2):
            problem = f"its columns are {', '.join(values)}"
            fix = "name them query-id, corpus-id and score"
            raise DataError(problem, where=where, fix=fix)
        written = "1" if grade is None else str(values[grade])
        try:
            # Floats, as pandas writes them, count if they are whole.
            relevance = int(np.int32(re.sub(r"\.0*$", "", written.strip())))
        except (ValueError, OverflowError) as error:
            fix = "write an integer of 32 bits"
            problem = f"the grade is {written!r}"
            raise DataError(problem, where=where, fix=fix) from error
        yield Judgement(where, str(values[query]), str(values[passage]), relevance)
