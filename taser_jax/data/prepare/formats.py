"""Turns files of other formats into a collection with its query sets: one function per format."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from taser_jax.data.collections.store import SPLITS, write_collection, write_queries
from taser_jax.data.files import file_digest
from taser_jax.data.prepare.merging import PassageMerger, PassageSource
from taser_jax.data.prepare.patterns import Tasks, below, by_task_and_split
from taser_jax.data.prepare.query_splits import divide_by_positives
from taser_jax.data.prepare.questions import (
    PrepareOptions,
    QuestionFiles,
    QuestionMapper,
    judged_beir_queries,
    read_questions,
)
from taser_jax.data.prepare.receipts import (
    PreparedCollection,
    PreparedSplit,
    already_prepared,
    write_receipt,
    write_without_positive,
)
from taser_jax.data.readers import beir, dpr, mesh, thesaurus, tsv
from taser_jax.data.readers.located import Question
from taser_jax.storage.artifacts import FilePath, fingerprint_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import EmptyPassages, Passage, Query
from taser_jax.storage.settings import to_plain

_FORMAT_VERSION = 1
VALIDATION = "validation"


PassageFiles = FilePath | Sequence[FilePath] | Mapping[str, FilePath]
ReadQuestions = Callable[[str, str, QuestionFiles], Iterator[Question]]


_DEFAULTS = PrepareOptions()


def prepare_dpr(
    *,
    data_dir: FilePath,
    collection: str,
    passages: PassageFiles,
    tasks: Tasks,
    directory: FilePath | None = None,
    options: PrepareOptions = _DEFAULTS,
) -> PreparedCollection:
    """Prepares DPR's files: passages TSV with a header, training JSON, `.qa.csv`.

    Example:
        >>> prepare_dpr(  # doctest: +SKIP
        ...     data_dir="data", collection="wikipedia", passages="psgs_w100.tsv",
        ...     tasks={"nq": {"train": "nq-train.json", "test": "nq-test.qa.csv"}})

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        passages: one file; several (labelled by their names without suffixes), merged; or
            label -> file.
        tasks: task -> split -> questions, as a path or `QuestionFiles`; or a pattern of these
            files, such as "nq/{task}-{split}.json" (`by_task_and_split`).
        directory: base of relative paths; None is the current directory.
        options: how to treat incomplete input.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    if directory is not None:
        passages, tasks = below(directory, passages), below(directory, tasks)
    return prepare_sources(
        data_dir,
        collection,
        _sources(passages, functools.partial(dpr.read_passages, empty=options.empty)),
        tasks,
        options,
    )


def prepare_tsv(
    *,
    data_dir: FilePath,
    collection: str,
    passages: PassageFiles,
    tasks: Tasks,
    options: PrepareOptions = _DEFAULTS,
) -> PreparedCollection:
    """Prepares plain TSV: passages (id, text, optionally title), queries (id, text), qrels.

    Example:
        >>> prepare_tsv(  # doctest: +SKIP
        ...     data_dir="data", collection="marco", passages="collection.tsv",
        ...     tasks={"marco": {"train": QuestionFiles("queries.tsv", qrels="qrels.tsv")}})

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        passages: one file, several, or label -> file; see `prepare_dpr`.
        tasks: task -> split -> `QuestionFiles`; or one `QuestionFiles` of patterns, such as
            `QuestionFiles("{task}.{split}.queries.tsv", qrels="{task}.{split}.qrels.tsv")`.
        options: how to treat incomplete input.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    return prepare_sources(
        data_dir,
        collection,
        _sources(passages, functools.partial(tsv.read_passages, empty=options.empty)),
        tasks,
        options,
    )


def prepare_mesh(
    *,
    data_dir: FilePath,
    collection: str,
    passages: PassageFiles,
    options: PrepareOptions = _DEFAULTS,
) -> PreparedCollection:
    """Prepares MeSH's XML as a collection without queries: one passage for each scope note.

    Example:
        >>> prepare_mesh(  # doctest: +SKIP
        ...     data_dir="data", collection="mesh", passages=["desc2024.xml", "qual2024.xml"])

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        passages: Descriptor and Qualifier sets: one file, several, or label -> file.
        options: how to treat incomplete input.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        DataError: malformed input; names file:line and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    read = functools.partial(mesh.read_passages, empty=options.empty)
    return prepare_sources(data_dir, collection, _sources(passages, read), {}, options)


def prepare_thesaurus(
    *,
    data_dir: FilePath,
    collection: str,
    passages: PassageFiles,
    options: PrepareOptions = _DEFAULTS,
) -> PreparedCollection:
    """Prepares a thesaurus as a collection without queries: one passage for each defined term.

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        passages: JSON lines or OBO: one file, several (merged), or label -> file.
        options: how to treat incomplete input.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    read = functools.partial(thesaurus.read_passages, empty=options.empty)
    return prepare_sources(data_dir, collection, _sources(passages, read), {}, options)


def prepare_beir(
    *,
    data_dir: FilePath,
    collection: str,
    directories: Mapping[str, FilePath],
    options: PrepareOptions = _DEFAULTS,
) -> PreparedCollection:
    """Prepares BEIR data sets, one per task, as one collection.

    It prepares every split that has qrels, with the queries judged in it: train, dev (as
    validation) and test.

    Example:
        >>> prepare_beir(  # doctest: +SKIP
        ...     data_dir="data", collection="scifact", directories={"scifact": "beir/scifact"})

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        directories: task -> folder with corpus.jsonl, queries.jsonl and qrels/.
        options: how to treat incomplete input.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        DataError: malformed input; names file:line, the field and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    sources, tasks = [], {}
    for task, directory in directories.items():
        read = functools.partial(beir.read_passages, directory, empty=options.empty)
        sources.append(PassageSource(task, beir.corpus_file(directory), read))
        tasks[task] = {
            split: QuestionFiles(beir.queries_file(directory), qrels=qrels, passages=task)
            for split, qrels in beir.qrels_files(directory).items()
        }
        if not tasks[task]:
            raise DataError(
                "there are no qrels",
                where=os.fspath(directory),
                expected="qrels/train.tsv, qrels/dev.tsv or qrels/test.tsv",
            )
    if not sources:
        raise ConfigError("no directory is given", where="directories")
    return prepare_sources(data_dir, collection, sources, tasks, options, read=_judged)


