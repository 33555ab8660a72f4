"""Retrieval tasks as SeqIO tasks over a collection's query sets and passage store.

Registration needs neither data nor vocabulary: both are looked up when a task is used, in the
`use_data` context around the use.

Example:
    add_retrieval_task("trivia", collection="wikipedia")
    seqio.MixtureRegistry.add("open_qa", ["trivia", ("open_qa_nq", 2.0)], default_rate=1.0)

    with use_data(data_dir="data", vocabulary=load_vocabulary("vocabulary")):
        task = seqio.get_mixture_or_task("trivia")
        dataset = task.get_dataset({"query": 32}, split="validation", shuffle=False)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from taser_jax.data import preprocessors
from taser_jax.data.collections import SPLITS, PassageStore, QuerySet, list_tasks
from taser_jax.data.preprocessors import check_length
from taser_jax.data.prompts import TaskPrompt
from taser_jax.data.text_settings import QueryNormalization, QuerySettings, Titles
from taser_jax.data.vocabularies import Vocabulary
from taser_jax.errors import ConfigError

PASSAGES_SPLIT = "all"
_BLOCK = 1024

Preprocessor = Callable[[tf.data.Dataset], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class DataContext:
    """What tasks are run on."""

    data_dir: str
    vocabulary: Vocabulary


_CONTEXT: contextvars.ContextVar[DataContext | None] = contextvars.ContextVar("data", default=None)


@contextlib.contextmanager
def use_data(*, data_dir: str, vocabulary: Vocabulary) -> Iterator[DataContext]:
    """Sets the collections' folder and the vocabulary that tasks use inside the `with`."""
    context = DataContext(str(data_dir), vocabulary)
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        _CONTEXT.reset(token)


def add_retrieval_task(
    name: str,
    *,
    collection: str,
    task: str | None = None,
    normalization: QueryNormalization = QueryNormalization.NONE,
    query_preprocessors: Sequence[Preprocessor] = (),
    prompt: TaskPrompt = TaskPrompt(),
    query_length: int | None = None,
) -> seqio.Task:
    """Registers a task of a collection, and the collection's passages if nobody has yet.

    Its examples have `query` (token ids), `query_pretokenized`, `query_row`, `query_id`,
    `positives` and `hard_negatives` (rows of the passage store).

    Args:
        name: name in SeqIO's registry.
        collection: the collection its queries point into.
        task: the task's name in the collection (a folder under `queries/`); `name` if None.
        normalization: what is done to its queries first.
        query_preprocessors: functions from data set to data set, run on examples whose `query` is
            still text: filters, other words before the query.
        prompt: token ids put before its queries; a long query never pushes them out.
        query_length: tokens its queries are cut and padded to in a token store, special tokens and
            prompt included; None takes the store's.

    Returns:
        The SeqIO task.

    Raises:
        ConfigError: a length that leaves no room for special tokens.
    """
    if query_length is not None:
        check_length(query_length)
    if passages_task(collection) not in seqio.TaskRegistry.names():
        add_passages_task(passages_task(collection), collection=collection)
    return seqio.TaskRegistry.add(
        name,
        source=QuerySource(collection, name if task is None else task, query_length=query_length),
        preprocessors=[*query_preprocessors, _QueryTokenizer(normalization, prompt)],
        output_features={"query": _TOKENS},
    )


def add_passages_task(name: str, *, collection: str, titles: Titles = Titles.INCLUDE) -> seqio.Task:
    """Registers the passages of a collection, in row order: `passage` (token ids), `passage_row`.

    `add_retrieval_task` does so with titles under the name `passages_task(collection)`; call this
    for another form of the same passages, and name it to `tokenize_collection`.
    """
    return seqio.TaskRegistry.add(
        name,
        source=PassageSource(collection),
        preprocessors=[_PassageTokenizer(titles)],
        output_features={"passage": _TOKENS},
    )


def add_retrieval_mixture(
    name: str,
    tasks: Sequence[str | tuple[str, Any]],
    *,
    default_rate: Any = seqio.mixing_rate_num_examples,
) -> seqio.Mixture:
    """Registers a mixture, after checking that its tasks are registered.

    Args:
        name: name in SeqIO's registry.
        tasks: their names, or (name, rate).
        default_rate: rate of the others; their number of queries unless told otherwise.

    Returns:
        The SeqIO mixture.

    Raises:
        ConfigError: there is no task, or one is not registered; names the nearest.
    """
    if not tasks:
        raise ConfigError("no task", where=f"mixture {name!r}", expected="one or more")
    for task in tasks:
        find_mixture_or_task(task if isinstance(task, str) else task[0], where=f"mixture {name!r}")
    return seqio.MixtureRegistry.add(name, list(tasks), default_rate=default_rate)


