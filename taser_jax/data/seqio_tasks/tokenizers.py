"""SeqIO preprocessors that turn the texts of retrieval tasks into token ids.

They give the same ids as `retrieval_task`, for tasks with preprocessors of their own and for direct
use with SeqIO.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from taser_jax.data.seqio_tasks.context import require_data
from taser_jax.data.text import preprocessors
from taser_jax.data.text.prompts import TaskPrompt
from taser_jax.data.token_store.text_settings import QueryNormalization, Titles

_BLOCK = 1024


class ContextVocabulary(seqio.Vocabulary):
    """Stands in SeqIO's features for the vocabulary of the `use_data` context."""

    @property
    def eos_id(self) -> int | None:
        """None: SeqIO would decode no further than to the first [SEP]."""
        return None

    @property
    def unk_id(self) -> int | None:
        """Id of text that has no pieces."""
        return require_data().vocabulary.unk_id

    @property
    def _base_vocab_size(self) -> int:
        return require_data().vocabulary.size

    def _encode(self, s: str) -> list[int]:
        return require_data().vocabulary.encode([s])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        return require_data().vocabulary.decode(ids)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
        if s.shape.rank == 0:
            return require_data().vocabulary.encode_tf(s[tf.newaxis])[0]
        return require_data().vocabulary.encode_tf(s)

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        vocabulary = require_data().vocabulary

        def decode(ids: np.ndarray) -> np.ndarray:
            texts = [vocabulary.decode(row).encode() for row in ids.reshape(-1, ids.shape[-1])]
            return np.array(texts, object).reshape(ids.shape[:-1])

        texts = tf.numpy_function(decode, [ids], tf.string)
        return tf.ensure_shape(texts, ids.shape[:-1])


# One for all: SeqIO mixes tasks only where their vocabularies are equal.
TOKENS = seqio.Feature(ContextVocabulary(), add_eos=False)


@dataclasses.dataclass(frozen=True)
class QueryTokenizer:
    """Preprocessor: `query` from text to ids, the text kept as `query_pretokenized`."""

    normalization: QueryNormalization
    prompt: TaskPrompt = TaskPrompt()
    # SeqIO sets fields of this name to the requested sequence lengths.
    sequence_length: Mapping[str, int] | None = None

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Examples with ids."""
        vocabulary, length = require_data().vocabulary, (self.sequence_length or {}).get("query")
        prompt = self.prompt.ids(vocabulary)

        def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
            def convert(texts: list[str]) -> list[list[int]]:
                shown = preprocessors.normalize_queries(texts, self.normalization)
                return preprocessors.query_ids(shown, vocabulary, length, prompt=prompt)

            ids = _ids(convert, batch["query"])
            return {**batch, "query": ids, "query_pretokenized": batch["query"]}

        return _map_batches(dataset, tokenize)


@dataclasses.dataclass(frozen=True)
class PassageTokenizer:
    """Preprocessor: `title` and `text` to the ids of `passage`."""

    titles: Titles
    # SeqIO sets fields of this name to the requested sequence lengths.
    sequence_length: Mapping[str, int] | None = None

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Examples with ids."""
        vocabulary, length = require_data().vocabulary, (self.sequence_length or {}).get("passage")

        def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
            def convert(titles: list[str], texts: list[str]) -> list[list[int]]:
                return preprocessors.passage_ids(
                    *self.titles.applied(titles, texts), vocabulary, length
                )

            ids = _ids(convert, batch["title"], batch["text"])
            return {"passage": ids, "passage_row": batch["passage_row"]}

        return _map_batches(dataset, tokenize)


def with_tensors(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Rows of ragged tensors as plain tensors, which SeqIO and ragged_batch require."""

    @tf.autograph.experimental.do_not_convert
    def identity(example: dict[str, Any]) -> dict[str, Any]:
        return {name: tf.identity(value) for name, value in example.items()}

    return dataset.map(identity)


def _map_batches(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    """Maps over batches, since TensorFlow's cost per call is many times that per text."""
    batches = dataset.ragged_batch(_BLOCK)
    # Nothing here needs AutoGraph, which would spend seconds on rewriting Python.
    function = tf.autograph.experimental.do_not_convert(function)
    return with_tensors(batches.map(function, num_parallel_calls=tf.data.AUTOTUNE).unbatch())


def _ids(function: Callable[..., list[list[int]]], *columns: tf.Tensor) -> tf.RaggedTensor:
    """Ids of texts, by Python: TensorFlow's own differ from `tokenizers` in rare characters."""

    def convert(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = function(*([text.decode("utf-8", "replace") for text in a] for a in arrays))
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return ids, lengths

    ids, lengths = tf.numpy_function(convert, columns, (tf.int32, tf.int64), stateful=False)
    ids, lengths = tf.ensure_shape(ids, [None]), tf.ensure_shape(lengths, [None])
    return tf.RaggedTensor.from_row_lengths(ids, lengths, validate=False)