def prepare_sources(
    data_dir: FilePath,
    collection: str,
    sources: Sequence[PassageSource],
    tasks: Tasks,
    options: PrepareOptions,
    *,
    read: ReadQuestions | None = None,
    also: object = None,
) -> PreparedCollection:
    """Writes passages of any format as one collection, and questions as its query sets.

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        sources: passages, in the order of their rows.
        tasks: task -> split -> questions.
        options: how to treat incomplete input.
        read: reads a task's split; None chooses the reader by the file's name.
        also: further inputs that the result depends on, JSON-able.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.
    """
    read = read or (lambda task, split, files: read_questions(files, split))
    files = _checked_tasks(tasks, [source.label for source in sources])
    inputs = _inputs_fingerprint(sources, files, options, also)
    if (done := already_prepared(data_dir, collection, inputs)) is not None:
        return done
    merger = PassageMerger(sources)
    store = write_collection(
        data_dir, collection, merger.passages(), aliases=merger.aliases, empty=EmptyPassages.KEEP
    )
    resolver = merger.resolver(store)
    splits: list[PreparedSplit] = []
    for (task, split), question_files in files.items():
        mapper = QuestionMapper(task, split, question_files, resolver, options)
        queries = mapper.queries(read(task, split, question_files))
        carves = options.validation_share and split == "train" and (task, VALIDATION) not in files
        parts = _carved(queries, task, options.validation_share) if carves else {split: queries}
        for name, part in parts.items():
            written = write_queries(data_dir, collection, task, name, part)
            counts = mapper.counts if name == split else {}
            splits.append(PreparedSplit.of(written, counts))
        write_without_positive(data_dir, collection, task, split, mapper.without_positive)
    return write_receipt(
        data_dir, store, splits, inputs=inputs, merged=merger.merged, renamed=merger.renamed
    )


def _carved(queries: Iterable[Query], task: str, share: float) -> dict[str, list[Query]]:
    """A task's training and validation queries."""
    train, validation = divide_by_positives(list(queries), share=share)
    if not train or not validation:
        raise ConfigError(
            f"{len(validation)} of {len(train) + len(validation)} training queries become a "
            "validation split",
            where=f"PrepareOptions.validation_share = {share}, task {task!r}",
            expected="some on both sides; queries that share a positive stay together",
            fix="choose another share, or add a validation split to the files",
        )
    return {"train": train, VALIDATION: validation}


def _judged(task: str, split: str, files: QuestionFiles) -> Iterator[Question]:
    return judged_beir_queries(files)


def _sources(
    passages: PassageFiles, read: Callable[[FilePath], Iterator[Passage]]
) -> list[PassageSource]:
    if isinstance(passages, str | os.PathLike):
        passages = [passages]
    if not isinstance(passages, Mapping):
        labelled = {_label(path): path for path in passages}
        if len(labelled) < len(passages):
            raise ConfigError(
                "two passage files have the same name: "
                + ", ".join(os.fspath(path) for path in passages),
                where="passages",
                fix="give a label to each: {label: path}",
            )
        passages = labelled
    if not passages:
        raise ConfigError("no passage file is given", where="passages")
    return [
        PassageSource(label, path, functools.partial(read, path))
        for label, path in passages.items()
    ]


def _label(path: FilePath) -> str:
    return os.path.basename(os.fspath(path)).removesuffix(".gz").removesuffix(".tsv")


def _checked_tasks(tasks: Tasks, labels: Sequence[str]) -> dict[tuple[str, str], QuestionFiles]:
    checked = {}
    for task, splits in by_task_and_split(tasks).items():
        for split, files in splits.items():
            where = f"task {task!r}, split {split!r}"
            if split not in SPLITS:
                raise ConfigError(
                    f"unknown split {split!r}", where=where, expected=", ".join(SPLITS)
                )
            if files.passages and files.passages not in labels:
                raise ConfigError(
                    f"no passage file is labelled {files.passages!r}",
                    where=where,
                    expected="one of " + ", ".join(labels),
                )
            checked[task, split] = files
    return checked


def _inputs_fingerprint(
    sources: Sequence[PassageSource],
    files: Mapping[tuple[str, str], QuestionFiles],
    options: PrepareOptions,
    also: object,
) -> str:
    """Fingerprint of all inputs' bytes; reports a missing file before any work is done."""
    described: list[object] = [_FORMAT_VERSION, to_plain(options)]
    described += [] if also is None else [also]
    described += [[source.label, file_digest(source.path)] for source in sources]
    for (task, split), given in files.items():
        paths = (given.questions, given.ids, given.qrels)
        digests = [None if path is None else file_digest(path) for path in paths]
        described.append([task, split, given.passages, os.fspath(given.questions), *digests])
    return fingerprint_json(described)
