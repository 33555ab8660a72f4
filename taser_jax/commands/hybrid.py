"""`taser hybrid`: fuses dense and BM25 runs, with α chosen on development data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.commands.evaluate import EvaluationConfig, judge_run
from taser_jax.commands.inputs import PassageHeads, read_task_run, run_path, tasks_with
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval import fusion
from taser_jax.retrieval.runs import Run, write_trec_run
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase


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
    names = tasks_with(data_dir, collection, split=split, tasks=tasks)
    if alpha is None:
        development = tasks_with(
            data_dir,
            collection,
            split=development_split,
            tasks=config.tasks or tasks,
            where="hybrid.development_split, on which alpha is chosen",
            fix="set hybrid.alpha=1.0, say, or run `taser prepare` with VALIDATION_SHARE=0.1",
        )
        heads = PassageHeads(store)
        sets = {
            task: development_set(
                read_task_run(dense_dir, queries, store),
                read_task_run(sparse_dir, queries, store),
                queries,
                heads,
                measure=measure,
                evaluation=evaluation,
            )
            for task in development
            for queries in [QuerySet.open(data_dir, collection, task, development_split)]
        }
        config = _settled(config, [(runs.dense, runs.sparse) for runs in sets.values()])
        alphas = _choose(sets, names, measure=measure, k=k, config=config)
    runs = {
        task: (read_task_run(dense_dir, queries, store), read_task_run(sparse_dir, queries, store))
        for task in names
        for queries in [QuerySet.open(data_dir, collection, task, split)]
    }
    if alpha is not None:
        config = _settled(config, list(runs.values()))
        alphas = dict.fromkeys(names, alpha)
    for task, (dense, sparse) in runs.items():
        fused = fusion.fuse(dense, sparse, alpha=alphas[task], k=k, config=config)
        write_trec_run(run_path(output_dir, task, split), fused, ids=store.ids, tag="hybrid")
    return alphas


def development_set(
    dense: Run,
    sparse: Run,
    queries: QuerySet,
    heads: PassageHeads,
    *,
    measure: str,
    evaluation: EvaluationConfig,
) -> fusion.DevelopmentSet:
    """One task's dense and sparse lists, of all its queries or some, and how to score a fusion."""
    config = dataclasses.replace(evaluation, measures=(measure,), page_only_tasks=())

    def values(run: Run) -> np.ndarray:
        judged = judge_run(run, queries, heads, config)
        line_of = {query_id: line for line, query_id in enumerate(judged.query_ids)}
        lines = [line_of[query_id] for query_id in run.query_ids if query_id in line_of]
        return judged.values[measure][lines]

    return fusion.DevelopmentSet(dense, sparse, values)


def _settled(config: fusion.HybridConfig, lists: Sequence[tuple[Run, Run]]) -> fusion.HybridConfig:
    """The configuration with a normalisation: a choice by the scores is logged."""
    settled = fusion.settle(config, lists)
    assert settled.normalization is not None
    if config.normalization is None:
        are_cosines = settled.normalization is fusion.ScoreNormalization.MIN_MAX
        kind = "cosines" if are_cosines else "dot products"
        chosen = settled.normalization.value
        logger.info("dense scores are %s: HybridConfig.normalization = %r", kind, chosen)
    return settled


def _choose(
    sets: Mapping[str, fusion.DevelopmentSet],
    names: Sequence[str],
    *,
    measure: str,
    k: int,
    config: fusion.HybridConfig,
) -> dict[str, float]:
    """Task -> α: chosen on all sets together, or on each task's own."""
    missing = [task for task in names if task not in sets]
    if missing and config.chosen_for is fusion.ChosenFor.EACH_TASK:
        problem = f"no development set of {', '.join(missing)}"
        fix = "set hybrid.alpha, or choose one alpha for all tasks"
        raise ConfigError(problem, where="hybrid.development_split", fix=fix)

    def choose(named: str, chosen: Sequence[fusion.DevelopmentSet]) -> float:
        with phase(f"choose alpha for {named}"):
            choice = fusion.choose_alpha(chosen, k=k, config=config)
        curve = ", ".join(
            f"{a}: {m:.4f}" for a, m in zip(choice.alphas, choice.metric, strict=True)
        )
        logger.info("%s by alpha: %s", measure, curve)
        logger.info("alpha for %s: %s", named, choice.alpha)
        return choice.alpha

    if config.chosen_for is fusion.ChosenFor.EACH_TASK:
        return {task: choose(task, [sets[task]]) for task in names}
    return dict.fromkeys(names, choose("all tasks", list(sets.values())))
