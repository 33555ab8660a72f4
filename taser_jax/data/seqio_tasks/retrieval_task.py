"""Retrieval tasks and mixtures: plain descriptions, which need neither data nor SeqIO.

Data and vocabulary are looked up when a task is used, in the `use_data` context around the use.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from taser_jax.data.collections.store import (
    SPLITS,
    PassageStore,
    QuerySet,
    list_tasks,
    write_queries,
)
from taser_jax.data.text.preprocessors import TaskPrompt
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.token_store.store import QueryNormalization, Titles
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Query

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf

# Maps a data set of queries that are still text, such as a filter.
Preprocessor = Callable[["tf.data.Dataset"], "tf.data.Dataset"]
# A share of the batches, or a function of the task.
Rate = float | Callable[["RetrievalTask"], float]


@dataclasses.dataclass(frozen=True)
class DataContext:
    """The data folder and vocabulary that tasks use."""

    data_dir: str
    vocabulary: Vocabulary


_CONTEXT: contextvars.ContextVar[DataContext | None] = contextvars.ContextVar("data", default=None)


@contextlib.contextmanager
def use_data(*, data_dir: str, vocabulary: Vocabulary) -> Iterator[None]:
    """Sets the collections' folder and the vocabulary that tasks use inside the `with`."""
    token = _CONTEXT.set(DataContext(str(data_dir), vocabulary))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def data_in_use() -> DataContext:
    """The values of the innermost enclosing `use_data`.

    Raises:
        ConfigError: there is no enclosing `use_data`.
    """
    context = _CONTEXT.get()
    if context is None:
        fix = "use tasks inside `with use_data(data_dir=..., vocabulary=...)`"
        raise ConfigError("no data and vocabulary are set", fix=fix)
    return context


@dataclasses.dataclass(frozen=True)
class RetrievalTask:
    """A task of a collection, whose queries are in row order.

    Attributes:
        name: the registered name.
        collection: the collection that its queries refer to.
        query_set: the task's name in the collection.
        normalization: normalisation of its queries.
        prompt: prompt before its queries.
        query_preprocessors: SeqIO runs them on its queries, before normalisation.
        query_length: tokens of its queries in a token store; None means the store's.
        source: SeqIO source of its queries; None: they are prepared.
        source_preprocessors: functions from data set to data set that give the source's examples
            the names `query`, `positives`, `query_id` and `hard_negatives`.
    """

    name: str
    collection: str
    query_set: str
    normalization: QueryNormalization = QueryNormalization.NONE
    prompt: TaskPrompt = TaskPrompt()
    query_preprocessors: tuple[Preprocessor, ...] = ()
    query_length: int | None = None
    source: seqio.DataSource | None = None
    source_preprocessors: tuple[Preprocessor, ...] = ()
    # Rates of SeqIO, such as seqio.mixing_rate_num_examples, ask for it.
    cache_dir: ClassVar[None] = None

    @property
    def description(self) -> str:
        """Fingerprint of the preprocessing of its texts."""
        code = [part for function in self.query_preprocessors for part in _described(function)]
        return fingerprint([*code, f"normalization {self.normalization.value}", repr(self.prompt)])

    @property
    def splits(self) -> Sequence[str]:
        """The splits there are; all names possible while no data are in use."""
        if self.source is not None:
            return [split for split in SPLITS if split in self.source.splits]
        if _CONTEXT.get() is None:
            return SPLITS
        return list_tasks(data_in_use().data_dir, self.collection).get(self.query_set, [])

    def open(self, split: str) -> QuerySet:
        """The query set of a split."""
        return QuerySet.open(data_in_use().data_dir, self.collection, self.query_set, split)

    def num_input_examples(self, split: str) -> int:
        """Number of queries of a split, inside `use_data`."""
        return len(self.open(split))

    def write(self, split: str) -> None:
        """Writes the source's queries beside the collection, unless they are there.

        All later commands, BM25 and evaluation included, find them as if they had been prepared.

        Raises:
            DataError: an example without a query or positives, or with an unknown passage id.
            ConfigError: the task already has other queries.
        """
        data_dir = data_in_use().data_dir
        queries = list(self._read(PassageStore.open(data_dir, self.collection), split))
        if split not in list_tasks(data_dir, self.collection).get(self.query_set, ()):
            write_queries(data_dir, self.collection, self.query_set, split, queries)
        elif list(self.open(split)) != queries:
            problem = f"task {self.query_set!r} already has queries of split {split!r}, not these"
            fix = "give the task another name, or delete these queries"
            raise ConfigError(problem, where=f"collection {self.collection!r}", fix=fix)

    def _read(self, store: PassageStore, split: str) -> Iterator[Query]:
        assert self.source is not None
        dataset = self.source.get_dataset(split, shuffle=False)
        for preprocessor in self.source_preprocessors:
            dataset = preprocessor(dataset)
        for number, example in enumerate(dataset.as_numpy_iterator()):
            where = f"source of task {self.query_set!r}, split {split!r}, example {number}"
            if missing := {"query", "positives"} - example.keys():
                names = f"no {' and no '.join(sorted(missing))}, but {', '.join(sorted(example))}"
                raise DataError(names, where=where, fix="rename them in source_preprocessors")
            yield Query(
                id=_text(example.get("query_id", f"{split}-{number}")),
                text=_text(example["query"]),
                task=self.query_set,
                positives=_rows(store, example["positives"], where),
                hard_negatives=_rows(store, example.get("hard_negatives", ()), where),
            )


