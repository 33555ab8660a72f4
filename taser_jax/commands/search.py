"""`taser search`: searches an index with encoded queries, into run files."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from taser_jax.commands import inputs
from taser_jax.data.collections.store import PassageStore, list_tasks
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval.exact import search_devices
from taser_jax.retrieval.index import open_index
from taser_jax.retrieval.query_embeddings import QueryEmbeddings
from taser_jax.retrieval.runs import Run, without_own, write_trec_run
from taser_jax.storage.progress import phase


@writes("{output_dir}")
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
) -> list[pathlib.Path]:
    """Searches the queries of a split, one run file per task; needs no model.

    With several hosts, host 0 searches on all of its devices.

    Args:
        embeddings_dir: from `taser encode`; the queries' embeddings are read.
        data_dir: folder of collections, for passage ids.
        collection: the collection.
        index_dir: an index of passages that the same model encoded.
        output_dir: run files go there as `<task>.<split>.trec`; ties are broken by row.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        k: results per query.
        tag: the run files' last column.
        own_passage_tasks: tasks whose queries are also passages of the collection: the passage with
            the query's id is excluded from its results (BEIR's ArguAna).

    Returns:
        The run files.

    Raises:
        ConfigError: a task is not in the collection.
        DataError: the task's queries are not encoded.
        FingerprintError: the index belongs to another collection, or passages and queries were
            encoded with different models or token stores.
    """
    inputs.check_known(
        own_passage_tasks, list_tasks(data_dir, collection), where="OWN_PASSAGE_TASKS"
    )
    store = PassageStore.open(data_dir, collection)
    names = inputs.tasks_with(data_dir, collection, split=split, tasks=tasks)
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
            drops = task in own_passage_tasks
            result = searcher.search(queries.rows(0, len(queries)), k + drops)
            if drops:
                result = without_own(result, inputs.own_rows(store, task, queries.query_ids), k)
        path = inputs.run_path(output_dir, task, split)
        write_trec_run(path, Run.of(queries.query_ids, result), ids=store.ids, tag=tag)
        paths.append(path)
    return paths


CONFIGURABLES = ()