def passages_task(collection: str) -> str:
    """Name of a collection's passages in SeqIO's registry."""
    return f"{collection}_passages"


def find_mixture_or_task(
    name: str, *, where: str = "MIXTURE_OR_TASK_NAME"
) -> seqio.Mixture | seqio.Task:
    """A registered mixture or task.

    Args:
        name: name in SeqIO's registry.
        where: what names it, for the message.

    Raises:
        ConfigError: there is none of that name; names the nearest.
    """
    registered = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
    if name not in registered:
        nearest = difflib.get_close_matches(name, registered, n=3)
        raise ConfigError(
            f"no mixture or task {name!r} is registered",
            where=where,
            expected=f"one of {', '.join(sorted(registered)) or '(none is registered)'}",
            fix=f"did you mean {' or '.join(map(repr, nearest))}?"
            if nearest
            else "import the module that registers it",
        )
    return seqio.get_mixture_or_task(name)


def retrieval_tasks(name: str) -> list[seqio.Task]:
    """The retrieval tasks of a mixture, or the one task, sorted by name; all of one collection.

    Raises:
        ConfigError: not registered, not retrieval tasks, two of one query set, or of several
            collections.
    """
    found = find_mixture_or_task(name)
    tasks = found.tasks if isinstance(found, seqio.Mixture) else [found]
    sources: dict[str, str] = {}
    for task in tasks:
        if not isinstance(task.source, QuerySource):
            raise ConfigError(
                f"{task.name!r} is no retrieval task",
                where=f"mixture or task {name!r}",
                fix="register it with add_retrieval_task",
            )
        if task.source.task in sources:
            raise ConfigError(
                f"{sources[task.source.task]!r} and {task.name!r} are the same queries",
                where=f"mixture {name!r}",
                expected="each task of a collection once",
            )
        sources[task.source.task] = task.name
    collections = sorted({task.source.collection for task in tasks})
    if len(collections) > 1:
        raise ConfigError(
            f"its tasks are of collections {', '.join(collections)}",
            where=f"mixture {name!r}",
            expected="tasks of one collection",
            fix="prepare their passages as one merged collection",
        )
    return tasks


def check_query_room(task: seqio.Task, length: int) -> None:
    """Refuses a length that a task's prompt uses up; inside `use_data`.

    Raises:
        ConfigError: naming the task.
    """
    vocabulary = _context().vocabulary
    for step in task.preprocessors:
        if isinstance(step, _QueryTokenizer):
            try:
                preprocessors.query_room(vocabulary, length, prompt=step.prompt.ids(vocabulary))
            except ConfigError as error:
                raise ConfigError(
                    error.found,
                    where=f"task {task.name!r}, {error.where}",
                    expected=error.expected,
                    fix=error.fix,
                ) from error


def query_settings(task: seqio.Task) -> QuerySettings | None:
    """How a task's queries become tokens, inside `use_data`; None where its own code does it."""
    for step in task.preprocessors:
        if isinstance(step, _QueryTokenizer):
            return QuerySettings(step.normalization, tuple(step.prompt.ids(_context().vocabulary)))
    return None


def passage_titles(task: seqio.Task) -> Titles | None:
    """Whether the passages' tokens have titles; None where its own code makes them."""
    steps = [step for step in task.preprocessors if isinstance(step, _PassageTokenizer)]
    return steps[0].titles if steps else None


def mixture_collection(name: str) -> str:
    """The collection that a mixture's or task's queries point into."""
    return retrieval_tasks(name)[0].source.collection


def mixture_rates(name: str) -> dict[str, float]:
    """SeqIO's mixing weights, by the tasks' names in their collection (as in the token store).

    Rates that are functions of the task's size, such as `seqio.mixing_rate_num_examples`, need the
    `use_data` context. A single task has weight 1.
    """
    found, tasks = find_mixture_or_task(name), retrieval_tasks(name)
    if not isinstance(found, seqio.Mixture):
        return {task.source.task: 1.0 for task in tasks}
    return {task.source.task: float(found.get_rate(task)) for task in tasks}


