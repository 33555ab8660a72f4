"""`taser mine`: hard negatives for training, from run files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from taser_jax.commands.inputs import (
    PassageHeads,
    answer_matcher,
    check_known,
    read_task_run,
    tasks_with,
)
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.token_store.negatives import write_negatives
from taser_jax.evaluation.answers import AnswerMatch, AnswerMatcher
from taser_jax.hosts import first_host_only
from taser_jax.progress import logger, phase
from taser_jax.retrieval.mining import AnswerContaining, Excluded, MiningConfig, mine_negatives
from taser_jax.retrieval.runs import top_k


@first_host_only
def mine(
    *,
    runs_dir: str,
    data_dir: str,
    collection: str,
    output_dir: str,
    split: str = "train",
    tasks: Sequence[str] | None = None,
    config: MiningConfig = MiningConfig(),
    match: AnswerMatch = AnswerMatch.STRING,
    regex_tasks: Sequence[str] = (),
) -> dict[str, int]:
    """Turns runs of training queries into hard negatives, as rows of the passage store.

    P1 of the TASER paper is a BM25 run with answer_containing='drop'; P2 is the first model's run
    with its gold passages left out. Queries without answers lose their positives only.

    Args:
        runs_dir: run files of the split, from `taser bm25` or `taser search`.
        data_dir: where collections lie.
        collection: the collection.
        output_dir: negatives go there as `<task>.<split>.jsonl`.
        split: whose queries.
        tasks: which tasks; None means all that have the split.
        config: depth, count, by rank or sampled, what is left out.
        match: how answers are looked for.
        regex_tasks: tasks whose answers are regular expressions, whatever `match` says.

    Returns:
        Negatives found, by task.
    """
    store = PassageStore.open(data_dir, collection)
    heads = PassageHeads(store)
    check_known(regex_tasks, list_tasks(data_dir, collection), where="REGEX_TASKS")
    found = {}
    for task in tasks_with(data_dir, collection, split=split, tasks=tasks):
        queries = list(queries_set := QuerySet.open(data_dir, collection, task, split))
        run = read_task_run(runs_dir, queries_set, store)
        if run.rows.shape[1] < config.depth:
            # Not an error: BM25 finds only what shares a word, a small collection has no more.
            logger.warning(
                "%s %s: the run is %d deep, mining could look %d deep",
                *(task, split, run.rows.shape[1], config.depth),
            )
        answers = [query.answers for query in queries]
        task_config = config
        if config.answer_containing is AnswerContaining.DROP and not any(answers):
            logger.info("%s %s: no answers; negatives are judged by positives", task, split)
            task_config = dataclasses.replace(config, answer_containing=AnswerContaining.KEEP)
        if task in config.same_page_tasks:
            task_config = dataclasses.replace(task_config, excluded=Excluded.PAGES)
        task_match = AnswerMatch.REGEX if task in regex_tasks else match
        drops = task_config.answer_containing is AnswerContaining.DROP
        with phase(f"mine {task} {split}"), answer_matcher(store, task_match) as matcher:
            mined = mine_negatives(
                top_k(run.rows, run.scores, max(config.depth, run.rows.shape[1])),
                [query.positives for query in queries],
                config=task_config,
                contains_answer=_answers_among(answers, matcher) if drops else None,
                pages_of=heads.pages,
            )
        logger.info("%s %s: %s", task, split, mined.statistics)
        write_negatives(
            output_dir,
            task,
            split,
            query_ids=[query.id for query in queries],
            rows=mined.rows,
            scores=mined.scores,
            metadata={"collection_fingerprint": store.fingerprint, "source": str(runs_dir)},
        )
        found[task] = mined.statistics.negatives
    return found


def _answers_among(
    answers: Sequence[Sequence[str]], matcher: AnswerMatcher
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def contains_answer(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return matcher.hits(rows, [answers[query] for query in queries])

    return contains_answer


CONFIGURABLES = (MiningConfig,)
