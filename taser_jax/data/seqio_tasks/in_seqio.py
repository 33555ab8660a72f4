"""Retrieval tasks in SeqIO's registries, and SeqIO's tasks and mixtures as retrieval tasks.

Imported only if SeqIO is needed: by tasks with preprocessors of their own, and by modules that
register mixtures or tasks with SeqIO itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from taser_jax.data.seqio_tasks import retrieval_task
from taser_jax.data.seqio_tasks.context import require_data
from taser_jax.data.seqio_tasks.retrieval_task import (
    CollectionPassages,
    Rate,
    RetrievalMixture,
    RetrievalTask,
    TokenizedQuery,
)
from taser_jax.data.seqio_tasks.seqio_sources import (
    PASSAGES_SPLIT,
    SeqioPassages,
    SeqioQueries,
)
from taser_jax.data.seqio_tasks.sources import PassageSource, QuerySource
from taser_jax.data.seqio_tasks.tokenizers import (
    TOKENS,
    PassageTokenizer,
    QueryTokenizer,
)
from taser_jax.data.token_store.text_settings import QuerySettings, Titles
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import DataError

_BLOCK = 1024
Preprocessor = Callable[[tf.data.Dataset], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class _RunBySeqio:
    task: seqio.Task

    @property
    def name(self) -> str:
        """The registered name."""
        return self.task.name

    @property
    def description(self) -> str:
        """Fingerprint of the preprocessors."""
        return fingerprint(_steps(self.task))


@dataclasses.dataclass(frozen=True)
class SeqioTask(_RunBySeqio):
    """A retrieval task that SeqIO runs.

    Attributes:
        task: as registered; its source is `SeqioQueries`.
        source: its queries.
    """

    source: QuerySource

    def num_input_examples(self, split: str) -> int:
        """Number of queries of a split."""
        return len(self.source.open(split))

    def settings(self) -> QuerySettings | None:
        """How texts become tokens, inside `use_data`; None if the task's own code does it."""
        for step in self._tokenizers:
            ids = step.prompt.ids(require_data().vocabulary)
            return QuerySettings(step.normalization, tuple(ids))
        return None

    def check_room(self, length: int) -> None:
        """Refuses a length that leaves no room after the prompt; call it inside `use_data`.

        Raises:
            ConfigError: names the task.
        """
        for step in self._tokenizers:
            retrieval_task.check_query_room(self.name, step.prompt, length)

    def tokenized(self, split: str, length: int) -> Iterator[TokenizedQuery]:
        """The queries of a split in the order of the preprocessors' output, inside `use_data`."""
        for batch in _batches(self.task, split, {"query": length}):
            ids = (id.decode() for id in batch["query_id"].numpy())
            columns = (batch[name].to_list() for name in ("query", "positives", "hard_negatives"))
            yield from itertools.starmap(TokenizedQuery, zip(ids, *columns, strict=True))

    def over(self, source: QuerySource) -> SeqioTask:
        """The same task over other queries; nothing is registered."""
        task = seqio.Task(
            self.name,
            source=SeqioQueries(source),
            output_features=self.task.output_features,
            preprocessors=self.task.preprocessors,
        )
        return SeqioTask(task, source)

    @property
    def _tokenizers(self) -> list[QueryTokenizer]:
        return [step for step in self.task.preprocessors if isinstance(step, QueryTokenizer)]


@dataclasses.dataclass(frozen=True)
class SeqioPassageTask(_RunBySeqio):
    """A collection's passages that SeqIO runs.

    Attributes:
        task: as registered; its source is `SeqioPassages`.
        source: the passages.
    """

    source: PassageSource

    @property
    def titles(self) -> Titles | None:
        """Whether tokens include titles; None if the task's own code makes them."""
        steps = [step for step in self.task.preprocessors if isinstance(step, PassageTokenizer)]
        return steps[0].titles if steps else None

    def tokenized(self, length: int) -> Iterator[Sequence[int]]:
        """The ids of each passage in row order, inside `use_data`.

        Raises:
            DataError: the preprocessors left passages out, or changed their order.
        """
        expected = itertools.count()
        for batch in _batches(self.task, PASSAGES_SPLIT, {"passage": length}):
            for found in batch["passage_row"].numpy():
                if found != (row := next(expected)):
                    raise DataError(
                        f"row {found} came in place of row {row}",
                        where=f"SeqIO task {self.name!r}",
                        expected="preprocessors of passages to keep all of them in order",
                    )
            yield from batch["passage"].to_list()


