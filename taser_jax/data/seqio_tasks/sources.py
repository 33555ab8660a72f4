"""Sources of the texts of retrieval tasks: query sets and passage stores, in row order.

They do not need SeqIO; `in_seqio` wraps them for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from taser_jax.data.collections.store import (
    SPLITS,
    PassageStore,
    QuerySet,
    list_tasks,
    write_queries,
)
from taser_jax.data.seqio_tasks.context import data_in_use, require_data
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Query

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf


class QuerySource:
    """The queries of one task of a collection, in row order.

    Args:
        collection: the collection that they refer to.
        task: the task's name in it.
        query_length: tokens of its queries in a token store; None means the store's.
    """

    def __init__(self, collection: str, task: str, *, query_length: int | None = None) -> None:
        self.collection, self.task, self.query_length = collection, task, query_length

    @property
    def splits(self) -> Sequence[str]:
        """The splits there are; all names possible while no data are in use."""
        context = data_in_use()
        if context is None:
            return SPLITS
        return list_tasks(context.data_dir, self.collection).get(self.task, [])

    def open(self, split: str) -> QuerySet:
        """The query set of a split."""
        return QuerySet.open(require_data().data_dir, self.collection, self.task, split)


class OwnSource(QuerySource):
    """Queries from any SeqIO source; their first use writes them beside the collection.

    All later commands, BM25 and evaluation included, then find them as if they had been prepared.

    Args:
        collection: the collection that they refer to.
        task: the task's name in it.
        source: yields examples with `query`, `positives` (one or several ids of passages), and
            optionally `query_id` and `hard_negatives`; only its splits train, validation and test
            are used.
        preprocessors: functions from data set to data set that give its examples these names.
        query_length: tokens of its queries in a token store; None means the store's.
    """

    def __init__(
        self,
        collection: str,
        task: str,
        source: seqio.DataSource,
        *,
        preprocessors: Sequence[Callable[[tf.data.Dataset], tf.data.Dataset]] = (),
        query_length: int | None = None,
    ) -> None:
        self._source, self._preprocessors = source, preprocessors
        self._written: set[tuple[str, str]] = set()
        super().__init__(collection, task, query_length=query_length)

    @property
    def splits(self) -> Sequence[str]:
        """The source's splits that a token store can have."""
        return [split for split in SPLITS if split in self._source.splits]

    def open(self, split: str) -> QuerySet:
        """The query set of a split, which is written first if it does not exist yet.

        Raises:
            DataError: an example without a query or positives, or with an unknown passage id.
            ConfigError: the task already has other queries.
        """
        data_dir = require_data().data_dir
        if (data_dir, split) not in self._written:
            self._write(data_dir, split)
            self._written.add((data_dir, split))
        return super().open(split)

    def _write(self, data_dir: str, split: str) -> None:
        queries = list(self._read(PassageStore.open(data_dir, self.collection), split))
        if split not in list_tasks(data_dir, self.collection).get(self.task, ()):
            write_queries(data_dir, self.collection, self.task, split, queries)
        elif list(super().open(split)) != queries:
            raise ConfigError(
                f"task {self.task!r} has other queries of split {split!r} already",
                where=f"collection {self.collection!r}",
                expected="those that its source yields",
                fix="give the task another name, or delete these queries",
            )

    def _read(self, store: PassageStore, split: str) -> Iterator[Query]:
        dataset = self._source.get_dataset(split, shuffle=False)
        for preprocessor in self._preprocessors:
            dataset = preprocessor(dataset)
        for number, example in enumerate(dataset.as_numpy_iterator()):
            where = f"source of task {self.task!r}, split {split!r}, example {number}"
            if missing := {"query", "positives"} - example.keys():
                raise DataError(
                    f"no {' and no '.join(sorted(missing))}",
                    where=where,
                    expected=f"query and positives; it has {', '.join(sorted(example))}",
                    fix="rename its fields in source_preprocessors",
                )
            yield Query(
                id=_text(example.get("query_id", f"{split}-{number}")),
                text=_text(example["query"]),
                task=self.task,
                positives=_rows(store, example["positives"], where),
                hard_negatives=_rows(store, example.get("hard_negatives", ()), where),
            )


def _rows(store: PassageStore, ids: npt.ArrayLike, where: str) -> tuple[int, ...]:
    found = []
    for id in map(_text, np.atleast_1d(np.asarray(ids, object))):
        row = store.find(id)
        if row is None:
            raise DataError(
                f"no passage has the id {id!r}",
                where=where,
                expected=f"one of {len(store):,} ids, such as {store.ids[0]!r}",
                fix="give the ids of the collection that the task names",
            )
        found.append(row)
    return tuple(found)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class PassageSource:
    """The passages of a collection, in row order.

    Args:
        collection: its name.
    """

    def __init__(self, collection: str) -> None:
        self.collection = collection

    def open(self) -> PassageStore:
        """The passage store."""
        return PassageStore.open(require_data().data_dir, self.collection)
