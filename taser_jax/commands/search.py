"""`taser search`: encode queries, search the index, write run files."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from taser_jax.assembly.model_directory import check_vocabulary, load_model
from taser_jax.batch import Role
from taser_jax.commands.inputs import (
    check_collection,
    run_path,
    search_devices,
    tasks_with,
)
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.store import TokenStore
from taser_jax.hosts import first_host_only
from taser_jax.progress import phase
from taser_jax.retrieval.embeddings import EncodeConfig, encode_queries
from taser_jax.retrieval.index import open_index
from taser_jax.retrieval.runs import Run, write_trec_run


def search(
    *,
    model_dir: str,
    token_store: str,
    data_dir: str,
    index_dir: str,
    output_dir: str,
    split: str = "test",
    tasks: Sequence[str] | None = None,
    k: int = 100,
    step: int | None = None,
    tag: str = "taser",
) -> list[pathlib.Path]:
    """Searches the queries of a split with a trained model, one run file a task.

    Of several hosts the first one searches, on all of its devices.

    Args:
        model_dir: the trained model.
        token_store: tokens of the queries.
        data_dir: where collections lie; passage ids come from there.
        index_dir: an index of this model's embeddings.
        output_dir: run files go there as `<task>.<split>.trec`; ties are broken by row.
        split: whose queries.
        tasks: which tasks; None means all that have the split.
        k: results a query.
        step: which checkpoint; None means the best one.
        tag: the run files' last column.

    Returns:
        The run files.

    Raises:
        FingerprintError: the index, the tokens or the model belong to another model, collection
            or vocabulary.
        ConfigError: a task is not in the collection or the token store.
    """
    tokens = TokenStore.open(token_store)
    collection = tokens.metadata.collection
    store = PassageStore.open(data_dir, collection)
    check_collection(tokens, store)
    names = tasks_with(data_dir, collection, split=split, tasks=tasks)
    query_sets = {task: tokens.queries(task, split) for task in names}
    model = load_model(model_dir, step=step)
    check_vocabulary(model, tokens)

    @first_host_only
    def search_all() -> list[pathlib.Path]:
        searcher = open_index(
            index_dir,
            fingerprints={"model": model.fingerprint, "collection": store.fingerprint},
            devices=search_devices(),
        )
        paths = []
        for task, queries in query_sets.items():
            with phase(f"search of {task} {split}"):
                embeddings = encode_queries(
                    model.encode_fn(Role.QUERY, task=task),
                    queries,
                    config=EncodeConfig(batch_multiple=model.batch_multiple),
                )
                result = searcher.search(embeddings, k)
            path = run_path(output_dir, task, split)
            write_trec_run(path, Run.of(queries.query_ids, result), ids=store.ids, tag=tag)
            paths.append(path)
        return paths

    return search_all()


CONFIGURABLES = ()
