"""`taser mine`: hard negatives from run files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from taser_jax.commands import inputs
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.negatives import write_negatives
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.evaluation.metrics import AnswerMatcher
from taser_jax.retrieval.mining import AnswerContaining, Excluded, MiningConfig, mine_negatives
from taser_jax.retrieval.runs import top_k
from taser_jax.storage.artifacts import NEGATIVES, path_from
from taser_jax.storage.errors import check_known
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import to_plain


@writes("{output_dir}", kinds=[NEGATIVES])
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
    regex_tasks: Sequence[str] = (),
) -> dict[str, int]:
    """Turns runs of training queries into hard negatives, as rows of the passage store.

    P1 of the TASER paper is a BM25 run with answer_containing='drop'; P2 is the first model's run
    without gold passages. For queries without answers, only positives are excluded. Counts of
    excluded candidates, by reason, are printed and stored in `metadata.json`.

    Args:
        runs_dir: run files of the split, from `taser bm25` or `taser search`.
        data_dir: folder of collections.
        collection: the collection.
        output_dir: negatives go there as `<task>.<split>.jsonl`.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        config: depth, count, by rank or sampled, what is left out.
        regex_tasks: tasks whose answers are regular expressions.

    Returns:
        Negatives found, by task.

    Raises:
        ConfigError: an unknown task, or settings under which no query has a negative.
    """
    store = PassageStore.open(data_dir, collection)
    check_known(regex_tasks, store.tasks, where="REGEX_TASKS")
    counts = {}
    for task in inputs.tasks_with(store, split=split, tasks=tasks):
        queries = list(queries_set := store.queries(task, split))
        run = inputs.read_task_run(runs_dir, queries_set, store)
        if run.rows.shape[1] < config.depth:
            # Not an error: BM25 only finds passages that share a word; collections may be small.
            results = f"{run.rows.shape[1]} results per query, mining considers the first"
            logger.warning("%s %s: the run has %s %d", task, split, results, config.depth)
        answers = [query.answers for query in queries]
        task_config = config
        if config.answer_containing is AnswerContaining.DROP and not any(answers):
            logger.info("%s %s: no answers; negatives are judged by positives", task, split)
            task_config = dataclasses.replace(config, answer_containing=AnswerContaining.KEEP)
        if task in config.same_page_tasks:
            task_config = dataclasses.replace(task_config, excluded=Excluded.PAGES)
        matcher = inputs.answer_matcher(store, task, regex_tasks)
        with phase(f"mine {task} {split}"):
            mined = mine_negatives(
                top_k(run.rows, run.scores, max(config.depth, run.rows.shape[1])),
                [query.positives for query in queries],
                config=task_config,
                contains_answer=_answers_among(answers, matcher),
                pages_of=store.pages,
            )
        logger.info("%s %s: %s", task, split, mined.statistics)
        if count := mined.statistics.queries_without:
            what = "queries without negatives: training draws random passages for them"
            logger.info("%s %s: %d %s", task, split, count, what)
        write_negatives(
            output_dir,
            task,
            split,
            query_ids=[query.id for query in queries],
            rows=mined.rows,
            scores=mined.scores,
            metadata={
                "collection_fingerprint": store.fingerprint,
                # A pipeline's folder can be moved.
                "source": path_from(output_dir, runs_dir),
            },
            facts={
                "mining": to_plain(task_config),
                "statistics": dataclasses.asdict(mined.statistics),
            },
        )
        counts[task] = mined.statistics.negatives
    return counts


def _answers_among(
    answers: Sequence[Sequence[str]], matcher: AnswerMatcher
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda queries, rows: matcher.hits(rows, [answers[query] for query in queries])