@dataclasses.dataclass(frozen=True)
class SeqioMixture:
    """A mixture that was registered with SeqIO itself.

    Attributes:
        mixture: as registered.
    """

    mixture: seqio.Mixture

    @property
    def name(self) -> str:
        """The registered name."""
        return self.mixture.name

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks' names, sorted."""
        return [task.name for task in self.mixture.tasks]

    def rate(self, task: retrieval_task.QueryTask) -> float:
        """A task's rate; those that are functions of its size need `use_data`."""
        return float(self.mixture.get_rate(seqio.TaskRegistry.get(task.name)))


def add_task(task: RetrievalTask, *, query_preprocessors: Sequence[Preprocessor] = ()) -> SeqioTask:
    """Registers a task with SeqIO.

    Args:
        task: the task.
        query_preprocessors: functions from data set to data set for examples whose `query` is still
            text.
    """
    added = seqio.TaskRegistry.add(
        task.name,
        source=SeqioQueries(task.source),
        preprocessors=[*query_preprocessors, QueryTokenizer(task.normalization, task.prompt)],
        output_features={"query": TOKENS},
    )
    return SeqioTask(added, task.source)


def add(item: RetrievalTask | CollectionPassages | RetrievalMixture) -> None:
    """Registers with SeqIO what was registered without it."""
    match item:
        case RetrievalTask():
            add_task(item)
        case RetrievalMixture():
            add_mixture(item.name, item.rates)
        case CollectionPassages():
            seqio.TaskRegistry.add(
                item.name,
                source=SeqioPassages(item.source),
                preprocessors=[PassageTokenizer(item.titles)],
                output_features={"passage": TOKENS},
            )


def add_mixture(name: str, rates: Mapping[str, Rate]) -> SeqioMixture:
    """Registers a mixture with SeqIO.

    Args:
        name: its name.
        rates: name of a task or mixture -> rate.
    """
    return SeqioMixture(seqio.MixtureRegistry.add(name, list(rates.items())))


def remove(name: str) -> None:
    """Removes a task or mixture from SeqIO's registries."""
    seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove(name)


def registered() -> set[str]:
    """Names of all tasks and mixtures in SeqIO's registries."""
    return {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}


def find(name: str) -> SeqioMixture | SeqioTask | SeqioPassageTask | seqio.Task:
    """A task or mixture of SeqIO's registries; tasks over other texts are returned unchanged."""
    found = seqio.get_mixture_or_task(name)
    return SeqioMixture(found) if isinstance(found, seqio.Mixture) else _adapted(found)


def _adapted(task: seqio.Task) -> SeqioTask | SeqioPassageTask | seqio.Task:
    if isinstance(task.source, SeqioQueries):
        return SeqioTask(task, task.source.queries)
    if isinstance(task.source, SeqioPassages):
        return SeqioPassageTask(task, task.source.passages)
    return task


def _steps(task: seqio.Task) -> list[str]:
    """Descriptions of a task's preprocessors: their source code and bound arguments."""
    parts: list[str] = []
    for function in task.preprocessors:
        if isinstance(function, QueryTokenizer):
            parts += retrieval_task.query_steps(function.normalization, function.prompt)
            continue
        if isinstance(function, PassageTokenizer):
            parts += retrieval_task.passage_steps(function.titles)
            continue
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
    return parts


def _batches(task: seqio.Task, split: str, lengths: dict[str, int]) -> Iterator[dict[str, Any]]:
    """A task's examples in batches of ragged tensors, in the source's order."""
    dataset = task.get_dataset(lengths, split=split, shuffle=False, try_in_mem_cache=False)
    yield from dataset.ragged_batch(_BLOCK)