class QuerySource(seqio.FunctionDataSource):
    """The queries of one task of a collection, in row order."""

    def __init__(self, collection: str, task: str, *, query_length: int | None = None) -> None:
        self.collection, self.task, self.query_length = collection, task, query_length
        super().__init__(self._dataset, SPLITS)

    @property
    def splits(self) -> Sequence[str]:
        """The splits there are; all names possible while no data are in use."""
        context = _CONTEXT.get()
        if context is None:
            return SPLITS
        return list_tasks(context.data_dir, self.collection).get(self.task, [])

    def open(self, split: str) -> QuerySet:
        """The query set of a split."""
        return QuerySet.open(_context().data_dir, self.collection, self.task, split)

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
        return _with_tensors(blocks.unbatch())


class PassageSource(seqio.FunctionDataSource):
    """The passages of a collection, in row order."""

    def __init__(self, collection: str) -> None:
        self.collection = collection
        super().__init__(self._dataset, [PASSAGES_SPLIT])

    def open(self) -> PassageStore:
        """The passage store."""
        return PassageStore.open(_context().data_dir, self.collection)

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


class ContextVocabulary(seqio.Vocabulary):
    """Stands in SeqIO's features for the vocabulary of the `use_data` context."""

    @property
    def eos_id(self) -> int | None:
        """None: SeqIO would decode no further than to the first [SEP]."""
        return None

    @property
    def unk_id(self) -> int | None:
        """Id of what has no pieces."""
        return _context().vocabulary.unk_id

    @property
    def _base_vocab_size(self) -> int:
        return _context().vocabulary.size

    def _encode(self, s: str) -> list[int]:
        return _context().vocabulary.encode([s])[0]

    def _decode(self, ids: Sequence[int]) -> str:
        return _context().vocabulary.decode(ids)

    def _encode_tf(self, s: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
        if s.shape.rank == 0:
            return _context().vocabulary.encode_tf(s[tf.newaxis])[0]
        return _context().vocabulary.encode_tf(s)

    def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        vocabulary = _context().vocabulary

        def decode(ids: np.ndarray) -> np.ndarray:
            texts = [vocabulary.decode(row).encode() for row in ids.reshape(-1, ids.shape[-1])]
            return np.array(texts, object).reshape(ids.shape[:-1])

        texts = tf.numpy_function(decode, [ids], tf.string)
        return tf.ensure_shape(texts, ids.shape[:-1])


# One for all: SeqIO mixes tasks only where their vocabularies are equal.
_TOKENS = seqio.Feature(ContextVocabulary(), add_eos=False)


@dataclasses.dataclass(frozen=True)
class _QueryTokenizer:
    """Preprocessor: `query` from text to ids, the text kept as `query_pretokenized`."""

    normalization: QueryNormalization
    prompt: TaskPrompt = TaskPrompt()
    # SeqIO sets fields of this name to the lengths that a data set is asked for with.
    sequence_length: Mapping[str, int] | None = None

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        vocabulary, length = _context().vocabulary, (self.sequence_length or {}).get("query")
        prompt = self.prompt.ids(vocabulary)

        def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
            texts = preprocessors.normalize_queries(batch["query"], self.normalization)
            ids = preprocessors.query_ids(texts, vocabulary, length, prompt=prompt)
            return {**batch, "query": ids, "query_pretokenized": batch["query"]}

        return _map_batches(dataset, tokenize)


@dataclasses.dataclass(frozen=True)
class _PassageTokenizer:
    """Preprocessor: `title` and `text` to the ids of `passage`."""

    titles: Titles
    # SeqIO sets fields of this name to the lengths that a data set is asked for with.
    sequence_length: Mapping[str, int] | None = None

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        vocabulary, length = _context().vocabulary, (self.sequence_length or {}).get("passage")

        def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
            titles = batch["title"]
            if self.titles is Titles.OMIT:
                titles = tf.zeros_like(titles)
            ids = preprocessors.passage_ids(titles, batch["text"], vocabulary, length)
            return {"passage": ids, "passage_row": batch["passage_row"]}

        return _map_batches(dataset, tokenize)


def _context() -> DataContext:
    context = _CONTEXT.get()
    if context is None:
        raise ConfigError(
            "no data and vocabulary are set",
            expected="tasks to be used inside `with use_data(data_dir=..., vocabulary=...)`",
        )
    return context


def _map_batches(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    """Maps over batches, since TensorFlow's cost a call is many times that of a text."""
    batches = dataset.ragged_batch(_BLOCK)
    # Nothing here needs AutoGraph, which would spend seconds on rewriting Python.
    function = tf.autograph.experimental.do_not_convert(function)
    return _with_tensors(batches.map(function, num_parallel_calls=tf.data.AUTOTUNE).unbatch())


def _with_tensors(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Rows of ragged tensors as plain tensors, which is what SeqIO and ragged_batch know."""

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
