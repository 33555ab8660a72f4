"""Maps questions as read to queries whose passages are rows of a collection."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

from taser_jax.data.prepare.merging import PassageResolver
from taser_jax.data.readers import beir, dpr, tsv
from taser_jax.data.readers.located import Context, Judgement, Question
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import EmptyPassages, Query, check_id


class MissingPassages(enum.Enum):
    """Treatment of a positive that is not in the collection."""

    ERROR = "error"
    DROP = "drop"


class NoPositive(enum.Enum):
    """Treatment of a question without a positive."""

    ERROR = "error"
    DROP = "drop"
    KEEP = "keep"


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionFiles:
    """The files with the questions of one task and split.

    Attributes:
        questions: DPR's JSON or JSONL, a `.qa.csv`, or a TSV of query id and text.
        ids: a TSV of query id and text in the same order, for questions that have no ids.
        qrels: judgements (TREC or BEIR columns); they replace the positives in `questions`.
        passages: label of the passage file whose ids the questions and qrels use. Needed if several
            files are merged and an id means different passages in them.
    """

    questions: FilePath
    ids: FilePath | None = None
    qrels: FilePath | None = None
    passages: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PrepareOptions:
    """Treatment of incomplete input; an enum may be given by value, such as "drop".

    Attributes:
        empty: passages without text.
        missing_positives: positives that are not in the collection.
        train_without_positive: training questions without a positive.
        evaluation_without_positive: validation and test questions without a positive; if kept,
            they can still be scored by their answers.
        validation_share: share of the training questions that become a validation split, where a
            task comes without one; never of the test questions. 0 makes none.
    """

    empty: EmptyPassages = EmptyPassages.ERROR
    missing_positives: MissingPassages = MissingPassages.ERROR
    train_without_positive: NoPositive = NoPositive.DROP
    evaluation_without_positive: NoPositive = NoPositive.KEEP
    validation_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise ConfigError(
                f"{self.validation_share}",
                where="PrepareOptions.validation_share",
                expected="at least 0 and below 1, such as 0.1",
            )
        for field in dataclasses.fields(self):
            kind = type(field.default)
            if not issubclass(kind, enum.Enum):
                continue
            given = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, kind(given))
            except ValueError as error:
                raise ConfigError(
                    f"found {given!r}",
                    where=f"PrepareOptions.{field.name}",
                    expected="one of " + ", ".join(repr(member.value) for member in kind),
                ) from error


class IncompleteQuestions:
    """Counts what a split's questions lack, and drops, keeps or refuses such questions.

    Args:
        split: "train", "validation" or "test".
        options: how to treat incomplete input.

    Attributes:
        counts: "without_positive", "missing_positives" and the caller's own counts.
        without_positive: file and line of each question without a positive, with its text.
    """

    def __init__(self, split: str, options: PrepareOptions) -> None:
        self._split, self._options = split, options
        self.counts: collections.Counter[str] = collections.Counter()
        self.without_positive: list[str] = []

    def missing_positive(self, error: DataError) -> None:
        """Counts a positive that is not in the collection, or raises the error."""
        if self._options.missing_positives is MissingPassages.ERROR:
            raise error
        self.counts["missing_positives"] += 1

    def keeps_without_positive(self, message: str, *, where: str, expected: str) -> bool:
        """Counts a question without a positive, and returns whether it is kept.

        Raises:
            DataError: the options demand a positive.
        """
        self.counts["without_positive"] += 1
        self.without_positive.append(where)
        option = (
            "train_without_positive" if self._split == "train" else "evaluation_without_positive"
        )
        choice: NoPositive = getattr(self._options, option)
        if choice is NoPositive.ERROR:
            raise DataError(
                message,
                where=where,
                expected=expected,
                fix=f"add one, or drop such questions with PrepareOptions.{option} = 'drop'",
            )
        return choice is NoPositive.KEEP


class QuestionMapper:
    """Turns questions into queries: contexts and judgements into rows.

    Args:
        task: the queries' task.
        split: "train", "validation" or "test".
        files: source of the questions; its qrels are read here.
        resolver: looks passages up.
        options: how to treat incomplete input.

    Attributes:
        counts: "without_positive", "missing_positives", "missing_hard_negatives".
        without_positive: as in `IncompleteQuestions`.
    """

    def __init__(
        self,
        task: str,
        split: str,
        files: QuestionFiles,
        resolver: PassageResolver,
        options: PrepareOptions,
    ) -> None:
        self._task, self._split, self._files = task, split, files
        self._resolver, self._incomplete = resolver, IncompleteQuestions(split, options)
        self.counts = self._incomplete.counts
        self.without_positive = self._incomplete.without_positive

    def queries(self, questions: Iterable[Question]) -> Iterator[Query]:
        """Maps questions to queries, in order, and counts what it drops.

        Args:
            questions: as read.

        Yields:
            Queries whose positives and hard negatives are rows.

        Raises:
            DataError: a repeated id or one that run files cannot hold, a missing positive, a
                question without any, or judgements that are for none of the questions.
        """
        judgements = self._judgements()
        where_of_id: dict[str, str] = {}
        for number, question in enumerate(questions):
            id = check_id(
                question.id or f"{self._split}-{number}", where=f"{question.where}, field 'id'"
            )
            if id in where_of_id:
                raise DataError(
                    f"the id {id!r} was already used at {where_of_id[id]}",
                    where=f"{question.where}, field 'id'",
                    expected="a unique id for each question",
                    fix="remove the duplicate or rename it",
                )
            where_of_id[id] = question.where
            if judgements is None:
                positives = self._positives(question)
                relevance: tuple[int, ...] = ()
            else:
                positives, relevance = self._judged(judgements.get(question.id, []))
            if not positives and not self._incomplete.keeps_without_positive(
                "the question has no positive",
                where=f"{question.where}, question {question.text[:60]!r}",
                expected="at least one positive passage",
            ):
                continue
            yield Query(
                id=id,
                text=question.text,
                task=self._task,
                positives=positives,
                relevance=relevance,
                hard_negatives=self._hard_negatives(question, positives),
                answers=question.answers,
            )

        if judgements and where_of_id.keys().isdisjoint(judgements):
            raise DataError(
                f"not one of its {len(judgements):,} queries is among the questions",
                where=os.fspath(self._files.qrels or ""),
                expected=f"ids as in {os.fspath(self._files.ids or self._files.questions)}",
                fix="give the qrels of these questions, and `ids` if the questions have none",
            )

    def _judgements(self) -> dict[str, list[Judgement]] | None:
        if self._files.qrels is None:
            return None
        grouped: dict[str, list[Judgement]] = {}
        for judgement in tsv.read_qrels(self._files.qrels):
            if judgement.relevance > 0:
                grouped.setdefault(judgement.query_id, []).append(judgement)
        return grouped

    def _positives(self, question: Question) -> tuple[int, ...]:
        rows = []
        for number, context in enumerate(question.positives):
            row = self._row(context, question.where)
            if row is None:
                self._missing(
                    f"id {context.id!r}, title {context.title!r}",
                    f"{question.where}, positive_ctxs[{number}]",
                )
            else:
                rows.append(row)
        return tuple(dict.fromkeys(rows))

    def _judged(self, judgements: Sequence[Judgement]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        grades: dict[int, int] = {}
        for judgement in sorted(judgements, key=lambda one: -one.relevance):
            row = self._resolver.row_of_id(
                judgement.passage_id, label=self._files.passages, where=judgement.where
            )
            if row is None:
                self._missing(f"id {judgement.passage_id!r}", judgement.where)
            else:
                grades.setdefault(row, judgement.relevance)
        relevance = tuple(grades.values())
        return tuple(grades), () if set(relevance) <= {1} else relevance

    def _hard_negatives(self, question: Question, positives: Sequence[int]) -> tuple[int, ...]:
        # As in DPR, a question without hard negatives falls back on its other negatives.
        rows = []
        for context in question.hard_negatives or question.negatives:
            row = self._row(context, question.where)
            if row is None:
                self.counts["missing_hard_negatives"] += 1
            elif row not in positives:
                rows.append(row)
        return tuple(dict.fromkeys(rows))

    def _row(self, context: Context, where: str) -> int | None:
        return self._resolver.row_of_context(context, label=self._files.passages, where=where)

    def _missing(self, passage: str, where: str) -> None:
        self._incomplete.missing_positive(
            DataError(
                f"the positive ({passage}) is not in the collection",
                where=where,
                expected="a passage of the collection, by id or by equal title and text",
                fix="give the passage file that the questions were made from, or drop such "
                "positives with PrepareOptions.missing_positives = 'drop'",
            )
        )


def read_questions(files: QuestionFiles, split: str) -> Iterator[Question]:
    """Questions of a task and split, read in the format that the file's name implies."""
    name = os.fspath(files.questions).removesuffix(".gz")
    if name.endswith((".tsv", ".txt")):
        questions = tsv.read_queries(files.questions)
    elif dpr.is_json(files.questions) and split == "train" and files.qrels is None:
        questions = dpr.read_training(files.questions)
    else:
        questions = dpr.read_questions(files.questions)
    return questions if files.ids is None else _with_ids(questions, files.ids)


