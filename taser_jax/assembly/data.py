"""Training's inputs: the token store, its queries with mined negatives, batches on devices."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from taser_jax.data.batches.draws import queries_of, rates_from_weights
from taser_jax.data.batches.every_task import Stream
from taser_jax.data.batches.stream import BatchingConfig, prefetch
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.negatives import negatives_path, read_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Batch
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.errors import ConfigError, check_known, check_names_some
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import read_typed

# Beside the token store: the SeqIO mixture it was made from, with its sampling weights.
MIXTURE_FILE = "mixture.json"


class _MixtureFile(msgspec.Struct):
    weights: dict[str, float]


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """What a training reads.

    Attributes:
        token_store: tokens of passages and queries, from `taser tokenize`; "" in a dry run without.
        tasks: tasks to train on; None means all of the token store with a train split.
        negatives_dirs: hard negatives from `taser mine`, instead of those in the token store;
            several directories are joined per query.
        feature_lengths: {"query": ..., "passage": ...}; checked against the token store.
        augmentation_dir: documents of the queries, from `taser augment`; for models that fuse them.
        documents: documents fused with each query, K.
        shared_embeddings: embeddings by text of a frozen passage tower, from `taser encode` or
            `taser memory add`; training reads these and encodes no passage.
    """

    token_store: str
    tasks: Sequence[str] | None = None
    negatives_dirs: Sequence[str] = ()
    feature_lengths: Mapping[str, int] | None = None
    augmentation_dir: str | None = None
    documents: int = 10
    shared_embeddings: str | None = None


def training_queries(
    store: TokenStore,
    *,
    task_names: Sequence[str] | None = None,
    negatives_dirs: Sequence[str] = (),
    split: str = "train",
) -> dict[str, TokenizedQueries]:
    """Queries of a split by task, with mined negatives in place of the store's own.

    Training queries that mining dropped, for want of a negative, are left out.

    Args:
        store: the token store.
        task_names: tasks wanted; None means all that have the split.
        negatives_dirs: from `taser mine`; a directory without this task and split adds nothing.
        split: split of the queries.
    """
    check_names_some(task_names)
    names = task_names or [task for task, splits in store.tasks.items() if split in splits]
    tasks = {}
    for name in names:
        if task_names and split != "train" and split not in store.tasks.get(name, ()):
            continue
        queries = store.queries(name, split)
        of_directories = [
            read_negatives(
                directory,
                name,
                split,
                queries.query_ids,
                collection_fingerprint=store.metadata.collection_fingerprint,
            )
            for directory in negatives_dirs
            if negatives_path(directory, name, split).exists()
        ]
        if of_directories:
            lines = list(zip(*of_directories, strict=True))
            joined = Ragged.from_lists(
                np.concatenate([negatives.rows for negatives in line]) for line in lines
            )
            queries = queries.with_hard_negatives(joined)
            dropped = np.array([any(each.is_dropped for each in line) for line in lines], bool)
            # Of those that mining dropped another directory may have negatives.
            trained_on = np.flatnonzero(~dropped | (queries.hard_negatives.lengths > 0))
            if split == "train" and len(trained_on) < len(queries):
                count = f"{len(queries) - len(trained_on)} of {len(queries)} queries"
                logger.info("%s: %s are left out, as they have no negative", name, count)
                queries = queries_of(queries, trained_on)
        elif negatives_dirs and split == "train":
            problem = f"no negatives for task {name!r}"
            expected = f"a file {negatives_path('', name, split)}"
            fix = "mine negatives for this task, or leave it out of TASKS"
            raise ConfigError(problem, where=", ".join(negatives_dirs), expected=expected, fix=fix)
        tasks[name] = queries
    return tasks


def query_sets(
    store: TokenStore,
    tasks: Sequence[str] | None,
    splits: Sequence[str] | None,
    *,
    splits_setting: str,
) -> list[TokenizedQueries]:
    """The token store's query sets of these tasks and splits, without empty ones.

    Args:
        store: the token store.
        tasks: tasks wanted; None means all.
        splits: splits wanted; None means all.
        splits_setting: the setting that names the splits, for messages.

    Raises:
        ConfigError: a task or split that the token store does not have.
    """
    check_known(tasks or (), store.tasks, where="TASKS")
    there = {split for of_task in store.tasks.values() for split in of_task}
    check_known(splits or (), there, where=splits_setting, what="split")
    chosen = [
        store.queries(entry.task, entry.split)
        for entry in store.metadata.queries
        if (tasks is None or entry.task in tasks) and (splits is None or entry.split in splits)
    ]
    return [queries for queries in chosen if len(queries)]


def with_mixture_rates(
    batching: BatchingConfig, store: TokenStore, queries: Mapping[str, TokenizedQueries]
) -> BatchingConfig:
    """Rates as configured; else those of the SeqIO mixture the token store was made from."""
    path = store.directory / MIXTURE_FILE
    if batching.rates or not path.exists():
        return batching
    weights = read_typed(path, _MixtureFile).weights
    sizes = {task: len(of_task) for task, of_task in queries.items()}
    if not sizes.keys() <= weights.keys():
        return batching
    rates = rates_from_weights({task: weights[task] for task in sizes}, sizes)
    return dataclasses.replace(batching, rates=rates)


class DeviceBatches:
    """A stream's batches, made ahead in a thread and placed on the devices.

    Args:
        stream: the batches.
        queries: task -> its queries.
        partitioner: the devices.
    """

    def __init__(
        self, stream: Stream, queries: Mapping[str, TokenizedQueries], partitioner: Partitioner
    ) -> None:
        self._stream, self._queries, self._partitioner = stream, queries, partitioner

    def iterate(self, start_step: int, stop_step: int) -> Iterator[tuple[int, dict[str, Batch]]]:
        """Batches on the devices, for steps start_step .. stop_step - 1."""
        return prefetch(self._stream.batches, start_step, stop_step, self._partitioner.put_batch)

    def describe(self, step: int) -> str:
        """Tasks and first query ids of a step's batches."""
        rows_of = self._stream.query_rows(step)
        count = 8 if len(rows_of) == 1 else 3
        parts = []
        for task, rows in rows_of.items():
            ids = self._queries[task].query_ids
            shown = ", ".join(repr(ids[row]) for row in rows[:count])
            parts.append(f"task {task!r}, queries {shown}, ...")
        return "; ".join(parts)


