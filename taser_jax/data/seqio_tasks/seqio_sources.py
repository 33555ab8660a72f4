"""Queries and passages of a collection as SeqIO sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from taser_jax.data.blocks import in_blocks
from taser_jax.data.collections.store import SPLITS, PassageStore, QuerySet
from taser_jax.data.seqio_tasks.sources import PassageSource, QuerySource
from taser_jax.data.seqio_tasks.tokenizers import with_tensors

PASSAGES_SPLIT = "all"
_BLOCK = 1024


class SeqioQueries(seqio.FunctionDataSource):
    """Queries of a collection as a SeqIO source, in row order.

    Args:
        queries: the queries.
    """

    def __init__(self, queries: QuerySource) -> None:
        self.queries = queries
        super().__init__(self._dataset, SPLITS)

    @property
    def splits(self) -> Sequence[str]:
        """The splits there are; all names possible while no data are in use."""
        return self.queries.splits

    def num_input_examples(self, split: str) -> int:
        """Number of queries."""
        return len(self.queries.open(split))

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed
        queries = self.queries.open(split)
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


class SeqioPassages(seqio.FunctionDataSource):
    """Passages of a collection as a SeqIO source, in row order.

    Args:
        passages: the passages.
    """

    def __init__(self, passages: PassageSource) -> None:
        self.passages = passages
        super().__init__(self._dataset, [PASSAGES_SPLIT])

    def num_input_examples(self, split: str) -> int:
        """Number of passages."""
        return len(self.passages.open())

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del split, shuffle_files, seed
        store = self.passages.open()
        signature = {
            "title": tf.TensorSpec([None], tf.string),
            "text": tf.TensorSpec([None], tf.string),
            "passage_row": tf.TensorSpec([None], tf.int32),
        }
        blocks = tf.data.Dataset.from_generator(
            lambda: _passage_blocks(store), output_signature=signature
        )
        return blocks.unbatch()


def _query_blocks(queries: QuerySet) -> Iterator[dict[str, Any]]:
    start = 0
    for block in in_blocks(queries, _BLOCK):
        yield {
            "query": _utf8(q.text for q in block),
            "query_id": _utf8(q.id for q in block),
            "query_row": np.arange(start, start + len(block), dtype=np.int32),
            "positives": _ragged([q.positives for q in block]),
            "hard_negatives": _ragged([q.hard_negatives for q in block]),
        }
        start += len(block)


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
