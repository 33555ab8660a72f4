"""`taser prepare`: files, or docstrings, as a collection; positives of questions with answers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from taser_jax.commands.inputs import answer_matcher, open_bm25
from taser_jax.data.collections.store import PassageStore, write_collection, write_queries
from taser_jax.data.prepare import collection as preparation
from taser_jax.data.prepare.collection import PassageFiles, left_out_directory, write_left_out
from taser_jax.data.prepare.splits import PrepareOptions, Tasks
from taser_jax.data.pydocs.build import TASKS, build_pydocs
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.metrics import AnswerMatcher
from taser_jax.interop.collections_by_name import as_folder
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.runs import NO_ROW, SearchResult
from taser_jax.storage.artifacts import COLLECTION, FilePath, split_path
from taser_jax.storage.errors import ConfigError, check_known
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.records import Query

PYDOCS = "pydocs"


@dataclasses.dataclass(frozen=True)
class PydocsOptions:
    """What of the built-in collection is made.

    Attributes:
        packages: modules to include; None means all.
        tasks: tasks to write; None means all six.
    """

    packages: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Bm25Positives:
    """The positives of questions that have only answers, found with BM25.

    Attributes:
        tasks: task with answers -> name of the task to write.
        index_dir: BM25's index is built there once and reused.
        regex_tasks: tasks whose answers are regular expressions, by their names with answers.
        config: parameters of BM25.
    """

    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    index_dir: str | None = None
    regex_tasks: tuple[str, ...] = ()
    config: Bm25Config = Bm25Config()


def prepare(
    *,
    data_dir: str,
    collection: str | None = None,
    directories: PassageFiles = (),
    passages: PassageFiles | None = None,
    queries: Tasks | None = None,
    directory: FilePath | None = None,
    options: PrepareOptions = PrepareOptions(),
    pydocs: PydocsOptions = PydocsOptions(),
    positives: Bm25Positives = Bm25Positives(),
) -> None:
    """Prepares folders whose files are detected, files given by name, or pydocs, as one collection.

    Several passage files are merged: passages with the same title and text become one; an id that
    another file has taken is written `label:id`. What the files lack is counted, and listed in
    left_out/.

    Example:
        `taser prepare my_beir` makes the collection my_beir; `taser prepare pydocs` the built-in
        one (for a folder of this name, write ./pydocs).

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write; None takes that of the only folder.
        directories: a folder, several, or name -> folder. The name is the label of its passages,
            and the task of files without one in their names. A folder may be a task of others,
            such as "mteb:SciFact" or "ir_datasets:beir/scifact".
        passages: a file, several (labelled by their names without suffixes), or label -> file.
        queries: task -> split -> questions, as a path or `QuestionFiles`.
        directory: base of relative paths; None is the current directory.
        options: how files are divided, and what they may lack.
        pydocs: what of pydocs is made.
        positives: tasks whose questions have only answers; BM25 finds their positives.

    Raises:
        ConfigError: no file, a task or label twice, options of other tasks, no name.
        DataError: malformed input; names file:line, the field and the fix.
    """
    if isinstance(directories, str | os.PathLike):
        directories = [directories]
    if collection is None and len(directories) != 1:
        problem, fix = f"{len(directories)} folders and no name", "name it: --gin.COLLECTION=NAME"
        raise ConfigError(problem, where="COLLECTION", fix=fix)
    if isinstance(directories, Mapping):
        directories = {label: as_folder(name) for label, name in directories.items()}
    else:
        directories = [as_folder(name) for name in directories]
    if collection is None:
        collection = pathlib.Path(next(iter(directories))).resolve().name
    if directories == [PYDOCS]:
        prepare_pydocs(data_dir=data_dir, collection=collection, **vars(pydocs))
    else:
        prepare_files(
            data_dir=data_dir,
            collection=collection,
            directories=directories,
            passages=passages,
            queries=queries,
            directory=directory,
            options=options,
            unjudged_tasks=tuple(positives.tasks),
        )
    if positives.tasks:
        find_positives(data_dir, collection, positives)


@writes("{data_dir}/{collection}", kinds=[COLLECTION])
def prepare_pydocs(
    *,
    data_dir: str,
    collection: str = PYDOCS,
    packages: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    train_queries: int | None = None,
) -> str:
    """Builds the built-in collection: docstrings of Python and of four packages, in six tasks.

    The text depends on the installed versions, which are printed with the checksum.

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        packages: modules to include; None means all.
        tasks: tasks to write; None means all six.
        train_queries: maximum number of training queries per task, drawn by the hash of their ids;
            None means all. Short trainings use few, and mining for the others takes minutes.

    Returns:
        The fingerprint of the passages.

    Raises:
        ConfigError: an unknown task.
    """
    check_known(tasks or (), TASKS, where="TASKS")
    with phase("build pydocs"):
        built = build_pydocs(packages)
    chosen = {task: built.queries[task] for task in TASKS if tasks is None or task in tasks}
    if train_queries is not None:
        for splits in chosen.values():
            splits["train"] = drawn_by_hash(splits["train"], train_queries)
    store = write_collection(data_dir, collection, built.passages)
    for task, splits in chosen.items():
        for split, queries in splits.items():
            if queries:
                write_queries(data_dir, collection, task, split, queries)
    versions = ", ".join(f"{name} {version}" for name, version in built.versions.items())
    logger.info("pydocs: %s passages, checksum %s", f"{len(store):,}", built.checksum)
    logger.info("pydocs: text of %s", versions)
    for task, splits in chosen.items():
        counts = ", ".join(f"{split} {len(queries):,}" for split, queries in splits.items())
        logger.info("pydocs: task %s: %s", task, counts)
    return store.fingerprint


def drawn_by_hash(queries: Sequence[Query], count: int) -> list[Query]:
    """Up to `count` queries in their order: those whose ids have the smallest hashes.

    The draw does not depend on the queries' order, and a larger one contains each smaller one.

    Args:
        queries: the queries of one task and split.
        count: maximum number of queries.
    """
    ids = sorted(
        (query.id for query in queries), key=lambda id: hashlib.sha256(id.encode()).digest()
    )
    drawn = set(ids[:count])
    return [query for query in queries if query.id in drawn]


@writes("{data_dir}/{collection}", kinds=[COLLECTION], may_be_remote=True)
def prepare_files(*, data_dir: FilePath, collection: str, **options: Any) -> None:
    """As `data.prepare.collection.prepare`, as the collection's only writer; logs a summary."""
    prepared = preparation.prepare(data_dir=data_dir, collection=collection, **options)
    say = functools.partial(logger.info, "%s: %s", prepared.collection)
    changed = f"{prepared.merged:,} duplicates merged, {prepared.renamed:,} renamed"
    changed += _listed(prepared.left_out)
    say(f"{prepared.passages:,} passages ({changed}), fingerprint {prepared.fingerprint}")
    for split in prepared.splits:
        counts = f"{split.queries:,} queries{_listed(split.left_out)}"
        say(f"task {split.task}, {split.split}: {counts}")
    if prepared.left_out or any(split.left_out for split in prepared.splits):
        say(f"listed with file and line in {left_out_directory(data_dir, prepared.collection)}")
    without = {split.task for split in prepared.splits if split.split == "train"}
    without -= {split.task for split in prepared.splits if split.split == "validation"}
    if without:
        fix = "VALIDATION_SHARE=0.1 makes one of a tenth of the training queries"
        say(f"no validation split of task {', '.join(sorted(without))}; {fix}")


