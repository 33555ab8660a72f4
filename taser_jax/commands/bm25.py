"""`taser bm25`: the sparse baseline, into run files."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from taser_jax.commands.inputs import check_known, own_rows, run_path, tasks_with
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval.bm25 import Bm25Config, Bm25Index, title_and_text
from taser_jax.retrieval.runs import Run, without_own, write_trec_run
from taser_jax.storage.progress import phase


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
    check_known(own_passage_tasks, list_tasks(data_dir, collection), where="OWN_PASSAGE_TASKS")
    store = PassageStore.open(data_dir, collection)
    index = Bm25Index.build(
        (title_and_text(passage) for passage in store.iterate()),
        index_dir,
        config=config,
        fingerprints={"collection": store.fingerprint},
    )
    paths = []
    for task in tasks_with(data_dir, collection, split=split, tasks=tasks):
        queries = list(QuerySet.open(data_dir, collection, task, split))
        with phase(f"BM25 search of {task} {split}"):
            drops = task in own_passage_tasks
            result = index.search([query.text for query in queries], k + drops)
        ids = [query.id for query in queries]
        if drops:
            result = without_own(result, own_rows(store, task, ids), k)
        run = Run.of(ids, result)
        path = run_path(output_dir, task, split)
        paths.append(path)
        write_trec_run(path, run, ids=store.ids, tag="bm25")
    return paths
