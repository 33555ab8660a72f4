"""Sources of the examples of retrieval tasks: query sets and passage stores, in row order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from taser_jax.data.collections.store import SPLITS, PassageStore, QuerySet, list_tasks
from taser_jax.data.seqio_tasks.context import data_in_use, require_data

PASSAGES_SPLIT = "all"
_BLOCK = 1024


class QuerySource(seqio.FunctionDataSource):
    """The queries of one task of a collection, in row order."""

    def __init__(self, collection: str, task: str, *, query_length: int | None = None) -> None:
        self.collection, self.task, self.query_length = collection, task, query_length
        super().__init__(self._dataset, SPLITS)

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

    def num_input_examples(self, split: str) -> int:
        """Number of queries."""
        return len(self.open(split))

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed
        queries = self.open(split)
        rows = tf.RaggedTensorSpec([None, None], tf.int32, ragged_rank=1)
        signature = {
            "query": tf.TensorSpec([None], tf.string),
            "query_id": tf.TensorSpec([None], tf.string),
            "query_row": tf.TensorSpec([None], tf.int32),
            "positives": rows,
            "hard_negatives": rows,
        }
        blocks = tf.data.Dataset.from_generator(
            lambda: _query_blocks(queries), output_signature=signature
        )
        return with_tensors(blocks.unbatch())


class PassageSource(seqio.FunctionDataSource):
    """The passages of a collection, in row order."""

    def __init__(self, collection: str) -> None:
        self.collection = collection
        super().__init__(self._dataset, [PASSAGES_SPLIT])

    def open(self) -> PassageStore:
        """The passage store."""
        return PassageStore.open(require_data().data_dir, self.collection)

    def num_input_examples(self, split: str) -> int:
        """Number of passages."""
        return len(self.open())

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del split, shuffle_files, seed
        store = self.open()
        signature = {
            "title": tf.TensorSpec([None], tf.string),
            "text": tf.TensorSpec([None], tf.string),
            "passage_row": tf.TensorSpec([None], tf.int32),
        }
        blocks = tf.data.Dataset.from_generator(
            lambda: _passage_blocks(store), output_signature=signature
        )
        return blocks.unbatch()


def with_tensors(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Rows of ragged tensors as plain tensors, which SeqIO and ragged_batch require."""

    @tf.autograph.experimental.do_not_convert
    def identity(example: dict[str, Any]) -> dict[str, Any]:
        return {name: tf.identity(value) for name, value in example.items()}

    return dataset.map(identity)


def _query_blocks(queries: QuerySet) -> Iterator[dict[str, Any]]:
    remaining = iter(queries)
    for start in range(0, len(queries), _BLOCK):
        block = list(itertools.islice(remaining, _BLOCK))
        yield {
            "query": _utf8(q.text for q in block),
            "query_id": _utf8(q.id for q in block),
            "query_row": np.arange(start, start + len(block), dtype=np.int32),
            "positives": _ragged([q.positives for q in block]),
            "hard_negatives": _ragged([q.hard_negatives for q in block]),
        }


def _passage_blocks(store: PassageStore) -> Iterator[dict[str, Any]]:
    for start in range(0, len(store), _BLOCK):
        rows = range(start, min(start + _BLOCK, len(store)))
        passages = store.get_many(rows)
        yield {
            "title": _utf8(p.title for p in passages),
            "text": _utf8(p.text for p in passages),
            "passage_row": np.arange(rows.start, rows.stop, dtype=np.int32),
        }


def _utf8(texts: Iterator[str]) -> list[bytes]:
    return [text.encode("utf-8", "replace") for text in texts]


def _ragged(lists: Sequence[Sequence[int]]) -> tf.RaggedTensor:
    values = np.fromiter((value for values in lists for value in values), np.int32)
    return tf.RaggedTensor.from_row_lengths(values, [len(values) for values in lists])
