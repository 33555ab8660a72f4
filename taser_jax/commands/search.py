"""`taser search` and `taser bm25`: run files, from an index of embeddings and from BM25's."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from taser_jax.commands import inputs
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval.bm25 import Bm25Config, Bm25Index, title_and_text
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, encoded_splits
from taser_jax.retrieval.exact import search_devices
from taser_jax.retrieval.index import INDEX_KINDS, IndexConfig, IndexKind, build_index, open_index
from taser_jax.retrieval.runs import Run, SearchResult, without_own, write_trec_run
from taser_jax.retrieval.scann import RECALL_QUERIES
from taser_jax.storage.artifacts import METADATA, check_kind
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.publishing import one_writer

# Makes the draw of sample queries independent of all other draws.
_PURPOSE = 0x1DE7


@writes("{output_dir}", kinds=[])
@first_host_only
def search(
    *,
    embeddings_dir: str,
    data_dir: str,
    collection: str,
    index_dir: str,
    output_dir: str,
    split: str = "test",
    tasks: Sequence[str] | None = None,
    k: int = 100,
    tag: str = "taser",
    own_passage_tasks: Sequence[str] = (),
    config: IndexConfig = IndexConfig(),
) -> list[pathlib.Path]:
    """Searches the queries of a split, one run file per task; needs no model.

    With several hosts, host 0 searches on all of its devices.

    Args:
        embeddings_dir: from `taser encode`; the queries' embeddings are read.
        data_dir: folder of collections, for passage ids.
        collection: the collection.
        index_dir: the passages' index; built there where there is none, and otherwise searched as
            it is. ScaNN's recall is measured on the validation queries, or on passages.
        output_dir: run files go there as `<task>.<split>.trec`; ties are broken by row.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        k: results per query.
        tag: the run files' last column.
        own_passage_tasks: tasks whose queries are also passages of the collection: the passage with
            the query's id is excluded from its results (BEIR's ArguAna).
        config: kind and sizes of an index that is built.

    Returns:
        The run files.

    Raises:
        ConfigError: a task is not in the collection.
        DataError: the task's queries are not encoded.
        FingerprintError: the index belongs to another collection, or passages and queries were
            encoded with different models or token stores.
    """
    tasks_there = list_tasks(data_dir, collection)
    inputs.check_known(own_passage_tasks, tasks_there, where="OWN_PASSAGE_TASKS")
    store = PassageStore.open(data_dir, collection)
    names = inputs.tasks_with(data_dir, collection, split=split, tasks=tasks)
    if not (pathlib.Path(index_dir) / METADATA).is_file():
        with one_writer(index_dir):
            check_kind(index_dir, INDEX_KINDS)
            _build(embeddings_dir, index_dir, config=config)
    searcher = open_index(
        index_dir, fingerprints={"collection": store.fingerprint}, devices=search_devices()
    )
    encoded = [
        QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=searcher.fingerprints)
        for task in names
    ]
    paths = []
    for task, queries in zip(names, encoded, strict=True):
        with phase(f"search of {task} {split}"):
            result = searcher.search(queries.rows(0, len(queries)), k + (task in own_passage_tasks))
        run = _best(result, queries.query_ids, store, task, k, own_passage_tasks)
        paths.append(inputs.run_path(output_dir, task, split))
        write_trec_run(paths[-1], run, ids=store.ids, tag=tag)
    return paths


@writes("{output_dir}", kinds=[])
@first_host_only
def bm25(
    *,
    data_dir: str,
    collection: str,
    output_dir: str,
    index_dir: str,
    split: str = "test",
    tasks: Sequence[str] | None = None,
    k: int = 100,
    config: Bm25Config = Bm25Config(),
    own_passage_tasks: Sequence[str] = (),
) -> list[pathlib.Path]:
    """Searches queries with BM25 over title and text, one run file per task.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        output_dir: run files go there as `<task>.<split>.trec`.
        index_dir: the index is built there once and reused.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        k: results per query.
        config: parameters of BM25.
        own_passage_tasks: tasks whose queries are also passages of the collection: the passage with
            the query's id is excluded from its results (BEIR's ArguAna).

    Returns:
        The run files.
    """
    tasks_there = list_tasks(data_dir, collection)
    inputs.check_known(own_passage_tasks, tasks_there, where="OWN_PASSAGE_TASKS")
    store = PassageStore.open(data_dir, collection)
    sparse = Bm25Index.build(
        (title_and_text(passage) for passage in store.iterate()),
        index_dir,
        config=config,
        fingerprints={"collection": store.fingerprint},
    )
    paths = []
    for task in inputs.tasks_with(data_dir, collection, split=split, tasks=tasks):
        texts = {query.id: query.text for query in QuerySet.open(data_dir, collection, task, split)}
        with phase(f"BM25 search of {task} {split}"):
            result = sparse.search(list(texts.values()), k + (task in own_passage_tasks))
        run = _best(result, list(texts), store, task, k, own_passage_tasks)
        paths.append(inputs.run_path(output_dir, task, split))
        write_trec_run(paths[-1], run, ids=store.ids, tag="bm25")
    return paths


def _best(
    result: SearchResult,
    query_ids: Sequence[str],
    store: PassageStore,
    task: str,
    k: int,
    own_passage_tasks: Sequence[str],
) -> Run:
    """The first k results of each query; where queries are passages too, without its own."""
    if task in own_passage_tasks:
        result = without_own(result, inputs.own_rows(store, task, query_ids), k)
    return Run.of(query_ids, result)


@writes("{index_dir}", kinds=INDEX_KINDS)
@first_host_only
def index(
    *,
    embeddings_dir: str,
    index_dir: str,
    config: IndexConfig = IndexConfig(),
    sample_split: str = "validation",
    tasks: Sequence[str] | None = None,
) -> str:
    """Builds an index; a finished one is checked and kept.

    For an approximate index, prints the recall against exact search, measured on the split's
    encoded queries, or on passages if there are none.

    Args:
        embeddings_dir: from `taser encode`.
        index_dir: where the index goes.
        config: exact (a pointer to the embeddings), ScaNN or FAISS.
        sample_split: split whose queries measure the recall; not the one that is reported.
        tasks: tasks whose queries measure it; None means all that have the split.

    Returns:
        The index's directory.

    Raises:
        FingerprintError: the directory holds an index of other embeddings, or the queries were
            encoded with another model than the passages.
    """
    _build(embeddings_dir, index_dir, config=config, sample_split=sample_split, tasks=tasks)
    return index_dir


def _build(
    embeddings_dir: str,
    index_dir: str,
    *,
    config: IndexConfig,
    sample_split: str = "validation",
    tasks: Sequence[str] | None = None,
) -> None:
    queries = None
    if config.kind is not IndexKind.EXACT:
        queries = _sample(embeddings_dir, split=sample_split, tasks=tasks, count=RECALL_QUERIES)
    with phase("build index"):
        build_index(
            embeddings_dir,
            index_dir,
            config=config,
            sample_queries=queries,
            devices=search_devices(),
        )


def _sample(
    embeddings_dir: str, *, split: str, tasks: Sequence[str] | None, count: int
) -> np.ndarray | None:
    """Embeddings of some queries, equally many per task; None where no task has the split."""
    encoded = [task for task, encoded in encoded_splits(embeddings_dir) if encoded == split]
    names = encoded if tasks is None else [task for task in tasks if task in encoded]
    if not names:
        logger.info("no %s queries: recall is measured on passages", split)
        return None
    passages = Embeddings(embeddings_dir).fingerprints
    share = -(-count // len(names))
    parts = []
    for task in names:
        queries = QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=passages)
        rows = np.random.default_rng([_PURPOSE, len(queries)]).permutation(len(queries))
        parts.append(queries.take(rows[:share]))
    return np.concatenate(parts)
