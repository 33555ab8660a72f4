"""`taser search`, `taser bm25`, `taser hybrid`: run files, of embeddings, of BM25 and of both."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from taser_jax.commands import inputs
from taser_jax.commands.evaluate import EvaluationConfig, judge_run
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval import fusion
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, encoded_splits
from taser_jax.retrieval.index import INDEX_KINDS, IndexConfig, IndexKind, build_index, open_index
from taser_jax.retrieval.runs import Run, SearchResult, without_own, write_trec_run
from taser_jax.retrieval.scann import RECALL_QUERIES
from taser_jax.storage.artifacts import METADATA
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase

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
        ConfigError: a task is not in the collection, or the tag is no single word.
        DataError: the task's queries are not encoded.
        FingerprintError: the index belongs to another collection, or passages and queries were
            encoded with different models or token stores.
    """
    if tag.split() != [tag]:
        problem = f"the tag is {tag!r}, and a run file's columns are separated by white space"
        raise ConfigError(problem, where="search.tag", fix="write one word")
    store = PassageStore.open(data_dir, collection)
    inputs.check_own_passages(own_passage_tasks, store)
    names = inputs.tasks_with(store, split=split, tasks=tasks)
    if not (pathlib.Path(index_dir) / METADATA).is_file():
        index(embeddings_dir=embeddings_dir, index_dir=index_dir, config=config)
    searcher = open_index(index_dir, fingerprints={"collection": store.fingerprint})
    encoded = [
        QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=searcher.fingerprints)
        for task in names
    ]
    paths = []
    for task, queries in zip(names, encoded, strict=True):
        with phase(f"search of {task} {split}"):
            result = searcher.search(queries[:], k + (task in own_passage_tasks))
        run = best_run(result, queries.query_ids, store, task, k, own_passage_tasks)
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
    store = PassageStore.open(data_dir, collection)
    inputs.check_own_passages(own_passage_tasks, store)
    sparse = inputs.open_bm25(store, index_dir, config)
    paths = []
    for task in inputs.tasks_with(store, split=split, tasks=tasks):
        texts = {query.id: query.text for query in store.queries(task, split)}
        with phase(f"BM25 search of {task} {split}"):
            result = sparse.search(list(texts.values()), k + (task in own_passage_tasks))
        run = best_run(result, list(texts), store, task, k, own_passage_tasks)
        paths.append(inputs.run_path(output_dir, task, split))
        write_trec_run(paths[-1], run, ids=store.ids, tag="bm25")
    return paths


def best_run(
    result: SearchResult,
    query_ids: Sequence[str],
    store: PassageStore,
    task: str,
    k: int,
    own_passage_tasks: Sequence[str],
) -> Run:
    """The first k results of each query; where queries are passages too, without its own."""
    if task in own_passage_tasks:
        result = without_own(result, inputs.own_rows(store, query_ids), k)
    return Run.of(query_ids, result)


@writes("{index_dir}", kinds=INDEX_KINDS)
@first_host_only
def index(
    *,
    embeddings_dir: str,
    index_dir: str,
    config: IndexConfig = IndexConfig(),
    tasks: Sequence[str] | None = None,
) -> str:
    """Builds an index; a finished one is checked and kept.

    For an approximate index, prints the recall against exact search, measured on the encoded
    validation queries, or on passages if there are none.

    Args:
        embeddings_dir: from `taser encode`.
        index_dir: where the index goes.
        config: exact (a pointer to the embeddings), ScaNN or FAISS.
        tasks: tasks whose queries measure the recall; None means all that have the split.

    Returns:
        The index's directory.

    Raises:
        FingerprintError: the directory holds an index of other embeddings, or the queries were
            encoded with another model than the passages.
    """
    queries = None
    if config.kind is not IndexKind.EXACT:
        queries = _sample(embeddings_dir, tasks)
    with phase("build index"):
        build_index(embeddings_dir, index_dir, config=config, sample_queries=queries)
    return index_dir


def _sample(embeddings_dir: str, tasks: Sequence[str] | None) -> np.ndarray | None:
    """Embeddings of some validation queries, equally many per task; None where there are none."""
    split = "validation"
    encoded = [task for task, encoded in encoded_splits(embeddings_dir) if encoded == split]
    names = encoded if tasks is None else [task for task in tasks if task in encoded]
    if not names:
        logger.info("no %s queries: recall is measured on passages", split)
        return None
    passages = Embeddings(embeddings_dir).fingerprints
    share = -(-RECALL_QUERIES // len(names))
    parts = []
    for task in names:
        queries = QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=passages)
        rows = np.random.default_rng([_PURPOSE, len(queries)]).permutation(len(queries))
        parts.append(queries.take(rows[:share]))
    return np.concatenate(parts)


