"""Passage stores and query sets: TFDS data sets on ArrayRecord, where the key is the row.

Layout of a collection; each part appears whole:

    <data_dir>/<collection>/passages/                  records, ids, id and content indexes
    <data_dir>/<collection>/queries/<task>/<split>/    records
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from taser_jax.data.collections import records
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import phase, track
from taser_jax.storage.records import (
    HashIndex,
    Ids,
    Passage,
    Query,
    load_aliases,
    normalized_content,
    text_hash,
)

SPLITS = ("train", "validation", "test")
# Passages read at once.
_BLOCK = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Folders have this name, some with a suffix; file systems allow 255 bytes.
_LONGEST_NAME = 200


class PassageStore(records.RecordDataset[Passage]):
    """The passages of a collection by row, the key in embeddings and indexes.

    Example:
        >>> store = PassageStore.open("data", "wikipedia")  # doctest: +SKIP
        >>> store[store.row_of("12")].title  # doctest: +SKIP
        'Aaron'

    Args:
        directory: <data_dir>/<collection>/passages.
    """

    def __init__(self, directory: epath.Path) -> None:
        super().__init__(directory)
        self.name = self._metadata["collection"]
        self.ids: Sequence[str] = Ids.open(directory)
        self._by_id = HashIndex.open(directory, "id")
        self._by_content = HashIndex.open(directory, "content")
        self._aliases = load_aliases(directory)
        # Row -> page and title, of those asked for.
        self._headings: dict[int, tuple[str, str]] = {}

    @classmethod
    def open(cls, data_dir: artifacts.FilePath, collection: str) -> PassageStore:
        """Opens a collection's passages.

        Args:
            data_dir: folder of collections, local or gs://.
            collection: its name.

        Raises:
            DataError: it does not exist.
        """
        return cls(_passages_directory(data_dir, collection))

    @functools.cached_property
    def tasks(self) -> dict[str, list[str]]:
        """Task of the collection -> its splits, as `list_tasks` has them."""
        return list_tasks(self.directory.parent.parent, self.directory.parent.name)

    def queries(self, task: str, split: str) -> QuerySet:
        """Opens a task's queries, as `QuerySet.open` does."""
        return QuerySet.open(self.directory.parent.parent, self.directory.parent.name, task, split)

    def _decoded(self, record: Mapping[str, Any]) -> Passage:
        return Passage(**{name: record[name].decode() for name in records.PASSAGE_FEATURES})

    def row_of(self, id: str) -> int:
        """Row of a passage by its id, or by the id of a duplicate merged into it.

        Raises:
            DataError: no passage has this id.
        """
        row = self.find(id)
        if row is None:
            problem = f"none of its {len(self):,} passages has the id {id!r}"
            fix = f"take ids of this collection, such as {self.ids[0]!r}"
            raise DataError(problem, where=f"collection {self.name!r}", fix=fix)
        return row

    def find(self, id: str) -> int | None:
        """Row of a passage by its id or alias; None if there is none."""
        for row in self._by_id.candidates(text_hash(id)):
            if self.ids[row] == id:
                return row
        return self._aliases.get(id)

    def pages(self, rows: Sequence[int]) -> list[str]:
        """Page ids of rows, each read once; empty where the collection has none."""
        return [page for page, _ in self._headings_of(rows)]

    def titles(self, rows: Sequence[int]) -> list[str]:
        """Titles of rows, each read once."""
        return [title for _, title in self._headings_of(rows)]

    def _headings_of(self, rows: Sequence[int]) -> list[tuple[str, str]]:
        missing = sorted({row for row in rows if row not in self._headings})
        for start in range(0, len(missing), _BLOCK):
            block = missing[start : start + _BLOCK]
            for row, passage in zip(block, self.get_many(block), strict=True):
                self._headings[row] = passage.page_id, passage.title
        return [self._headings[row] for row in rows]

    def rows_with(self, *, title: str, text: str) -> list[int]:
        """Rows with this title and text, ignoring white space and Unicode form."""
        content = normalized_content(title, text)
        rows = self._by_content.candidates(text_hash(content))
        return [
            row
            for row, passage in zip(rows, self.get_many(rows), strict=True)
            if normalized_content(passage.title, passage.text) == content
        ]


class QuerySet(records.RecordDataset[Query]):
    """The queries of one task and split.

    Args:
        directory: <data_dir>/<collection>/queries/<task>/<split>.
    """

    def __init__(self, directory: epath.Path) -> None:
        super().__init__(directory)
        self.task = self._metadata["task"]
        self.split = self._metadata["split"]
        self.collection_fingerprint = self._metadata["collection_fingerprint"]

    @classmethod
    def open(cls, data_dir: artifacts.FilePath, collection: str, task: str, split: str) -> QuerySet:
        """Opens the queries of a task and split.

        Raises:
            DataError: they do not exist.
            FingerprintError: the collection has been rebuilt with other passages, so the rows
                that the queries refer to have changed.
        """
        directory = _queries_directory(data_dir, collection, task, split)
        queries = cls(directory)
        passages = records.read_metadata(_passages_directory(data_dir, collection))
        artifacts.require_equal(
            str(directory),
            recorded={"collection": queries.collection_fingerprint},
            expected={"collection": passages["fingerprint"]},
            fix="run `taser prepare` again with this task among its files",
        )
        return queries

    def _decoded(self, record: Mapping[str, Any]) -> Query:
        return Query(
            id=record["id"].decode(),
            text=record["text"].decode(),
            task=self.task,
            positives=tuple(map(int, record["positives"])),
            relevance=tuple(map(int, record["relevance"])),
            hard_negatives=tuple(map(int, record["hard_negatives"])),
            answers=tuple(answer.decode() for answer in record["answers"]),
        )


