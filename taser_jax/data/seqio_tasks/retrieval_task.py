"""Registered items: a task of queries, a collection's passages, a mixture of tasks.

These are plain descriptions, which need neither data nor SeqIO; data and vocabulary are looked up
in the `use_data` context when texts become tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from taser_jax.data.blocks import in_blocks
from taser_jax.data.seqio_tasks.context import require_data
from taser_jax.data.seqio_tasks.sources import PassageSource, QuerySource
from taser_jax.data.text import preprocessors
from taser_jax.data.text.prompts import TaskPrompt
from taser_jax.data.token_store.text_settings import QueryNormalization, QuerySettings, Titles
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import ConfigError

_BLOCK = 4096


class TokenizedQuery(NamedTuple):
    """A query as a token store has it; positives and negatives are rows of the passages."""

    id: str
    tokens: Sequence[int]
    positives: Sequence[int]
    hard_negatives: Sequence[int]


class Sized(Protocol):
    """The argument of a rate function: one of our tasks or of SeqIO's."""

    def num_input_examples(self, split: str) -> int | None:
        """Number of queries of a split."""
        ...


Rate = float | Callable[[Sized], float]


def number_of_queries(task: Sized) -> float:
    """A task's rate in a mixture: its training queries, so that each is seen once per epoch."""
    return float(task.num_input_examples("train") or 0)


class QueryTask(Protocol):
    """A task whose queries can be tokenised: a `RetrievalTask`, or one that SeqIO runs."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def source(self) -> QuerySource:
        """Its queries."""
        ...

    @property
    def description(self) -> str:
        """Fingerprint of the preprocessing of its texts."""
        ...

    def num_input_examples(self, split: str) -> int | None:
        """Number of queries of a split."""
        ...

    def settings(self) -> QuerySettings | None:
        """How texts become tokens, inside `use_data`; None if the task's own code does it."""
        ...

    def check_room(self, length: int) -> None:
        """Refuses a length that leaves no room after the prompt; call it inside `use_data`."""
        ...

    def tokenized(self, split: str, length: int) -> Iterator[TokenizedQuery]:
        """The queries of a split in row order, inside `use_data`."""
        ...

    def over(self, source: QuerySource) -> QueryTask:
        """The same task over other queries; nothing is registered."""
        ...


class PassageTask(Protocol):
    """Passages that can be tokenised: `CollectionPassages`, or a task that SeqIO runs."""

    @property
    def name(self) -> str:
        """The registered name."""
        ...

    @property
    def source(self) -> PassageSource:
        """The passages."""
        ...

    @property
    def description(self) -> str:
        """Fingerprint of the preprocessing of their texts."""
        ...

    @property
    def titles(self) -> Titles | None:
        """Whether tokens include titles; None if the task's own code makes them."""
        ...

    def tokenized(self, length: int) -> Iterator[Sequence[int]]:
        """The ids of each passage in row order, inside `use_data`."""
        ...


@dataclasses.dataclass(frozen=True)
class RetrievalTask:
    """A task of a collection without preprocessors of its own.

    Attributes:
        name: the registered name.
        source: its queries.
        normalization: normalisation of its queries.
        prompt: prompt before its queries.
    """

    name: str
    source: QuerySource
    normalization: QueryNormalization = QueryNormalization.NONE
    prompt: TaskPrompt = TaskPrompt()

    @property
    def splits(self) -> Sequence[str]:
        """The splits there are; all names possible while no data are in use."""
        return self.source.splits

    @property
    def description(self) -> str:
        """Fingerprint of normalisation and prompt."""
        return fingerprint(query_steps(self.normalization, self.prompt))

    def num_input_examples(self, split: str) -> int:
        """Number of queries of a split."""
        return len(self.source.open(split))

    def settings(self) -> QuerySettings:
        """How texts become tokens, inside `use_data`."""
        return QuerySettings(self.normalization, tuple(self.prompt.ids(require_data().vocabulary)))

    def check_room(self, length: int) -> None:
        """Refuses a length that leaves no room after the prompt; call it inside `use_data`.

        Raises:
            ConfigError: names the task.
        """
        check_query_room(self.name, self.prompt, length)

    def tokenized(self, split: str, length: int) -> Iterator[TokenizedQuery]:
        """The queries of a split in row order, inside `use_data`."""
        vocabulary = require_data().vocabulary
        prompt = self.prompt.ids(vocabulary)
        for block in in_blocks(self.source.open(split), _BLOCK):
            texts = preprocessors.normalize_queries([q.text for q in block], self.normalization)
            ids = preprocessors.query_ids(texts, vocabulary, length, prompt=prompt)
            for query, tokens in zip(block, ids, strict=True):
                yield TokenizedQuery(query.id, tokens, query.positives, query.hard_negatives)

    def over(self, source: QuerySource) -> RetrievalTask:
        """The same task over other queries; nothing is registered."""
        return dataclasses.replace(self, source=source)


@dataclasses.dataclass(frozen=True)
class CollectionPassages:
    """The passages of a collection.

    Attributes:
        name: the registered name.
        source: the passages.
        titles: whether their tokens include titles.
    """

    name: str
    source: PassageSource
    titles: Titles = Titles.INCLUDE

    @property
    def description(self) -> str:
        """Fingerprint of the titles' setting."""
        return fingerprint(passage_steps(self.titles))

    def tokenized(self, length: int) -> Iterator[Sequence[int]]:
        """The ids of each passage in row order, inside `use_data`."""
        vocabulary = require_data().vocabulary
        for block in in_blocks(self.source.open(), _BLOCK):
            shown, texts = self.titles.applied([p.title for p in block], [p.text for p in block])
            yield from preprocessors.passage_ids(shown, texts, vocabulary, length)


@dataclasses.dataclass(frozen=True)
class RetrievalMixture:
    """Retrieval tasks and their rates.

    Attributes:
        name: the registered name.
        rates: task's name -> rate.
    """

    name: str
    rates: Mapping[str, Rate]

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks' names, sorted."""
        return sorted(self.rates)

    def rate(self, task: QueryTask) -> float:
        """A task's rate; those that are functions of its size need `use_data`."""
        rate = self.rates[task.name]
        return float(rate(task) if callable(rate) else rate)


def query_steps(normalization: QueryNormalization, prompt: TaskPrompt) -> list[str]:
    """Descriptions of the preprocessing of queries, for fingerprints."""
    return [f"normalization {normalization.value}", repr(prompt)]


def passage_steps(titles: Titles) -> list[str]:
    """Descriptions of the preprocessing of passages, for fingerprints."""
    return [f"titles {titles.value}"]


def check_query_room(task: str, prompt: TaskPrompt, length: int) -> None:
    """Refuses a length that leaves no room after a task's prompt; call it inside `use_data`.

    Raises:
        ConfigError: names the task.
    """
    vocabulary = require_data().vocabulary
    try:
        preprocessors.query_room(vocabulary, length, prompt=prompt.ids(vocabulary))
    except ConfigError as error:
        raise ConfigError(
            error.found,
            where=f"task {task!r}, {error.where}",
            expected=error.expected,
            fix=error.fix,
        ) from error
