"""Tokenises retrieval tasks once and writes their ids to a token store."""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from taser_jax.data.collections.store import SPLITS, list_tasks
from taser_jax.data.seqio_tasks import registry
from taser_jax.data.seqio_tasks.context import use_data
from taser_jax.data.seqio_tasks.merged_collections import MergedSource, write_merged
from taser_jax.data.seqio_tasks.retrieval_task import QueryTask
from taser_jax.data.text.preprocessors import check_length
from taser_jax.data.text.vocabularies import Vocabulary, load_vocabulary
from taser_jax.data.token_store.store import TokenStore
from taser_jax.data.token_store.text_settings import PREPROCESSING_VERSION
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.storage.artifacts import METADATA, read_json, storage_errors
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import phase, track
from taser_jax.storage.settings import flatten

INPUTS = "inputs.json"
logger = logging.getLogger("taser")


def tokenize_collection(
    *,
    data_dir: str | os.PathLike[str],
    mixture_or_task: str | None = None,
    collection: str | None = None,
    vocabulary: str | os.PathLike[str] | Vocabulary,
    query_length: int,
    passage_length: int,
    output_dir: str | os.PathLike[str],
    splits: Sequence[str] = SPLITS,
    passages: str | None = None,
    replace: bool = False,
) -> TokenStore:
    """Makes the token store of a mixture's collection and tasks, or reuses a finished one.

    A finished store is reused if it was made from the same passages, queries, vocabulary, lengths
    and preprocessors (compared by source code); an unfinished one is replaced.

    Args:
        data_dir: folder that holds collections.
        mixture_or_task: the registered name; tasks of several collections are merged into a
            collection with the mixture's name.
        collection: instead of a mixture, a collection without queries, such as a memory.
        vocabulary: a vocabulary, or the path of one.
        query_length: length in tokens of queries, including special tokens, unless their task sets
            one.
        passage_length: length in tokens of passages.
        output_dir: directory of the store.
        splits: splits to tokenise, of the tasks that have them.
        passages: registered name of the passages, if not the collection's default.
        replace: whether a finished store from other inputs is replaced, too.

    Returns:
        The store; its tasks are named as in the collection.

    Raises:
        ConfigError: an unregistered name, a length that leaves no room for text, a store from
            other inputs, or a merged collection whose name is that of another.
        DataError: the collection or a task is not prepared.
        StorageError: the disk is full or `output_dir` cannot be written.
    """
    check_length(query_length)
    check_length(passage_length)
    if isinstance(vocabulary, str | os.PathLike):
        vocabulary = load_vocabulary(vocabulary)
    if (mixture_or_task is None) == (collection is None):
        raise ConfigError(
            f"mixture or task {mixture_or_task!r}, collection {collection!r}",
            where="tokenize",
            expected="one of the two",
            fix="name tasks to have their queries, or a collection to have its passages alone",
        )
    tasks = [] if mixture_or_task is None else registry.retrieval_tasks(mixture_or_task)
    if collection is None:
        collection = tasks[0].source.collection
    passage_task = registry.find_passages(passages, collection, tasks)
    output_dir = pathlib.Path(output_dir)
    with use_data(data_dir=os.fspath(data_dir), vocabulary=vocabulary):
        work = _work(tasks, splits, os.fspath(data_dir))
        for task in tasks:
            task.check_room(task.source.query_length or query_length)
        if any(isinstance(task.source, MergedSource) for task in tasks):
            write_merged(tasks)
        store = passage_task.source.open()
        inputs = {
            "preprocessing_version": PREPROCESSING_VERSION,
            "mixture_or_task": mixture_or_task,
            "lengths": {"query": query_length, "passage": passage_length},
            "vocabulary": vocabulary.fingerprint,
            "collection": store.fingerprint,
            "passages": {passage_task.name: passage_task.description},
            **_query_inputs(work),
        }
        reused = _reuse(output_dir, inputs, replace=replace)
        if reused is not None:
            return reused
        writer = TokenStoreWriter(
            output_dir,
            collection=collection,
            collection_fingerprint=store.fingerprint,
            vocabulary_fingerprint=vocabulary.fingerprint,
            vocabulary_size=vocabulary.size,
            query_length=query_length,
            passage_length=passage_length,
            titles=passage_task.titles,
        )
        vocabulary.save(str(writer.vocabulary_directory))
        with phase(f"tokenising {mixture_or_task or collection}"):
            count = len(store)
            rows = passage_task.tokenized(passage_length)
            writer.write_passages(
                track(rows, f"{passage_task.name} passages", total=count, unit="text"), count=count
            )
            for task, split in work:
                _write_queries(writer, task, split, query_length)
        _write_inputs(output_dir, inputs)
        return writer.finish()


