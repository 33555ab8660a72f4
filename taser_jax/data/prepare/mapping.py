"""Questions as read to queries: the rows of a collection that their passages are."""

from __future__ import annotations

import array
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from taser_jax.data.collections.store import PassageStore
from taser_jax.data.prepare.splits import QuestionSplit
from taser_jax.data.readers.fields import Span
from taser_jax.data.readers.passages import LeftOut, LocatedPassage
from taser_jax.data.readers.questions import Judgement, Provenance, Question, read_qrels
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import HashIndex, Passage, Query, check_id, text_hash

EMPTY_QUESTIONS = "empty questions"
WITHOUT_POSITIVE = "without a positive"
MISSING_POSITIVES = "positives that are not in the collection"
MISSING_NEGATIVES = "hard negatives that are not in the collection"
MISSING_QUERIES = "judged queries that are not among the questions"
CONTRADICTING = "passages judged twice, of which the highest grade counts"
WHOLE_PAGES = "provenances known by page only, all of whose passages are gold"
MENTION_START, MENTION_END = "[START_ENT]", "[END_ENT]"
# TACO-DR keeps these before the mention.
_LEFT_WORDS = 64
_NO_SPAN = Span((0, 0), (0, 0))


class PassageResolver:
    """Rows of the passages that question files and qrels refer to.

    Args:
        store: the collection.
        rows_of_source: label -> rows of the file's passages; empty for a single file.
    """

    def __init__(self, store: PassageStore, rows_of_source: dict[str, range]) -> None:
        self._store, self._rows_of_source = store, rows_of_source
        self._rows_of_context: dict[tuple[str, str], int | None] = {}

    def row_of_id(self, id: str, *, label: str, where: str) -> int | None:
        """Row of the passage that a file calls `id`; None if there is none.

        Args:
            id: the passage's id in its file.
            label: the file's label; "" if unknown.
            where: file:line, for messages.

        Raises:
            DataError: several files use the id for different passages, and no label is given.
        """
        if not self._rows_of_source:
            return self._store.find(id)
        labels = [label] if label else list(self._rows_of_source)
        rows = {self._row_in(name, id) for name in labels} - {None}
        if len(rows) > 1:
            raise DataError(
                f"the passage id {id!r} means different passages in the merged files",
                where=where,
                fix="name the file with QuestionFiles(..., passages=<label>), one of "
                + ", ".join(self._rows_of_source),
            )
        return rows.pop() if rows else None

    def row_of_context(self, context: Passage, *, label: str, where: str) -> int | None:
        """Row of a quoted passage, by id if that is certain, otherwise by title and text."""
        if context.id and (label or not self._rows_of_source):
            row = self.row_of_id(context.id, label=label, where=where)
            if row is not None:
                return row
        key = (context.title, context.text)
        if key not in self._rows_of_context:
            rows = self._store.rows_with(title=context.title, text=context.text)
            self._rows_of_context[key] = rows[0] if rows else None
        return self._rows_of_context[key]

    def _row_in(self, label: str, id: str) -> int | None:
        if (row := self._store.find(f"{label}:{id}")) is not None:
            return row
        row = self._store.find(id)
        # Not by an alias: that is another file's id for the passage.
        is_own = row is not None and self._store.ids[row] == id
        return row if is_own and row in self._rows_of_source[label] else None


class PageIndex:
    """Pages and positions of the passages of a collection, for files of KILT's format.

    It takes 24 bytes per passage. Pages are identified by 64-bit hashes: among 6 million pages,
    two share one in one of a million collections.
    """

    def __init__(self) -> None:
        self._pages = array.array("Q")
        self._spans = array.array("i")
        self._rows: Int32[np.ndarray, " read"] = np.zeros(0, np.int32)
        self._by_page = HashIndex.from_hashes(np.zeros(0, np.uint64))

    def watch(self, passages: Iterable[LocatedPassage]) -> Iterator[LocatedPassage]:
        """The passages, which are recorded as they are read."""
        for located in passages:
            span = located.span or _NO_SPAN
            self._pages.append(text_hash(located.passage.page_id))
            self._spans.extend((*span.start, *span.end))
            yield located

    def close(self, rows: Int32[np.ndarray, " read"]) -> None:
        """Prepares for questions, once all passages have been read.

        Args:
            rows: each passage's row in the collection, in the order in which they were read.
        """
        self._rows = rows
        self._by_page = HashIndex.from_hashes(np.frombuffer(self._pages, np.uint64))

    def of_page(self, page_id: str) -> list[int]:
        """Places, in the order of reading, of a page's passages."""
        return self._by_page.candidates(text_hash(page_id)) if page_id else []

    def overlapping(self, places: Sequence[int], span: Span | None) -> list[int]:
        """The places whose passages overlap the span's characters or, failing that, paragraphs."""
        for part in (span, span.whole_paragraphs()) if span is not None else ():
            if overlapping := [place for place in places if self._span(place).overlaps(part)]:
                return overlapping
        return []

    def rows(self, places: Sequence[int]) -> list[int]:
        """Rows in the collection of these places."""
        return self._rows[list(places)].tolist()

    def _span(self, place: int) -> Span:
        a, b, c, d = self._spans[4 * place : 4 * place + 4]
        return Span((a, b), (c, d))


