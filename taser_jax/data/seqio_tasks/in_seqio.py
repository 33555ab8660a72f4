"""Retrieval tasks in SeqIO's registries, and SeqIO as what runs their preprocessors.

Imported only if SeqIO is needed: by tasks with preprocessors of their own, and by modules that
import SeqIO themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import seqio
import tensorflow as tf

from taser_jax.data.collections.store import SPLITS
from taser_jax.data.seqio_tasks.retrieval_task import RetrievalMixture, RetrievalTask, data_in_use
from taser_jax.data.text.preprocessors import query_ids
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Query

_ROWS = tf.TensorSpec([None], tf.int32)
_EXAMPLE = {
    "query": tf.TensorSpec([], tf.string),
    "query_id": tf.TensorSpec([], tf.string),
    "query_row": tf.TensorSpec([], tf.int32),
    "positives": _ROWS,
    "hard_negatives": _ROWS,
}


class SeqioQueries(seqio.FunctionDataSource):
    """Queries of a collection as a SeqIO source, in row order.

    Args:
        task: the task whose queries they are.
    """

    def __init__(self, task: RetrievalTask) -> None:
        self._task = task
        super().__init__(self._dataset, SPLITS)

    @property
    def splits(self) -> Sequence[str]:
        """The splits there are; all names possible while no data are in use."""
        return self._task.splits

    def num_input_examples(self, split: str) -> int:
        """Number of queries."""
        return self._task.num_input_examples(split)

    def _dataset(self, split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        del shuffle_files, seed
        queries = self._task.open(split)

        def examples() -> Iterator[dict[str, object]]:
            for row, query in enumerate(queries):
                yield {
                    "query": query.text.encode("utf-8", "replace"),
                    "query_id": query.id.encode("utf-8", "replace"),
                    "query_row": row,
                    "positives": np.array(query.positives, np.int32),
                    "hard_negatives": np.array(query.hard_negatives, np.int32),
                }

        return tf.data.Dataset.from_generator(examples, output_signature=_EXAMPLE)


# One for all: SeqIO mixes tasks only where their vocabularies are equal. Its features are ids.
_IDS = seqio.Feature(seqio.PassThroughVocabulary(size=0), add_eos=False)


def preprocessed(task: RetrievalTask, split: str) -> Iterator[Query]:
    """The queries of a split after the task's own preprocessors, in their order."""
    dataset = SeqioQueries(task).get_dataset(split, shuffle=False)
    for preprocessor in task.query_preprocessors:
        dataset = preprocessor(dataset)
    for example in dataset.as_numpy_iterator():
        yield Query(
            id=example["query_id"].decode(),
            text=example["query"].decode("utf-8", "replace"),
            task=task.query_set,
            positives=tuple(example["positives"].tolist()),
            hard_negatives=tuple(example["hard_negatives"].tolist()),
        )


def add(item: RetrievalTask | RetrievalMixture) -> None:
    """Registers a task, or a mixture with those of its tasks that are not registered yet."""
    if isinstance(item, RetrievalMixture):
        for task in item.tasks:
            if task.name not in seqio.TaskRegistry.names():
                add(task)
        seqio.MixtureRegistry.add(item.name, list(item.rates.items()))
    else:
        seqio.TaskRegistry.add(
            item.name,
            source=SeqioQueries(item),
            preprocessors=[*item.query_preprocessors, _tokenizer(item)],
            output_features={"query": _IDS},
        )


def find_mixture(name: str, tasks: Mapping[str, RetrievalTask]) -> RetrievalMixture:
    """A mixture of SeqIO's registry.

    Args:
        name: its name.
        tasks: name -> retrieval task.

    Raises:
        ConfigError: it has a task that is no retrieval task.
    """
    mixture = seqio.MixtureRegistry.get(name)
    names = sorted(task.name for task in seqio.get_subtasks(mixture))
    if others := [task for task in names if task not in tasks]:
        where, fix = f"mixture {name!r}", "register it with add_retrieval_task"
        raise ConfigError(f"{others[0]!r} is not a retrieval task", where=where, fix=fix)

    def rate(task: RetrievalTask) -> float:
        return mixture.get_rate(seqio.TaskRegistry.get(task.name))

    return RetrievalMixture(name, dict.fromkeys(names, rate), tuple(tasks[task] for task in names))


def _tokenizer(task: RetrievalTask) -> Callable[..., tf.data.Dataset]:
    """Preprocessor: `query` from text to ids, the text kept as `query_pretokenized`."""

    def tokenize(
        dataset: tf.data.Dataset, sequence_length: dict[str, int] | None = None
    ) -> tf.data.Dataset:
        vocabulary, length = data_in_use().vocabulary, (sequence_length or {}).get("query")
        settings = QuerySettings(task.normalization, tuple(task.prompt.ids(vocabulary)))

        def ids(text: bytes) -> np.ndarray:
            [row] = query_ids([text.decode("utf-8", "replace")], vocabulary, length, settings)
            return np.array(row, np.int32)

        @tf.autograph.experimental.do_not_convert
        def converted(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            # By Python: TensorFlow's own ids differ from those of `tokenizers` in rare characters.
            query = tf.numpy_function(ids, [example["query"]], tf.int32, stateful=False)
            texts = {"query_pretokenized": example["query"]}
            return {**example, **texts, "query": tf.ensure_shape(query, [None])}

        return dataset.map(converted, num_parallel_calls=tf.data.AUTOTUNE)

    return tokenize
