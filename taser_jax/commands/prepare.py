"""`taser prepare`: converts files, or docstrings, into a collection with query sets."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taser_jax.commands.inputs import check_known
from taser_jax.commands.positives import Bm25Positives, find_positives
from taser_jax.data.collections.store import (
    collection_directory,
    write_collection,
    write_queries,
)
from taser_jax.data.prepare import collection as preparation
from taser_jax.data.prepare.collection import PassageFiles
from taser_jax.data.prepare.options import PrepareOptions
from taser_jax.data.prepare.patterns import Tasks
from taser_jax.data.prepare.receipts import PreparedCollection, left_out_directory
from taser_jax.data.pydocs.build import build_pydocs
from taser_jax.data.pydocs.tasks import TASKS
from taser_jax.devices.hosts import writes
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.locks import one_writer
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
            and the task of files without one in their names.
        passages: a file, several (labelled by their names without suffixes), or label -> file.
        queries: task -> split -> questions, as a path or `QuestionFiles`, or a pattern of these
            files, such as "nq/{task}-{split}.json".
        directory: base of relative paths; None is the current directory.
        options: how files are divided, and what they may lack.
        pydocs: what of pydocs is made.
        positives: tasks whose questions have only answers; BM25 finds their positives.

    Raises:
        ConfigError: no file, a task or label twice, options of other tasks, no name.
        DataError: malformed input; names file:line, the field and the fix.
    """
    folders = [directories] if isinstance(directories, str | os.PathLike) else list(directories)
    if collection is None:
        if len(folders) != 1:
            fix = "name it: --gin.COLLECTION=NAME"
            raise ConfigError(f"{len(folders)} folders and no name", where="COLLECTION", fix=fix)
        collection = pathlib.Path(folders[0]).resolve().name
    if folders == [PYDOCS] and not isinstance(directories, Mapping):
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
        )
    if positives.tasks:
        find_positives(data_dir, collection, positives)


@writes("{data_dir}/{collection}")
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
    wanted = {task: built.queries[task] for task in TASKS if tasks is None or task in tasks}
    if train_queries is not None:
        for splits in wanted.values():
            splits["train"] = drawn_by_hash(splits["train"], train_queries)
    store = write_collection(data_dir, collection, built.passages)
    for task, splits in wanted.items():
        for split, queries in splits.items():
            if queries:
                write_queries(data_dir, collection, task, split, queries)
    versions = ", ".join(f"{name} {version}" for name, version in built.versions.items())
    logger.info("pydocs: %s passages, checksum %s", f"{len(store):,}", built.checksum)
    logger.info("pydocs: text of %s", versions)
    for task, splits in wanted.items():
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

    def digest(query: Query) -> bytes:
        return hashlib.sha256(query.id.encode()).digest()

    drawn = {query.id for query in sorted(queries, key=digest)[:count]}
    return [query for query in queries if query.id in drawn]


def reporting(
    function: Callable[..., PreparedCollection],
) -> Callable[..., PreparedCollection]:
    """Wraps a function to be its collection's only writer and to log a summary."""

    @functools.wraps(function)
    def prepare_and_report(**arguments: Any) -> PreparedCollection:
        data_dir, collection = arguments["data_dir"], arguments["collection"]
        with one_writer(collection_directory(data_dir, collection)):
            return _report(function(**arguments), data_dir)

    return prepare_and_report


def _report(prepared: PreparedCollection, data_dir: FilePath) -> PreparedCollection:
    logger.info(
        "%s: %s passages (%s duplicates merged, %s renamed%s), fingerprint %s%s",
        prepared.collection,
        f"{prepared.passages:,}",
        f"{prepared.merged:,}",
        f"{prepared.renamed:,}",
        _listed(prepared.left_out),
        prepared.fingerprint,
        ", reused" if prepared.reused else "",
    )
    for split in prepared.splits:
        logger.info(
            "%s: task %s, %s: %s queries%s",
            prepared.collection,
            split.task,
            split.split,
            f"{split.queries:,}",
            _listed(split.left_out),
        )
    if prepared.left_out or any(split.left_out for split in prepared.splits):
        listed = left_out_directory(data_dir, prepared.collection)
        logger.info("%s: listed with file and line in %s", prepared.collection, listed)
    there = {(split.task, split.split) for split in prepared.splits}
    for task in sorted({task for task, split in there if split == "train"}):
        if (task, "validation") not in there:
            logger.info(
                "%s: task %s has no validation split; VALIDATION_SHARE=0.1 makes one of a tenth "
                "of its training queries (PrepareOptions.validation_share)",
                prepared.collection,
                task,
            )
    return prepared


def _listed(left_out: Mapping[str, int]) -> str:
    """What was left out, to be appended; empty where that is nothing."""
    return "".join(f", {count:,} {kind}" for kind, count in left_out.items())


prepare_files = reporting(preparation.prepare)