def _listed(left_out: Mapping[str, int]) -> str:
    """What was left out, to be appended; empty where that is nothing."""
    return "".join(f", {count:,} {kind}" for kind, count in left_out.items())


def find_positives(
    data_dir: str, collection: str, options: Bm25Positives, *, depth: int = 100
) -> None:
    """Makes training sets of questions with answers: BM25's passages, by whether they contain one.

    Each question is searched together with its answers. Of the best passages, those that contain
    an answer become its positives, best first, and the others its hard negatives. Training and
    validation questions without a positive are dropped and listed in left_out/; test
    questions are copied as they are, for they are judged by their answers.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), appendix A.1.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        options: the tasks, and where BM25's index is.
        depth: number of the best passages that are considered for each question.

    Raises:
        ConfigError: an unknown task, one that would be written over itself, no answers, or no
            place for the index.
    """
    tasks, where = options.tasks, "BM25_POSITIVES"
    if options.index_dir is None:
        problem = "no directory for BM25's index"
        raise ConfigError(problem, where="BM25_INDEX_DIR", fix="set --gin.BM25_INDEX_DIR=...")
    store = PassageStore.open(data_dir, collection)
    check_known([*tasks, *options.regex_tasks], store.tasks, where=where)
    if set(tasks) & set(tasks.values()) or len(set(tasks.values())) < len(tasks):
        fix = "give each a new name of its own: {'webq': 'webq_bm25'}"
        raise ConfigError(f"tasks {dict(tasks)}", where=where, fix=fix)
    index = open_bm25(store, options.index_dir, options.config)
    for task, name in tasks.items():
        matcher = answer_matcher(store, task, options.regex_tasks)
        for split in store.tasks[task]:
            queries = list(store.queries(task, split))
            if not any(query.answers for query in queries):
                problem = f"no {split} question of {task!r} has answers"
                raise ConfigError(problem, where=where, fix="leave the task out")
            lost: list[str] = []
            divided: Iterator[Query] = iter(queries)
            if split != "test":
                with phase(f"positives of {task} {split}"):
                    texts = [" ".join([query.text, *query.answers]) for query in queries]
                    result = index.search(texts, depth)
                    divided = _divided(queries, result, matcher, lost)
            renamed = (dataclasses.replace(query, task=name) for query in divided)
            write_queries(data_dir, collection, name, split, renamed)
            write_left_out(data_dir, collection, split_path("", name, split, ".txt"), lost)
            counts = f"{len(queries) - len(lost):,} questions, {len(lost):,} dropped without"
            logger.info("%s %s: %s a positive among BM25's first %d", name, split, counts, depth)


def _divided(
    queries: list[Query], result: SearchResult, matcher: AnswerMatcher, lost: list[str]
) -> Iterator[Query]:
    """Queries with positives and negatives from their results; appends the others to `lost`."""
    hits = matcher.hits(result.rows, [query.answers for query in queries])
    for query, rows, right in zip(queries, result.rows, hits, strict=True):
        if not right.any():
            lost.append(f"{query.id}: {query.text}")
            continue
        wrong = ~right & (rows != NO_ROW)
        yield dataclasses.replace(
            query,
            positives=tuple(rows[right].tolist()),
            relevance=(),
            hard_negatives=tuple(rows[wrong].tolist()),
        )