def _work(
    tasks: Sequence[QueryTask], splits: Sequence[str], data_dir: str
) -> list[tuple[QueryTask, str]]:
    """The tasks' splits that exist."""
    for split in splits:
        if split not in SPLITS:
            raise ConfigError(f"split {split!r}", expected=f"of {', '.join(SPLITS)}")
    work = []
    for task in tasks:
        found = [split for split in splits if split in task.source.splits]
        if not found:
            source = task.source
            source = source.original if isinstance(source, MergedSource) else source
            prepared = list_tasks(data_dir, source.collection)
            raise DataError(
                f"task {source.task!r} has none of the splits {', '.join(splits)}",
                where=f"{data_dir}, collection {source.collection!r}",
                expected=f"one of the prepared tasks: {', '.join(prepared) or '(none)'}",
                fix="prepare the task's queries with `taser prepare`",
            )
        work += [(task, split) for split in found]
    return work


def _query_inputs(work: Sequence[tuple[QueryTask, str]]) -> dict[str, Any]:
    """What a store's queries are made from."""
    queries = {
        f"{task.name} {split}": [task.description, task.source.open(split).fingerprint]
        for task, split in work
    }
    lengths = {task.name: length for task, _ in work if (length := task.source.query_length)}
    # Only if there are any, so that stores of tasks without them stay valid.
    return {"queries": queries, **({"query_lengths": lengths} if lengths else {})}


def _write_queries(writer: TokenStoreWriter, task: QueryTask, split: str, length: int) -> None:
    own = task.source.query_length
    total = len(task.source.open(split))
    queries = list(
        track(
            task.tokenized(split, own or length), f"{task.name} {split}", total=total, unit="text"
        )
    )
    writer.write_queries(
        task.source.task,
        split,
        query_ids=[query.id for query in queries],
        tokens=[query.tokens for query in queries],
        positives=[query.positives for query in queries],
        hard_negatives=[query.hard_negatives for query in queries],
        length=own,
        settings=task.settings(),
    )


def _reuse(output_dir: pathlib.Path, inputs: dict[str, Any], *, replace: bool) -> TokenStore | None:
    """The finished store from these inputs, if it exists.

    Raises:
        ConfigError: the directory has a store from other inputs, and `replace` is False.
    """
    if not (output_dir / METADATA).is_file():
        return None
    try:
        found = read_json(output_dir / INPUTS)
    except DataError:
        return None
    if found != inputs:
        if not replace:
            raise _another_store(output_dir, found, inputs)
        return None
    try:
        store = TokenStore.open(output_dir)
    except DataError:
        return None
    logger.info("token store %s: made from the same inputs, reused", output_dir)
    return store


def _another_store(
    directory: pathlib.Path, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> ConfigError:
    """The error that names the differences between the existing store and the requested one."""
    old, new = flatten(store=found), flatten(store=wanted)
    names = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    changes = "; ".join(
        f"{name.removeprefix('store.')} {old.get(name)}, now {new.get(name)}" for name in names[:4]
    )
    more = f"; and {len(names) - 4} more" if len(names) > 4 else ""
    name = _another_name(directory, found, wanted)
    return ConfigError(
        f"another token store is here: {changes}{more}",
        where=str(directory),
        expected="a new directory, or the inputs that this store was made from",
        fix=f"choose another TOKEN_STORE, such as {name}, or set "
        "tokenize.replace=True: models trained on the old store will not accept the new one",
    )


def _another_name(
    directory: pathlib.Path, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> str:
    """The store's name with what differs, such as `tokens-442d64` for another vocabulary."""
    lengths = wanted["lengths"]
    parts = {
        "mixture_or_task": wanted["mixture_or_task"] or directory.name,
        "vocabulary": wanted["vocabulary"][:6],
        "lengths": f"{lengths['query']}-{lengths['passage']}",
    }
    apart = [part for name, part in parts.items() if found.get(name) != wanted[name]]
    return "-".join([str(directory), *(apart or ["2"])])


def _write_inputs(output_dir: pathlib.Path, inputs: dict[str, Any]) -> None:
    with storage_errors(output_dir):
        (output_dir / INPUTS).write_text(json.dumps(inputs, indent=2) + "\n", encoding="utf-8")