def _with_ids(questions: Iterable[Question], ids: FilePath) -> Iterator[Question]:
    for question, named in itertools.zip_longest(questions, tsv.read_queries(ids)):
        if question is None or named is None or question.text.strip() != named.text.strip():
            raise DataError(
                f"found {named.text if named else 'the end of the file'!r}",
                where=named.where if named else os.fspath(ids),
                expected=f"{question.where}: {question.text!r}" if question else "no more queries",
                fix="the two files must list the same questions in the same order",
            )
        yield dataclasses.replace(question, id=named.id)


def judged_beir_queries(files: QuestionFiles) -> Iterator[Question]:
    """The queries of a BEIR folder that are judged in the qrels."""
    assert files.qrels is not None
    judged = {judgement.query_id: judgement.where for judgement in tsv.read_qrels(files.qrels)}
    found: set[str] = set()
    for question in beir.read_queries(os.path.dirname(os.fspath(files.questions))):
        if question.id in judged:
            found.add(question.id)
            # The mapper refuses an id that comes twice.
            yield question
    for query_id in judged.keys() - found:
        raise DataError(
            f"the query {query_id!r} is not in {os.fspath(files.questions)}",
            where=f"{judged[query_id]}, field 'query-id'",
            expected="an _id of queries.jsonl",
        )