@writes("{output_dir}", kinds=[])
@first_host_only
def hybrid(
    *,
    dense_dir: str,
    sparse_dir: str,
    data_dir: str,
    collection: str,
    output_dir: str,
    split: str = "test",
    development_split: str = "validation",
    tasks: Sequence[str] | None = None,
    alpha: float | None = None,
    k: int = 100,
    measure: str = "R@20",
    config: fusion.HybridConfig = fusion.HybridConfig(),
    evaluation: EvaluationConfig = EvaluationConfig(),
) -> dict[str, float]:
    """Fuses runs: score = dense + α·BM25; a missing score is the list's minimum.

    Args:
        dense_dir: runs of the model, on the split and the development split.
        sparse_dir: runs of BM25, on the same splits.
        data_dir: folder of collections.
        collection: the collection.
        output_dir: output directory for the fused runs.
        split: split of the queries.
        development_split: split on which α is chosen.
        tasks: tasks to use; None means all that have the split.
        alpha: weight of BM25; None chooses it.
        k: results per query.
        measure: what α maximises on average.
        config: depth, candidates for α, normalisation, what the average is over. A normalisation of
            None is chosen by the development split's scores or, if `alpha` is given, `split`'s.
        evaluation: the criterion for hits.

    Returns:
        Task -> α.

    Raises:
        ConfigError: α must be chosen, and no task has a development set, or one of them has none.
    """
    store = PassageStore.open(data_dir, collection)
    names = inputs.tasks_with(store, split=split, tasks=tasks)

    def both(queries: QuerySet) -> tuple[Run, Run]:
        dense = inputs.read_task_run(dense_dir, queries, store)
        return dense, inputs.read_task_run(sparse_dir, queries, store)

    development: list[str] = []
    if alpha is None:
        development = inputs.tasks_with(
            store,
            split=development_split,
            tasks=config.tasks or tasks,
            where="hybrid.development_split, on which alpha is chosen",
            fix="set hybrid.alpha=1.0, say, or run `taser prepare` with VALIDATION_SHARE=0.1",
        )
    runs = {task: both(store.queries(task, split)) for task in names}
    if alpha is None:
        sets = {
            task: development_set(*both(queries), queries, store, measure, evaluation)
            for task in development
            for queries in [store.queries(task, development_split)]
        }
        config = _settled(config, [(runs.dense, runs.sparse) for runs in sets.values()])
        # A name, the tasks whose sets choose, and those that get the choice.
        choices: list[tuple[str, Sequence[str], Sequence[str]]] = [("all tasks", list(sets), names)]
        if config.chosen_for is fusion.ChosenFor.EACH_TASK:
            if missing := [task for task in names if task not in sets]:
                problem = f"no development set of {', '.join(missing)}"
                fix = "set hybrid.alpha, or choose one alpha for all tasks"
                raise ConfigError(problem, where="hybrid.development_split", fix=fix)
            choices = [(task, [task], [task]) for task in names]
        alphas: dict[str, float] = {}
        for named, by, served in choices:
            with phase(f"choose alpha for {named}"):
                choice = fusion.choose_alpha([sets[task] for task in by], k=k, config=config)
            curve = zip(choice.alphas, choice.metric, strict=True)
            logger.info("%s by alpha: %s", measure, ", ".join(f"{a}: {m:.4f}" for a, m in curve))
            logger.info("alpha for %s: %s", named, choice.alpha)
            alphas |= dict.fromkeys(served, choice.alpha)
    else:
        config = _settled(config, list(runs.values()))
        alphas = dict.fromkeys(names, alpha)
    for task, (dense, sparse) in runs.items():
        fused = fusion.fuse(dense, sparse, alpha=alphas[task], k=k, config=config)
        write_trec_run(inputs.run_path(output_dir, task, split), fused, ids=store.ids, tag="hybrid")
    return alphas


def development_set(
    dense: Run,
    sparse: Run,
    queries: QuerySet,
    store: PassageStore,
    measure: str,
    evaluation: EvaluationConfig,
) -> fusion.DevelopmentSet:
    """One task's dense and sparse lists, of all its queries or some, and how to score a fusion."""
    config = dataclasses.replace(evaluation, measures=(measure,), page_only_tasks=())

    def values(run: Run) -> np.ndarray:
        judged = judge_run(run, queries, store, config)
        line_of = {query_id: line for line, query_id in enumerate(judged.query_ids)}
        lines = [line_of[query_id] for query_id in run.query_ids if query_id in line_of]
        return judged.values[measure][lines]

    return fusion.DevelopmentSet(dense, sparse, values)


def _settled(config: fusion.HybridConfig, lists: Sequence[tuple[Run, Run]]) -> fusion.HybridConfig:
    """The configuration with a normalisation: a choice by the scores is logged."""
    settled = fusion.settle(config, lists)
    if config.normalization is None and settled.normalization is not None:
        chosen = settled.normalization.value
        logger.info("by the dense scores, HybridConfig.normalization = %r", chosen)
    return settled