def _rows(store: PassageStore, ids: npt.ArrayLike, where: str) -> tuple[int, ...]:
    rows = []
    for id in map(_text, np.atleast_1d(np.asarray(ids, object))):
        row = store.find(id)
        if row is None:
            fix = f"give ids of the task's collection, such as {store.ids[0]!r}"
            raise DataError(f"no passage has the id {id!r}", where=where, fix=fix)
        rows.append(row)
    return tuple(rows)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def number_of_queries(task: RetrievalTask) -> float:
    """A task's rate in a mixture: its training queries, those that its preprocessors drop, too.

    Where they drop none, each query is seen once per epoch.
    """
    return float(task.num_input_examples("train"))


@dataclasses.dataclass(frozen=True)
class RetrievalMixture:
    """Retrieval tasks and their rates.

    Attributes:
        name: the registered name.
        rates: task's name -> rate.
        tasks: the tasks, sorted by name.
        titles: form of the passages of collections for which no module registered one.
        passage_prompt: prompt before these passages.
    """

    name: str
    rates: Mapping[str, Rate]
    tasks: tuple[RetrievalTask, ...]
    titles: Titles = Titles.INCLUDE
    passage_prompt: TaskPrompt = TaskPrompt()

    @property
    def collection(self) -> str:
        """The collection of all its tasks."""
        return self.tasks[0].collection

    def weights(self, *, trained: Collection[str] | None = None) -> dict[str, float]:
        """Mixing weights, by the tasks' names in their collection (as in the token store).

        Rates that are functions of the task need the `use_data` context.

        Args:
            trained: the tasks with a train split, whose size a rate may depend on; None means all.
        """
        weights = {}
        for task in self.tasks:
            rate = self.rates[task.name]
            if trained is None or task.query_set in trained:
                weights[task.query_set] = float(rate(task) if callable(rate) else rate)
        return weights


def _described(function: Callable[..., object], known: Collection[object] = ()) -> list[str]:
    """A preprocessor's bound arguments and source code, and what that takes from around it."""
    parts = []
    while isinstance(function, functools.partial):
        parts.append(repr((function.args, sorted(function.keywords.items()))))
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        parts.append(repr(function))
        function = type(function)
    try:
        parts.append(inspect.getsource(function))
    except (OSError, TypeError):
        parts.append(f"{function.__module__}.{function.__qualname__}")
    for name, value in _around(function).items():
        if inspect.isfunction(value) and value.__module__ == function.__module__:
            parts += [] if value in known else _described(value, (*known, value))
        else:
            # Of other values, such as modules, no text is the same in every process.
            with contextlib.suppress(TypeError, ValueError):
                parts.append(f"{name} {json.dumps(value, sort_keys=True)}")
    return parts


def _around(function: Callable[..., object]) -> dict[str, object]:
    """The globals and the variables of enclosing functions that a function names."""
    if not inspect.isfunction(function):
        return {}
    codes = [function.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if inspect.iscode(part)]
    names = sorted({name for code in codes for name in code.co_names})
    outside = function.__globals__
    of_module = {name: outside[name] for name in names if name in outside}
    return of_module | dict(inspect.getclosurevars(function).nonlocals)
