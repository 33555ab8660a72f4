"""Data sets of several formats as one collection: KILT's files beside BEIR's folders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from taser_jax.data.id_index import hash_share
from taser_jax.data.prepare import query_splits
from taser_jax.data.prepare.formats import prepare_sources
from taser_jax.data.prepare.kilt_options import SHARES
from taser_jax.data.prepare.merging import PassageSource
from taser_jax.data.prepare.patterns import below
from taser_jax.data.prepare.questions import PrepareOptions, QuestionFiles, judged_beir_queries
from taser_jax.data.prepare.receipts import PreparedCollection
from taser_jax.data.readers import beir, kilt, tsv
from taser_jax.data.readers.located import Context, Question
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import EmptyPassages, Passage
from taser_jax.storage.settings import to_plain


@dataclasses.dataclass(frozen=True)
class KiltFiles:
    """A passage TSV with a header, and KILT query files whose provenances name its passages.

    Attributes:
        passages: the TSV: id, text, title, wikipedia_id and optionally more.
        queries: task -> split -> JSONL; a split such as "train+validation" is divided by a hash of
            the ids.
    """

    passages: FilePath
    queries: Mapping[str, Mapping[str, FilePath]]


@dataclasses.dataclass(frozen=True)
class BeirFolder:
    """A BEIR folder; its queries are one task, named by the folder's key in `sources`.

    Attributes:
        directory: the folder with corpus.jsonl, queries.jsonl and qrels/.
    """

    directory: FilePath


@dataclasses.dataclass(frozen=True)
class MergeOptions:
    """How data sets become one collection.

    Attributes:
        strictness: treatment of empty passages, missing positives and queries without any; share of
            training queries that become the validation split of a task without one.
        shares: shares of the splits if one file has several.
        task_shares: task -> shares of its splits, in place of `shares`.
        split_by_page: tasks of KILT's whose queries share a split where their positives are on one
            page: no split has a page of another's (CMU DoG's films).
        train_samples: task -> number of training queries that are kept, chosen by hash, before a
            validation split is taken from them. Positives of the others are distractors.
        distractors: share of the passages that are kept although no query has them as a positive,
            chosen by a hash of their ids. Below 1 the collection is smaller and still has every
            positive.
    """

    strictness: PrepareOptions = PrepareOptions()
    shares: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(SHARES))
    task_shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    split_by_page: tuple[str, ...] = ()
    train_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    distractors: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.distractors <= 1:
            raise ConfigError(
                f"distractors is {self.distractors}",
                where="MergeOptions",
                expected="a share between 0 and 1",
            )


@dataclasses.dataclass(frozen=True)
class _Queries:
    """The file of a task's split, and the splits that it is divided into."""

    files: QuestionFiles
    sharing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A question, and the pages of its positives; none in BEIR's files."""

    question: Question
    pages: frozenset[str] = frozenset()