def list_tasks(data_dir: artifacts.FilePath, collection: str) -> dict[str, list[str]]:
    """Tasks of a collection, in alphabetical order, with their splits, in the order of SPLITS."""
    root = collection_directory(data_dir, collection) / "queries"
    if not root.exists():
        return {}
    tasks = {
        task.name: [split for split in SPLITS if (task / split / records.METADATA).exists()]
        for task in sorted(root.iterdir(), key=lambda path: path.name)
    }
    return {task: splits for task, splits in tasks.items() if splits}


def write_collection(
    data_dir: artifacts.FilePath,
    collection: str,
    passages: Iterable[Passage],
    *,
    aliases: Mapping[str, int] | None = None,
) -> PassageStore:
    """Writes a collection as a stream; a passage's row is its position in `passages`.

    Memory grows by about 100 bytes per passage, for the id and content indexes. The collection
    appears when it is complete.

    Args:
        data_dir: folder of collections, local or gs://.
        collection: name of the new one.
        passages: the passages in row order.
        aliases: further ids -> rows, read after the last passage.

    Returns:
        The store, open.

    Raises:
        DataError: no passage, a repeated id, or an id that is empty or has a newline or tab.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    directory = _passages_directory(data_dir, collection)
    where = f"collection {collection!r}"
    with artifacts.replacing(directory) as scratch:
        index = records.PassageIndexWriter(where)
        with phase(f"building {where}"):
            count = records.write_records(
                scratch,
                index.examples(track(passages, collection, unit=" passages")),
                name="passages",
                features=records.PASSAGE_FEATURES,
                where=where,
            )
            if not count:
                raise DataError("there are no passages", where=where, fix="check its source files")
            with artifacts.storage_errors(scratch):
                index.save(scratch, aliases or {})
        metadata = {"name": "passages", "collection": collection, "count": count}
        metadata["fingerprint"] = index.fingerprint
        records.finish(scratch, directory, metadata)
    return PassageStore(directory)


def write_queries(
    data_dir: artifacts.FilePath, collection: str, task: str, split: str, queries: Iterable[Query]
) -> QuerySet:
    """Writes the queries of one task and split beside the collection they refer to.

    Args:
        data_dir: folder of collections.
        collection: an existing one; its fingerprint is recorded.
        task: name of the task.
        split: "train", "validation" or "test".
        queries: of this task; their rows must exist.

    Returns:
        The query set, open.

    Raises:
        DataError: no query, a repeated id, or a row outside the collection.
        StorageError: the disk is full or cannot be written.
    """
    directory = _queries_directory(data_dir, collection, task, split)
    passages = records.read_metadata(_passages_directory(data_dir, collection))
    where = f"collection {collection!r}, task {task!r}, split {split!r}"
    content = artifacts.Fingerprint().add(passages["fingerprint"]).add(task).add(split)
    with artifacts.replacing(directory) as scratch:
        count = records.write_records(
            scratch,
            records.query_examples(queries, content, count=passages["count"], where=where),
            name="queries",
            features=records.QUERY_FEATURES,
            where=where,
        )
        if not count:
            fix = (
                "give a larger file, another share, or fewer splits; training queries need "
                "positives, which BM25_POSITIVES finds for questions with answers"
            )
            raise DataError("there are no queries", where=where, fix=fix)
        metadata = {"name": "queries", "task": task, "split": split, "count": count}
        metadata["fingerprint"] = content.hex()
        metadata["collection_fingerprint"] = passages["fingerprint"]
        records.finish(scratch, directory, metadata)
    return QuerySet(directory)


def collection_directory(data_dir: artifacts.FilePath, collection: str) -> epath.Path:
    """A collection's folder.

    Raises:
        ConfigError: an invalid name.
    """
    return epath.Path(data_dir) / checked_name(collection, "collection")


def _passages_directory(data_dir: artifacts.FilePath, collection: str) -> epath.Path:
    return collection_directory(data_dir, collection) / "passages"


def _queries_directory(
    data_dir: artifacts.FilePath, collection: str, task: str, split: str
) -> epath.Path:
    if split not in SPLITS:
        fix = f"take one of {', '.join(SPLITS)}"
        raise ConfigError(f"split {split!r}", where=f"task {task!r}", fix=fix)
    root = collection_directory(data_dir, collection) / "queries"
    return root / checked_name(task, "task") / split


def checked_name(name: str, what: str) -> str:
    """A name that can be a folder's; `what` it names is for the message.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        fix = "take letters, digits, '.', '_' and '-', starting with a letter or digit, at most "
        fix += f"{_LONGEST_NAME} bytes"
        raise ConfigError(f"{what} name {name[:_LONGEST_NAME]!r}", fix=fix)
    return name
