"""Mixtures over several collections: one merged collection, with the tasks' queries beside it."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from taser_jax.data.collections.records import METADATA
from taser_jax.data.collections.store import (
    PassageStore,
    QuerySet,
    collection_directory,
    write_collection,
    write_queries,
)
from taser_jax.data.prepare.merging import PassageMerger, PassageSource
from taser_jax.data.prepare.receipts import gold_path
from taser_jax.data.seqio_tasks.retrieval_task import QuerySource, RetrievalTask, data_in_use
from taser_jax.storage.artifacts import FilePath, check_version, read_json, write_bytes, write_json
from taser_jax.storage.errors import ConfigError, TaserError
from taser_jax.storage.locks import one_writer
from taser_jax.storage.progress import logger
from taser_jax.storage.records import EmptyPassages, Query

MERGED_FILE = "merged.json"
_FORMAT_VERSION = 1
_AGAIN = "run `taser tokenize` again"


class MergedSource(QuerySource):
    """The queries of a task of one collection, whose rows are those of a merged collection.

    `write_merged` writes them; until then only their splits are known.

    Args:
        collection: the merged collection.
        task: the task's name in it.
        original: the queries of the task's own collection.
    """

    def __init__(self, collection: str, task: str, original: QuerySource) -> None:
        super().__init__(collection, task, query_length=original.query_length)
        self._original = original

    @property
    def original(self) -> QuerySource:
        """The queries of the task's own collection."""
        return self._original

    @property
    def splits(self) -> Sequence[str]:
        """The splits in the task's own collection."""
        return self._original.splits


def merged_tasks(collection: str, tasks: Sequence[RetrievalTask]) -> tuple[RetrievalTask, ...]:
    """Tasks of several collections as tasks of a merged one; those of one collection as they are.

    Nothing is written. A task keeps its name in its collection; if several collections have a task
    of that name, it becomes `COLLECTION.TASK`.

    Example:
        tasks `train` of `a` and `b`, and `qa` of `b`, become `a.train`, `b.train` and `qa`.

    Args:
        collection: name of the merged collection.
        tasks: retrieval tasks.

    Returns:
        Copies with a `MergedSource`, in the same order.
    """
    sources = [task.source for task in tasks]
    if len({source.collection for source in sources}) == 1:
        return tuple(tasks)
    count = Counter(source.task for source in sources)
    names = [_name(source.collection, source.task, count) for source in sources]
    return tuple(
        dataclasses.replace(task, source=MergedSource(collection, name, task.source))
        for task, name in zip(tasks, names, strict=True)
    )


def write_merged(tasks: Sequence[RetrievalTask]) -> None:
    """Writes the collection of `merged_tasks` and their queries, inside `use_data`.

    Passages with the same title and text become one, also across collections, and the rows of
    positives and hard negatives change accordingly: two positives that became one count once, with
    the higher grade, and a hard negative that became a positive is dropped. Passages are in the
    order of their collections' names. The same tasks over the same data change nothing.

    Args:
        tasks: tasks of one merged collection.

    Raises:
        ConfigError: a collection of this name was prepared, not merged.
        DataError: a collection or its queries are not prepared.
        StorageError: the disk is full or the data folder cannot be written.
        BusyError: another process is merging the same collections.
    """
    moved = [
        _Moved(task.source.task, split, own.collection, own.open(split))
        for task in tasks
        for own in [task.source.original]
        for split in own.splits
    ]
    _merge(data_in_use().data_dir, tasks[0].source.collection, moved)


@dataclasses.dataclass(frozen=True)
class _Moved:
    """One task's split in a merged collection: its name there, and its origin."""

    task: str
    split: str
    collection: str
    queries: QuerySet

    @property
    def name(self) -> str:
        return f"{self.task}/{self.split}"