def prepare_merged(
    *,
    data_dir: FilePath,
    collection: str,
    sources: Mapping[str, KiltFiles | BeirFolder],
    directory: FilePath | None = None,
    options: MergeOptions = MergeOptions(),
) -> PreparedCollection:
    """Prepares data sets of several formats as one collection.

    Passages with the same title and text become one; an id that another source has taken is
    written `source:id`.

    Example:
        >>> prepare_merged(  # doctest: +SKIP
        ...     data_dir="data", collection="mixed", sources={
        ...         "wiki": KiltFiles("passages.tsv", {"nq": {"train+validation": "train.jsonl"}}),
        ...         "scifact": BeirFolder("beir/scifact")})

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        sources: name -> files; passages are written in this order.
        directory: base of relative paths; None is the current directory.
        options: splits, incomplete input, and how many distractors are kept.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        ConfigError: no source, a task of two sources, or a split twice.
        DataError: malformed input, or a provenance without a passage; names file:line.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    found: dict[tuple[str, str], _Queries] = {}
    passages = []
    for label, source in sources.items():
        source = dataclasses.replace(
            source, **{name: below(directory or "", value) for name, value in vars(source).items()}
        )
        queries = _queries_of(label, source)
        if twice := sorted(found.keys() & queries.keys()):
            raise ConfigError(
                f"task {twice[0][0]!r} is in two sources",
                where="sources",
                fix="give the task, or the BEIR source, another name",
            )
        found |= queries
        passages.append(_passages_of(label, source, queries, options))
    if not passages:
        raise ConfigError("no source is given", where="sources")
    _check_tasks(options, sorted({task for task, _ in found}))
    tasks: dict[str, dict[str, QuestionFiles]] = {}
    for (task, split), one in found.items():
        tasks.setdefault(task, {})[split] = one.files

    def read(task: str, split: str, files: QuestionFiles) -> Iterator[Question]:
        return _of_split(found[task, split], task, split, options)

    splits = [[*key, *one.sharing] for key, one in found.items()]
    return prepare_sources(
        data_dir,
        collection,
        passages,
        tasks,
        options.strictness,
        read=read,
        also=[to_plain(options), splits],
    )


def _check_tasks(options: MergeOptions, known: Sequence[str]) -> None:
    for name in ("task_shares", "split_by_page", "train_samples"):
        if unknown := [task for task in getattr(options, name) if task not in known]:
            raise ConfigError(
                f"{name} has {', '.join(map(repr, unknown))}",
                where="MergeOptions",
                expected=f"tasks of the sources: {', '.join(known)}",
            )


def _queries_of(label: str, source: KiltFiles | BeirFolder) -> dict[tuple[str, str], _Queries]:
    """(task, split) -> its file."""
    found: dict[tuple[str, str], _Queries] = {}
    if isinstance(source, BeirFolder):
        queries = beir.queries_file(source.directory)
        files = {
            label: {
                split: QuestionFiles(queries, qrels=qrels)
                for split, qrels in beir.qrels_files(source.directory).items()
            }
        }
    else:
        files = {
            task: {split: QuestionFiles(path) for split, path in splits.items()}
            for task, splits in source.queries.items()
        }
    for task, splits in files.items():
        for name, one in splits.items():
            sharing = query_splits.named_splits(name, f"task {task!r}")
            for split in sharing:
                if (task, split) in found:
                    raise ConfigError(f"split {split!r} twice", where=f"task {task!r}")
                found[task, split] = _Queries(dataclasses.replace(one, passages=label), sharing)
    if not found:
        raise ConfigError(
            "there are no queries", where=f"source {label!r}", expected="a task with a split"
        )
    return found


def _passages_of(
    label: str,
    source: KiltFiles | BeirFolder,
    queries: Mapping[tuple[str, str], _Queries],
    options: MergeOptions,
) -> PassageSource:
    empty: EmptyPassages = options.strictness.empty
    if isinstance(source, BeirFolder):
        path: FilePath = beir.corpus_file(source.directory)
        read: Callable[[], Iterator[Passage]] = functools.partial(
            beir.read_passages, source.directory, empty=empty
        )
    else:
        path = source.passages
        read = functools.partial(_kilt_passages, path, empty)
    if options.distractors == 1:
        return PassageSource(label, path, read)

    def some() -> Iterator[Passage]:
        gold = {
            id
            for (task, split), one in queries.items()
            for id in _positives(one, task, split, options)
        }
        for passage in read():
            if passage.id in gold or hash_share(passage.id) < options.distractors:
                yield passage

    return PassageSource(label, path, some)


def _kilt_passages(path: FilePath, empty: EmptyPassages) -> Iterator[Passage]:
    return (one.passage for one in kilt.read_passages(path, empty=empty))


def _of_split(
    queries: _Queries, task: str, split: str, options: MergeOptions
) -> Iterator[Question]:
    """A split's questions; of training's, the sample."""
    count = options.train_samples.get(task) if split == "train" else None
    if count is None:
        return _shared(queries, task, split, options)
    ids = [question.id for question in _shared(queries, task, split, options)]
    kept = query_splits.sampled(ids, task=task, count=count)
    return (question for question in _shared(queries, task, split, options) if question.id in kept)


def _shared(queries: _Queries, task: str, split: str, options: MergeOptions) -> Iterator[Question]:
    """The questions whose hash, or whose page's, falls into the split."""
    shares = options.task_shares.get(task, options.shares)
    by_page = task in options.split_by_page
    for asked in _asked(queries.files):
        if queries.sharing == (split,) or split == query_splits.split_of(
            _only_page(asked, task) if by_page else asked.question.id,
            task=task,
            splits=queries.sharing,
            shares=shares,
        ):
            yield asked.question


def _only_page(asked: _Asked, task: str) -> str:
    if len(asked.pages) != 1:
        raise DataError(
            f"the positives of {asked.question.id!r} are on {len(asked.pages)} pages",
            where=f"{asked.question.where}, field 'output'",
            expected="one, since the page decides the split",
            fix=f"take {task!r} out of MergeOptions.split_by_page",
        )
    return next(iter(asked.pages))


def _asked(files: QuestionFiles) -> Iterator[_Asked]:
    """All questions of a file: the judged ones of BEIR's, or KILT's."""
    if files.qrels is not None:
        yield from (_Asked(question) for question in judged_beir_queries(files))
        return
    for query in kilt.read_queries(files.questions):
        proofs = [proof for output in query.outputs for proof in output.provenance or ()]
        if unnamed := [proof for proof in proofs if not proof.passage_id]:
            raise DataError(
                f"a provenance on {unnamed[0].title or unnamed[0].page_id!r} has no passage_id",
                where=f"{query.where}, field 'output'",
                expected="the id of a passage of the TSV",
                fix="add it, or use `taser prepare kilt`, which finds the passages of pages",
            )
        answers = [output.answer for output in query.outputs if output.answer]
        question = Question(
            where=query.where,
            text=query.text,
            id=query.id,
            answers=tuple(dict.fromkeys(answers)),
            positives=tuple(Context(one.title, "", one.passage_id) for one in proofs),
        )
        yield _Asked(question, frozenset(proof.page_id for proof in proofs))


def _positives(queries: _Queries, task: str, split: str, options: MergeOptions) -> Iterator[str]:
    """Ids of the passages that are positive for a query of the split."""
    if queries.files.qrels is None:
        for question in _of_split(queries, task, split, options):
            yield from (context.id for context in question.positives)
        return
    kept = {question.id for question in _of_split(queries, task, split, options)}
    for one in tsv.read_qrels(queries.files.qrels):
        if one.relevance > 0 and one.query_id in kept:
            yield one.passage_id