@dataclasses.dataclass
class QuestionMapper:
    """Turns the questions of a task and split into queries: contexts and judgements into rows.

    Attributes:
        split: the questions; their qrels are read here.
        resolver: looks passages up.
        pages: of the collection, for questions of KILT's format.
        left_out: takes what is left out, and lists questions without a positive.
    """

    split: QuestionSplit
    resolver: PassageResolver
    pages: PageIndex
    left_out: LeftOut

    def queries(self) -> Iterator[tuple[Query, Question]]:
        """Maps questions to queries, in order, and counts what it drops.

        Training questions without a positive are dropped, unless the split keeps them; others are
        kept, since they can be scored by their answers.

        Yields:
            Queries whose positives and hard negatives are rows, with the questions.

        Raises:
            DataError: an id of two questions, or one that run files cannot hold; judgements that
                are for none of the questions; what `left_out` refuses.
        """
        judgements = self._judgements()
        where_of_id: dict[str, str] = {}
        for question in self.split.questions():
            id = check_id(question.id, where=f"{question.where}, field 'id'")
            if id in where_of_id:
                problem = f"the id {id!r} was already used at {where_of_id[id]}"
                fix = "remove the duplicate or rename it"
                raise DataError(problem, where=f"{question.where}, field 'id'", fix=fix)
            where_of_id[id] = question.where
            if not question.text.strip():
                fix = "write the question, or leave out --strict"
                problem = "the question is empty"
                self.left_out.add(EMPTY_QUESTIONS, problem, where=question.where, fix=fix)
                continue
            if judgements is None:
                positives = self._positives(question)
                relevance: tuple[int, ...] = ()
            else:
                positives, relevance = self._judged(judgements.get(id, []))
            if not positives:
                self.left_out.counts[WITHOUT_POSITIVE] += 1
                line = f"{question.where}, question {question.text[:60]!r}: {WITHOUT_POSITIVE}"
                self.left_out.lines.append(line)
                if self.split.split == "train" and not self.split.keeps_unjudged:
                    continue
            query = Query(
                id=id,
                text=self._text(question),
                task=self.split.task,
                positives=positives,
                relevance=relevance,
                hard_negatives=self._hard_negatives(question, positives),
                answers=question.answers,
            )
            yield query, question
        self._check_judged(judgements or {})

    def _text(self, question: Question) -> str:
        if self.split.task in self.split.options.entity_tasks:
            return entity_input(question.text, left_words=_LEFT_WORDS, where=question.where)
        return question.text

    def _judgements(self) -> dict[str, list[Judgement]] | None:
        if self.split.files.qrels is None:
            return None
        grouped: dict[str, list[Judgement]] = {}
        for judgement in read_qrels(self.split.files.qrels):
            grouped.setdefault(judgement.query_id, []).append(judgement)
        return grouped

    def _check_judged(self, judgements: Mapping[str, list[Judgement]]) -> None:
        if self.split.split != self.split.sharing[0]:
            return
        files = self.split.files
        missing = [id for id in judgements if id not in self.split.read_ids]
        questions = os.fspath(files.questions)
        if missing and len(missing) == len(judgements):
            problem = f"not one of its {len(judgements):,} queries is among those of {questions}"
            fix = "give the qrels of these questions"
            raise DataError(problem, where=os.fspath(files.qrels or ""), fix=fix)
        judged = [judgement for of_query in judgements.values() for judgement in of_query]
        if judged and all(self._row_of_id(each.passage_id, each.where) is None for each in judged):
            problem = f"not one of its {len(judged):,} passages is in the collection"
            example = f"such as {judged[0].passage_id!r}, as the passages' file has them"
            fix = f"write ids, {example}, in a column or field named id"
            raise DataError(problem, where=os.fspath(files.qrels or ""), fix=fix)
        for id in missing:
            absent = f"the query {id!r} is not in {questions}"
            where = f"{judgements[id][0].where}, field 'query-id'"
            fix = "correct the id, or leave out --strict"
            self.left_out.add(MISSING_QUERIES, absent, where=where, fix=fix)

    def _positives(self, question: Question) -> tuple[int, ...]:
        rows: dict[int, None] = {}
        for number, context in enumerate(question.positives):
            row = self._row(context, question.where)
            if row is None:
                names = f"id {context.id!r}, title {context.title!r}"
                self._missing(f"the positive ({names})", f"{question.where}, positive {number}")
            else:
                rows[row] = None
        for number, provenance in enumerate(question.provenance):
            gold = self._gold(provenance, f"{question.where}, provenance {number}")
            rows.update(dict.fromkeys(gold))
        return tuple(rows)

    def _gold(self, provenance: Provenance, where: str) -> list[int]:
        """Rows of a provenance: its passage, those that overlap its place, or its whole page."""
        page = self.pages.of_page(provenance.page_id)
        if not page:
            self._missing(f"the page {provenance.page_id!r}", f"{where}, field 'wikipedia_id'")
            return []
        if self.split.task in self.split.options.page_gold_tasks:
            return self.pages.rows(page)
        if provenance.passage:
            at = f"{where}, field 'passage_id'"
            row = self._row_of_id(provenance.passage, at)
            if row is None:
                self._missing(f"the passage {provenance.passage!r}", at)
                return []
            if row not in self.pages.rows(page):
                problem = f"passage {provenance.passage!r} is not of page {provenance.page_id!r}"
                fix = "give the passage file that the queries were made from"
                raise DataError(problem, where=at, fix=fix)
            return [row]
        overlapping = self.pages.overlapping(page, provenance.span)
        self.left_out.counts[WHOLE_PAGES] += not overlapping
        return self.pages.rows(overlapping or page)

    def _judged(self, judgements: Sequence[Judgement]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        grades: dict[int, int] = {}
        for judgement in sorted(judgements, key=lambda judged: -judged.relevance):
            row = self._row_of_id(judgement.passage_id, judgement.where)
            if row is None and judgement.relevance > 0:
                self._missing(f"the positive (id {judgement.passage_id!r})", judgement.where)
            elif row is not None:
                highest = grades.setdefault(row, judgement.relevance)
                if highest > judgement.relevance:
                    problem = f"the grade {judgement.relevance}, where another line has {highest}"
                    fix = "leave one of them"
                    self.left_out.add(CONTRADICTING, problem, where=judgement.where, fix=fix)
        positive = {row: grade for row, grade in grades.items() if grade > 0}
        relevance = tuple(positive.values())
        return tuple(positive), () if set(relevance) <= {1} else relevance

    def _hard_negatives(self, question: Question, positives: Sequence[int]) -> tuple[int, ...]:
        rows = [self._row(context, question.where) for context in question.hard_negatives]
        self.left_out.counts[MISSING_NEGATIVES] += rows.count(None)
        return tuple({row: None for row in rows if row is not None and row not in positives})

    def _row_of_id(self, id: str, where: str) -> int | None:
        return self.resolver.row_of_id(id, label=self.split.files.passages, where=where)

    def _row(self, context: Passage, where: str) -> int | None:
        return self.resolver.row_of_context(context, label=self.split.files.passages, where=where)

    def _missing(self, what: str, where: str) -> None:
        fix = "give the passage file that the questions were made from, or leave out --strict"
        problem = f"{what} is not in the collection"
        self.left_out.add(MISSING_POSITIVES, problem, where=where, fix=fix)


def entity_input(text: str, *, left_words: int, where: str) -> str:
    """A document around a marked mention, with only the last words before it.

    The tokeniser truncates on the right, so the mention is never lost, as in TACO-DR's AIDA inputs.

    Example:
        >>> entity_input("a b c [START_ENT] Bern [END_ENT] d", left_words=2, where="line 1")
        'b c [START_ENT] Bern [END_ENT] d'

    Args:
        text: the whole input.
        left_words: words kept before the mention.
        where: file:line, for the message.

    Raises:
        DataError: the text does not have exactly one mention between [START_ENT] and [END_ENT].
    """
    left, start, rest = text.partition(MENTION_START)
    mention, end, right = rest.partition(MENTION_END)
    if not start or not end or not mention.strip() or MENTION_START in rest:
        raise DataError(
            f"{text.count(MENTION_START)} {MENTION_START}, {text.count(MENTION_END)} {MENTION_END}",
            where=f"{where}, field 'input'",
            fix="mark one mention, or leave the task out of PrepareOptions.entity_tasks",
        )
    words = left.split()
    left_context = words[max(0, len(words) - left_words) :]
    return " ".join([*left_context, MENTION_START, *mention.split(), MENTION_END, *right.split()])
