"""The questions of each task and split: their files, the options, and how files are divided.

Files are divided by hash or position, alike on every machine.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import scipy.sparse.csgraph

from taser_jax.data.collections.store import SPLITS, checked_name, collection_directory, list_tasks
from taser_jax.data.readers.dialects import PASSAGE_WORDS
from taser_jax.data.readers.questions import Question, read_qrels, read_questions
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger
from taser_jax.storage.records import Query, hash_share, text_hash
from taser_jax.storage.typed_files import Checked, Natural, Positive, Rate, Share

VALIDATION = "validation"
# Fewer questions of one file are not divided: a test, or a validation, would have a handful.
FEWEST = 60
# Begins the ids of questions without one, in a file of several splits.
_NUMBERED = "question"
# Shares of the splits of a file that holds several.
SHARES: Mapping[str, float] = {"train": 0.8, VALIDATION: 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionFiles:
    """The files with the questions of one task and split.

    Attributes:
        questions: of any format (`read_questions`).
        qrels: judgements (`read_qrels`), for queries whose file has none; they replace the
            positives in `questions`, and questions that are not judged are left out unless they
            have answers.
        passages: label of the passage file whose ids the questions and qrels use. Needed if several
            files are merged and an id means different passages in them.
    """

    questions: FilePath
    qrels: FilePath | None = None
    passages: str = ""


@dataclasses.dataclass(frozen=True)
class PrepareOptions(Checked):
    """How files become a collection; options named after tasks are for these tasks only.

    Attributes:
        strict: whether to refuse, at their first, empty passages, and positives that are not in the
            files; otherwise they are left out, counted and listed.
        validation_share: share of the training questions that become a validation split, where a
            task comes without one; never of the test questions. 0 makes none.
        task_shares: task -> shares of the splits of its file, where one holds several, in place of
            `SHARES`.
        validation_last: number of questions at the end of a file with several splits that are its
            validation split, instead of a share (TACO-DR: the last 500 of each training file); 0
            uses the shares.
        split_groups: task -> pattern; questions whose ids have the same match share a split.
        split_by_page: tasks of KILT's whose questions share a split where their positives are on
            one page: no split has a page of another's (CMU DoG's films).
        train_samples: task -> number of training questions that are kept, chosen by hash, before a
            validation share is taken from them; with `validation_last`, the number kept of the
            whole file, before its last questions are split off (TACO-DR: zsRE's 99,500 are 100,000
            less 500).
        page_gold_tasks: tasks of KILT's whose gold is always the whole page, as TACO-DR's AIDA.
        passage_words: words of a passage of what is cut: text files and KILT's pages. Set it to
            what the model reads in one piece.
        entity_tasks: tasks whose questions mark a mention with [START_ENT] and [END_ENT].
        distractors: share of the passages that are kept although no question has them as a
            positive, chosen by a hash of their ids. Below 1 the collection is smaller and still has
            every positive.
    """

    strict: bool = False
    validation_share: Rate = 0.0
    task_shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    validation_last: Natural = 0
    split_groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split_by_page: tuple[str, ...] = ()
    train_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    page_gold_tasks: tuple[str, ...] = ()
    passage_words: Positive = PASSAGE_WORDS
    entity_tasks: tuple[str, ...] = ()
    distractors: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation_last and (self.split_groups or self.split_by_page):
            problem = "validation_last, whose questions may be part of a group of the others"
            fix = "set validation_last = 0, or leave out split_groups and split_by_page"
            raise ConfigError(problem, where="PrepareOptions", fix=fix)

    def check_tasks(self, tasks: Collection[str]) -> None:
        """Checks that the tasks that options name are tasks of the files.

        Raises:
            ConfigError: naming the first option with another task.
        """
        for field in dataclasses.fields(self):
            named = getattr(self, field.name)
            if not isinstance(named, Mapping | tuple | list):
                continue
            if unknown := [task for task in named if task not in tasks]:
                raise ConfigError(
                    f"it names {', '.join(map(repr, unknown))}; the tasks are {', '.join(tasks)}",
                    where=f"PrepareOptions.{field.name}",
                    fix="correct the name, or leave the option out",
                )


# A file may hold several splits.
WHOLE = "+".join(SPLITS)
Files = FilePath | QuestionFiles
Tasks = Mapping[str, Files | Mapping[str, Files]]


@dataclasses.dataclass(frozen=True)
class QuestionSplit:
    """The questions of one task and split, read as often as needed.

    Attributes:
        task: their task.
        split: "train", "validation" or "test".
        sharing: all splits that their file is divided into.
        files: their files.
        options: how they are divided.
        pairs: whether the passages of their file are the collection's.
        keeps_unjudged: whether training questions without a positive stay.
        read_ids: ids of all questions of the file, once it has been read.
    """

    task: str
    split: str
    sharing: tuple[str, ...]
    files: QuestionFiles
    options: PrepareOptions
    pairs: bool = False
    keeps_unjudged: bool = False
    read_ids: set[str] = dataclasses.field(default_factory=set, compare=False)

    def questions(self) -> Iterator[Question]:
        """The split's questions, each with an id, in the file's order.

        Raises:
            DataError: malformed input; names file:line, the field and the fix.
        """
        count = self.options.train_samples.get(self.task) if "train" in self.sharing else None
        last = self.options.validation_last
        if last and len(self.sharing) > 1 and VALIDATION in self.sharing:
            questions = _sampled(self._all, self.task, count)
            if self.split == VALIDATION:
                return iter(collections.deque(questions, maxlen=last))
            others = tuple(split for split in self.sharing if split != VALIDATION)
            return self._of_split(_without_last(questions, last), others)
        return _sampled(
            lambda: self._of_split(self._all(), self.sharing),
            self.task,
            count if self.split == "train" else None,
        )

    def is_too_small_to_divide(self) -> bool:
        """Whether a file of all splits has few questions, and no option says how to divide it."""
        is_told = self.task in self.options.task_shares or self.options.validation_last
        if is_told or len(self.sharing) < len(SPLITS):
            return False
        return len(list(itertools.islice(self._all(), FEWEST))) < FEWEST

    def _all(self) -> Iterator[Question]:
        questions = read_questions(self.files.questions, pairs=self.pairs)
        judged = None
        if self.files.qrels is not None:
            judged = {judgement.query_id for judgement in read_qrels(self.files.qrels)}
        prefix = self.split if len(self.sharing) == 1 else _NUMBERED
        for number, question in enumerate(questions):
            if judged is None or question.id in judged or question.answers:
                id = question.id or f"{prefix}-{number}"
                self.read_ids.add(id)
                yield dataclasses.replace(question, id=id)

    def _of_split(
        self, questions: Iterable[Question], splits: tuple[str, ...]
    ) -> Iterator[Question]:
        shares = self.options.task_shares.get(self.task, SHARES)
        for question in questions:
            if splits == (self.split,) or self.split == split_of(
                self._group(question), task=self.task, splits=splits, shares=shares
            ):
                yield question

    def _group(self, question: Question) -> str:
        """What decides its split: the page of its positives, its id or a part of it, or its text.

        A task's pages and ids are its own; a text that two tasks ask is held out of both.
        """
        if self.task in self.options.split_by_page:
            pages = {place.page_id for place in question.provenance}
            if len(pages) != 1:
                problem = f"the positives of {question.id!r} are on {len(pages)} pages"
                fix = f"take {self.task!r} out of PrepareOptions.split_by_page"
                raise DataError(problem, where=f"{question.where}, field 'output'", fix=fix)
            return f"{self.task}\t{pages.pop()}"
        if (pattern := self.options.split_groups.get(self.task)) is not None:
            if (match := re.search(pattern, question.id)) is None:
                problem = f"the pattern {pattern!r} does not match the id {question.id!r}"
                fix = "correct the pattern in split_groups, or leave the task out of it"
                raise DataError(problem, where=f"{question.where}, field 'id'", fix=fix)
            return f"{self.task}\t{match.group()}"
        # Of rows that ask the same, one in training would answer one in a test; and the numbers of
        # those without an id follow the order of the rows.
        is_by_text = self.pairs or re.fullmatch(rf"{_NUMBERED}-\d+", question.id)
        return f"\t{question.text}" if is_by_text else f"{self.task}\t{question.id}"


def question_splits(
    tasks: Tasks, options: PrepareOptions, *, base: FilePath = "", label: str = ""
) -> list[QuestionSplit]:
    """The questions of each task and split.

    Args:
        tasks: task -> split -> file, or task -> file of all three splits; a split may be several,
            such as "train+validation".
        options: how files are divided.
        base: folder of relative paths; "" is the current one.
        label: of the passages that files refer to, unless they name others.

    Raises:
        ConfigError: a task's name that no folder can have; an unknown or repeated split.
    """
    splits = []
    for task, given in tasks.items():
        checked_name(task, "task")
        files_of_name = given if isinstance(given, Mapping) else {WHOLE: given}
        names = [split for name in files_of_name for split in name.split("+")]
        if len(set(names)) < len(names) or not set(names) <= set(SPLITS):
            fix = f"give each of {', '.join(SPLITS)} at most once, or several joined by '+': "
            fix += "a file that has no split in its name is of all three"
            raise ConfigError(f"splits {', '.join(files_of_name)}", where=f"task {task!r}", fix=fix)
        for name, files in files_of_name.items():
            if not isinstance(files, QuestionFiles):
                files = QuestionFiles(files)
            files = QuestionFiles(
                os.path.join(base, files.questions),
                None if files.qrels is None else os.path.join(base, files.qrels),
                files.passages or label,
            )
            sharing = tuple(name.split("+"))
            splits += [QuestionSplit(task, split, sharing, files, options) for split in sharing]
    return splits


def without_small(splits: Sequence[QuestionSplit]) -> list[QuestionSplit]:
    """The splits, but of files too small to divide the test alone, with all their questions."""
    # A file of all splits is asked once, and is its task's only one.
    small = {each.task for each in splits if each.split == "test" and each.is_too_small_to_divide()}
    if small:
        message = "fewer than %d questions are not divided, all are for the test: %s"
        logger.info(message, FEWEST, ", ".join(sorted(small)))
    return [
        dataclasses.replace(split, sharing=("test",)) if split.task in small else split
        for split in splits
        if split.task not in small or split.split == "test"
    ]


def _sampled(
    read: Callable[[], Iterator[Question]], task: str, count: int | None
) -> Iterator[Question]:
    """A sample of the questions; reads them twice, for the ids and for the sample."""
    if count is None:
        return read()
    chosen = sampled((question.id for question in read()), task=task, count=count)
    return (question for question in read() if question.id in chosen)


def _without_last(questions: Iterable[Question], count: int) -> Iterator[Question]:
    """All but the last `count`, read once; nothing if there are no more than these."""
    held: collections.deque[Question] = collections.deque()
    for question in questions:
        held.append(question)
        if len(held) > count:
            yield held.popleft()


def check_former_splits(
    data_dir: FilePath, collection: str, splits: Sequence[QuestionSplit], options: PrepareOptions
) -> None:
    """Refuses to leave an earlier preparation's other queries beside new training queries.

    Raises:
        ConfigError: they were held out of the same files, perhaps, and are training queries now.
    """
    for task, former in list_tasks(data_dir, collection).items():
        written = {split.split for split in splits if split.task == task}
        written |= {VALIDATION} if options.validation_share > 0 else set()
        left = [split for split in former if split not in written]
        if "train" in written and left:
            raise ConfigError(
                f"{left[0]} queries of an earlier preparation, which may be training queries now",
                where=f"{collection_directory(data_dir, collection)}/queries/{task}/{left[0]}",
                fix="delete this folder, or give the questions of all splits together",
            )


def split_of(group: str, *, task: str, splits: Sequence[str], shares: Mapping[str, float]) -> str:
    """The split of a query, by the hash of what must stay together.

    Args:
        group: what it shares with others of its split, such as its text.
        task: its task, for messages.
        splits: the splits to choose from.
        shares: share of each, relative to the others in `splits`.

    Raises:
        ConfigError: a share is missing or not above 0.
    """
    weights = [shares.get(split, 0.0) for split in splits]
    if min(weights) <= 0:
        fix = f"give a share above 0 to each of {', '.join(splits)}"
        raise ConfigError(f"shares {dict(shares)}", where=f"task {task!r}", fix=fix)
    place = hash_share(group) * sum(weights)
    for split, weight in zip(splits, weights, strict=True):
        if place < weight:
            return split
        place -= weight
    return splits[-1]


def sampled(ids: Iterable[str], *, task: str, count: int) -> frozenset[str]:
    """A random sample of `count` ids, chosen by hash; all if there are no more.

    Args:
        ids: the ids to choose from.
        task: the task, so that tasks are sampled independently.
        count: size of the sample.
    """
    ids = list(ids)
    if len(ids) <= count:
        return frozenset(ids)
    hashes = np.array([text_hash(f"sample\t{task}\t{id}") for id in ids], np.uint64)
    return frozenset(ids[i] for i in np.argsort(hashes, kind="stable")[:count])


def divide_by_positives(
    queries: Sequence[Query], *, share: float
) -> tuple[list[Query], list[Query]]:
    """Divides queries by a hash of their positive passages, so that no passage is on both sides.

    Queries that share a positive, directly or through other queries, stay together. The hash does
    not depend on the task: where each query has one positive, tasks of one collection are divided
    by the same passages. Of few queries one group at least is on each side, if there are two.

    Where judgements are so dense that most queries hang together, as CISI's, the queries are
    divided by a hash of their text, and passages may be on both sides.

    Args:
        queries: queries with rows of positives.
        share: expected share of the second part.

    Returns:
        Both parts, each in the order given; a query without a positive is in the first.
    """
    judged = [query for query in queries if query.positives]
    rows = sorted({row for query in judged for row in query.positives})
    place = {row: number for number, row in enumerate(rows)}
    pairs = [
        (place[query.positives[0]], place[row]) for query in judged for row in query.positives[1:]
    ]
    smallest = components(len(rows), pairs)
    group_of = {
        query.id: f"positive\t{rows[smallest[place[query.positives[0]]]]}" for query in judged
    }
    largest = max(collections.Counter(group_of.values()).values(), default=0)
    if largest > len(judged) / 2:
        group_of = {query.id: f"query\t{query.text}" for query in judged}
    hashes = {group: hash_share(group) for group in group_of.values()}
    if len(ordered := sorted(hashes.values())) > 1:
        share = min(max(share, ordered[1]), ordered[-1])
    parts: tuple[list[Query], list[Query]] = ([], [])
    for query in queries:
        held_out = bool(query.positives) and hashes[group_of[query.id]] < share
        parts[held_out].append(query)
    return parts


def components(size: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """For each of `size` items, the smallest item of its connected component.

    Example:
        >>> components(4, [(3, 1)])
        [0, 1, 2, 1]
    """
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    graph = scipy.sparse.coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), (size, size))
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    _, first = np.unique(labels, return_index=True)
    return first[labels].tolist()
