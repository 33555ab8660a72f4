"""Tokenises retrieval tasks once and writes their ids to a token store."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from taser_jax.data.collections.store import SPLITS, PassageStore, list_tasks
from taser_jax.data.files import in_blocks
from taser_jax.data.seqio_tasks.registry import form_of_passages
from taser_jax.data.seqio_tasks.retrieval_task import (
    RetrievalMixture,
    RetrievalTask,
    data_in_use,
    use_data,
)
from taser_jax.data.text import preprocessors
from taser_jax.data.text.vocabularies import Vocabulary, load_vocabulary
from taser_jax.data.token_store.store import (
    PREPROCESSING_VERSION,
    QuerySettings,
    Titles,
    TokenStore,
    TokenStoreMetadata,
)
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase, track
from taser_jax.storage.records import Query
from taser_jax.storage.typed_files import flatten

INPUTS = "inputs.json"
_BLOCK = 4096


def tokenize_collection(
    *,
    data_dir: str | os.PathLike[str],
    mixture: RetrievalMixture | None = None,
    collection: str | None = None,
    vocabulary: str | os.PathLike[str] | Vocabulary,
    query_length: int,
    passage_length: int,
    output_dir: str | os.PathLike[str],
    replace: bool = False,
) -> TokenStore:
    """Makes the token store of a mixture's collection and tasks, or reuses a finished one.

    A finished store is reused if it was made from the same passages, queries, vocabulary, lengths
    and preprocessors (compared by source code); an unfinished one is replaced.

    Args:
        data_dir: folder that holds collections.
        mixture: the tasks, all of one collection.
        collection: instead of a mixture, a collection without queries, such as a memory.
        vocabulary: a vocabulary, or the path of one.
        query_length: length in tokens of queries, including special tokens, unless their task sets
            one.
        passage_length: length in tokens of passages.
        output_dir: directory of the store.
        replace: whether a finished store from other inputs is replaced, too.

    Returns:
        The store; its tasks are named as in the collection.

    Raises:
        ConfigError: a length that leaves no room for text, or a store from other inputs.
        DataError: the collection or a task is not prepared.
        StorageError: the disk is full or `output_dir` cannot be written.
    """
    preprocessors.check_length(query_length)
    preprocessors.check_length(passage_length)
    if isinstance(vocabulary, str | os.PathLike):
        vocabulary = load_vocabulary(vocabulary)
    if (mixture is None) == (collection is None):
        problem = f"mixture {mixture and mixture.name!r} and collection {collection!r}"
        fix = "name tasks to have their queries, or a collection to have its passages alone"
        raise ConfigError(problem, where="tokenize", fix=fix)
    tasks = () if mixture is None else mixture.tasks
    collection = collection or tasks[0].collection
    titles, before = form_of_passages(collection, mixture)
    passage_prompt = tuple(before.ids(vocabulary))
    form = [f"titles {titles.value}"]
    if passage_prompt:
        form.append(f"prompt {list(passage_prompt)}")
    output_dir = pathlib.Path(output_dir)
    with use_data(data_dir=os.fspath(data_dir), vocabulary=vocabulary):
        work = _work(tasks, os.fspath(data_dir))
        for task in tasks:
            prompt, where = task.prompt.ids(vocabulary), f"task {task.name!r}, "
            longest = task.query_length or query_length
            preprocessors.query_room(vocabulary, longest, prompt=prompt, where=where)
        store = PassageStore.open(data_dir, collection)
        inputs: dict[str, object] = {
            "preprocessing_version": PREPROCESSING_VERSION,
            "mixture_or_task": None if mixture is None else mixture.name,
            "lengths": {"query": query_length, "passage": passage_length},
            "vocabulary": vocabulary.fingerprint,
            "collection": store.fingerprint,
            "passages": {f"{collection}_passages": artifacts.fingerprint(form)},
            "queries": {
                f"{task.name} {split}": [task.description, task.open(split).fingerprint]
                for task, split in work
            },
        }
        lengths = {task.name: length for task, _ in work if (length := task.query_length)}
        if lengths:
            # Only then, so that stores of tasks without them stay valid.
            inputs["query_lengths"] = lengths
        reused = _reuse(output_dir, inputs, replace=replace)
        if reused is not None:
            return reused
        with artifacts.replacing(output_dir) as scratch:
            about = TokenStoreMetadata(
                collection=collection,
                collection_fingerprint=store.fingerprint,
                vocabulary_fingerprint=vocabulary.fingerprint,
                vocabulary_size=vocabulary.size,
                query_length=query_length,
                passage_length=passage_length,
                titles=titles.value,
                passage_prompt=passage_prompt,
            )
            writer = TokenStoreWriter(scratch, about)
            vocabulary.save(str(writer.vocabulary_directory))
            with phase(f"tokenising {mixture.name if mixture else collection}"):
                count = len(store)
                rows = _tokenized_passages(store, titles, passage_length, passage_prompt)
                writer.write_passages(
                    track(rows, f"{collection} passages", total=count, unit="text"), count=count
                )
                for task, split in work:
                    _write_queries(writer, task, split, query_length)
            artifacts.write_json(scratch / INPUTS, inputs)
            writer.finish()
        return TokenStore.open(output_dir)


def _work(tasks: Sequence[RetrievalTask], data_dir: str) -> list[tuple[RetrievalTask, str]]:
    """The splits of each task; queries of a source are written."""
    work = []
    for task in tasks:
        if not task.splits:
            prepared = ", ".join(list_tasks(data_dir, task.collection)) or "(none)"
            problem = f"task {task.query_set!r} is not among the prepared tasks: {prepared}"
            fix = "prepare the task's queries with `taser prepare`"
            raise DataError(problem, where=f"{data_dir}, collection {task.collection!r}", fix=fix)
        work += [(task, split) for split in SPLITS if split in task.splits]
    for task, split in work:
        if task.source is not None:
            task.write(split)
    return work


def _tokenized_passages(
    store: PassageStore, titles: Titles, length: int, prompt: Sequence[int]
) -> Iterator[Sequence[int]]:
    vocabulary = data_in_use().vocabulary
    for block in in_blocks(store, _BLOCK):
        shown, texts = titles.applied([p.title for p in block], [p.text for p in block])
        yield from preprocessors.passage_ids(shown, texts, vocabulary, length, prompt=prompt)


def _write_queries(writer: TokenStoreWriter, task: RetrievalTask, split: str, length: int) -> None:
    queries: Iterable[Query] = task.open(split)
    if task.query_preprocessors:
        from taser_jax.data.seqio_tasks.in_seqio import preprocessed

        queries = preprocessed(task, split)
    total = task.num_input_examples(split)
    queries = list(track(queries, f"{task.name} {split}", total=total, unit="text"))
    vocabulary = data_in_use().vocabulary
    texts, longest = [query.text for query in queries], task.query_length or length
    settings = QuerySettings(task.normalization, tuple(task.prompt.ids(vocabulary)))
    writer.write_queries(
        task.query_set,
        split,
        query_ids=[query.id for query in queries],
        tokens=preprocessors.query_ids(texts, vocabulary, longest, settings),
        positives=[query.positives for query in queries],
        hard_negatives=[query.hard_negatives for query in queries],
        length=task.query_length,
        settings=settings,
    )


def _reuse(
    output_dir: pathlib.Path, inputs: dict[str, object], *, replace: bool
) -> TokenStore | None:
    """The finished store from these inputs, if it exists.

    Raises:
        ConfigError: the directory has a store from other inputs, and `replace` is False; or
            anything else.
    """
    if not (output_dir / artifacts.METADATA).is_file():
        artifacts.check_empty(output_dir)
        return None
    try:
        former = artifacts.read_json(output_dir / INPUTS)
    except DataError:
        return None
    if former != inputs and replace:
        return None
    if former != inputs:
        old, new = flatten(**former), flatten(**inputs)
        names = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
        changes = (f"{name} {old.get(name)}, now {new.get(name)}" for name in names)
        raise ConfigError(
            f"another token store is here: {'; '.join(changes)}",
            where=str(output_dir),
            fix="choose another TOKEN_STORE, or set tokenize.replace=True: models trained on the "
            "old store will not accept the new one",
        )
    try:
        store = TokenStore.open(output_dir)
    except DataError:
        return None
    logger.info("token store %s: made from the same inputs, reused", output_dir)
    return store