def _merge(data_dir: FilePath, name: str, moved: Sequence[_Moved]) -> None:
    directory = collection_directory(data_dir, name)
    _check_ours(data_dir, name)
    labels = sorted({part.collection for part in moved})
    stores = {label: PassageStore.open(data_dir, label) for label in labels}
    inputs = {
        "collections": {label: store.fingerprint for label, store in stores.items()},
        "queries": {part.name: part.queries.fingerprint for part in moved},
    }
    with one_writer(directory):
        before = _read(directory)
        if before.get("inputs") == inputs and _is_intact(data_dir, name, before, moved):
            return
        _remove_former(directory, before, {part.name for part in moved})
        # Written first and without `passages`, so that an interrupted merge is recognised.
        content = {"format_version": _FORMAT_VERSION, "inputs": inputs}
        write_json(directory / MERGED_FILE, content)
        store, rows, merged = _write_passages(data_dir, name, stores)
        for part in moved:
            queries = _with_rows(part.queries, part.task, rows[part.collection])
            written = write_queries(data_dir, name, part.task, part.split, queries)
            if gold_path(part.queries).exists():
                # KILT's own gold names pages and queries, not rows.
                write_bytes(gold_path(written), gold_path(part.queries).read_bytes())
        write_json(directory / MERGED_FILE, {**content, "passages": store.fingerprint})
    logger.info(
        "collection %s: %s passages of %s in one, %s were in it already",
        name,
        f"{len(store):,}",
        ", ".join(labels),
        f"{merged:,}",
    )


def _name(collection: str, task: str, count: Mapping[str, int]) -> str:
    return task if count[task] == 1 else f"{collection}.{task}"


def _check_ours(data_dir: FilePath, name: str) -> None:
    """Refuses to replace a collection that was not made by merging."""
    directory = collection_directory(data_dir, name)
    is_other = (directory / "passages").exists() and not (directory / MERGED_FILE).exists()
    if is_other or (directory / "prepare.json").exists():
        raise ConfigError(
            f"the mixture's tasks are of several collections, and a collection {name!r} is there "
            "already: the merged one gets the mixture's name",
            where=os.fspath(directory),
            fix="give the mixture another name",
        )


def _read(directory: epath.Path) -> dict[str, Any]:
    path = directory / MERGED_FILE
    content = read_json(path, absent={}, fix=f"delete it and {_AGAIN}")
    if content:
        check_version(content, _FORMAT_VERSION, where=path, fix=f"delete it and {_AGAIN}")
    return content


def _is_intact(
    data_dir: FilePath, name: str, content: Mapping[str, object], moved: Sequence[_Moved]
) -> bool:
    """Whether all that was written is still there."""
    try:
        same = PassageStore.open(data_dir, name).fingerprint == content.get("passages")
        return same and all(
            len(QuerySet.open(data_dir, name, part.task, part.split)) == len(part.queries)
            for part in moved
        )
    except TaserError:
        return False


def _write_passages(
    data_dir: FilePath, name: str, stores: Mapping[str, PassageStore]
) -> tuple[PassageStore, dict[str, np.ndarray], int]:
    """The merged passages; each collection's passages as rows of them; how many were merged."""
    merger = PassageMerger(
        [
            PassageSource(label, collection_directory(data_dir, label), store.iterate)
            for label, store in stores.items()
        ]
    )
    store = write_collection(
        data_dir, name, merger.passages(), aliases=merger.aliases, empty=EmptyPassages.KEEP
    )
    return store, {label: merger.rows(label) for label in stores}, merger.merged


def _with_rows(queries: QuerySet, task: str, rows: np.ndarray) -> Iterator[Query]:
    """The queries of a task, with rows of the merged collection."""
    for query in queries:
        grades: dict[int, int] = {}
        for row, grade in zip(
            rows[list(query.positives)].tolist(),
            query.relevance or (1,) * len(query.positives),
            strict=True,
        ):
            grades[row] = max(grade, grades.get(row, grade))
        negatives = dict.fromkeys(rows[list(query.hard_negatives)].tolist())
        yield dataclasses.replace(
            query,
            task=task,
            positives=tuple(grades),
            relevance=tuple(grades.values()) if query.relevance else (),
            hard_negatives=tuple(row for row in negatives if row not in grades),
        )


def _remove_former(directory: epath.Path, before: Mapping[str, Any], present: set[str]) -> None:
    """Removes query sets of an earlier mixture of this name, whose rows are no longer valid."""
    for name in sorted(set(before.get("inputs", {}).get("queries", ())) - present):
        path = directory / "queries" / name
        if (path / METADATA).exists():
            path.rmtree()