def open_store(token_store: str | None, *, dry_run: bool) -> TokenStore | None:
    """Opens the token store; a dry run works without one."""
    if dry_run and not (token_store and pathlib.Path(token_store).exists()):
        place = f" at {token_store}" if token_store else ""
        logger.info("no token store%s: tasks are not resolved", place)
        return None
    return TokenStore.open(token_store or "")


def lengths(store: TokenStore | None, given: Mapping[str, int]) -> tuple[int, int]:
    """Tokens of a query and of a passage: the store's, checked against those configured."""
    if store is None and not given:
        problem = "no token store, and no lengths of queries and passages in its place"
        fix = "correct the path, or set TASK_FEATURE_LENGTHS, {'query': 32, 'passage': 256}"
        raise ConfigError(problem, where="TOKEN_STORE", fix=fix)
    if given:
        check_lengths(given)
    if store is None:
        return given["query"], given["passage"]
    stored = {"query": store.metadata.query_length, "passage": store.metadata.passage_length}
    for name, length in given.items():
        if stored.get(name) != length:
            problem = f"the token store's {name} length is {stored.get(name)}"
            where = "TASK_FEATURE_LENGTHS"
            fix = "tokenize again with these lengths, or configure the store's"
            raise ConfigError(problem, where=where, expected=f"{length}, as configured", fix=fix)
    return stored["query"], stored["passage"]


def check_lengths(
    given: Mapping[str, object],
    macro: str = "TASK_FEATURE_LENGTHS",
    example: str = "{'query': 32, 'passage': 256}",
) -> None:
    """Checks that lengths of both sides are given, and no others.

    Raises:
        ConfigError: another name, or a missing one.
    """
    if given.keys() != {"query", "passage"}:
        problem = f"lengths of {', '.join(given) or 'nothing'}"
        fix = f'write --gin.{macro}="{example}"'
        raise ConfigError(problem, where=macro, expected="of query and passage", fix=fix)


def check_query_towers(config: ModelConfig, tasks: Iterable[str], *, where: str) -> None:
    """Checks that every task has a query tower.

    Args:
        config: the model.
        tasks: the tasks of the queries.
        where: their use, for the message.

    Raises:
        ConfigError: a task without a query tower.
    """
    missing = [task for task in tasks if config.query_tasks and task not in config.query_tasks]
    if missing:
        problem = f"no query tower for {', '.join(missing)}"
        expected = f"tasks of query_tasks: {', '.join(config.query_tasks)}"
        fix = "name these tasks in query_tasks, or leave them out of TASKS"
        raise ConfigError(problem, where=where, expected=expected, fix=fix)


def fit_vocabulary(config: ModelConfig, store: TokenStore | None) -> ModelConfig:
    """Checks the vocabulary's size, or takes the store's if the configuration leaves it open."""
    if store is None:
        return config
    size = store.metadata.vocabulary_size
    rows = config.transformer.vocab_size
    if rows == 1:
        return config.with_transformer(vocab_size=size)
    if rows < size:
        problem = f"the token store's vocabulary has {size} entries"
        where = f"{type(config.transformer).__name__}.vocab_size"
        fix = f"set it to {size}, or to 1 for the store's, or tokenize with the model's vocabulary"
        raise ConfigError(problem, where=where, expected=f"at most the model's {rows}", fix=fix)
    return config
