"""`taser mine`: hard negatives from run files, and a teacher's scores of them for distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from jaxtyping import Float64, Int

from taser_jax.commands import inputs
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.token_store.arrays import TeacherScores
from taser_jax.data.token_store.negatives import write_negatives
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.evaluation.metrics import AnswerMatch, AnswerMatcher
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.mining import AnswerContaining, Excluded, MiningConfig, mine_negatives
from taser_jax.retrieval.runs import NO_ROW, SearchResult, top_k
from taser_jax.storage.artifacts import NEGATIVES, kind_of, path_from
from taser_jax.storage.errors import ConfigError, DataError, check_known
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import to_plain

Scorer = Callable[[int, Int[np.ndarray, " pairs"]], Float64[np.ndarray, " pairs"]]
"""Number of a query in its split, and rows of passages -> the score of each."""


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
    teachers: Mapping[str, float] = MappingProxyType({}),
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
        teachers: directory -> weight: scores of the positives and of what is mined are added, for
            training with `ObjectiveConfig.distillation` (`teacher_scores`).

    Returns:
        Negatives found, by task.

    Raises:
        ConfigError: an unknown task, settings under which no query has a negative, or a directory
            that holds no teacher.
    """
    store = PassageStore.open(data_dir, collection)
    heads = inputs.PassageHeads(store)
    check_known(regex_tasks, list_tasks(data_dir, collection), where="REGEX_TASKS")
    counts = {}
    for task in inputs.tasks_with(data_dir, collection, split=split, tasks=tasks):
        queries = list(queries_set := QuerySet.open(data_dir, collection, task, split))
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
        task_match = AnswerMatch.REGEX if task in regex_tasks else AnswerMatch.STRING
        drops = task_config.answer_containing is AnswerContaining.DROP
        matcher = inputs.answer_matcher(store, task_match)
        with phase(f"mine {task} {split}"):
            mined = mine_negatives(
                top_k(run.rows, run.scores, max(config.depth, run.rows.shape[1])),
                [query.positives for query in queries],
                config=task_config,
                contains_answer=_answers_among(answers, matcher) if drops else None,
                pages_of=heads.pages,
            )
        logger.info("%s %s: %s", task, split, mined.statistics)
        if count := mined.statistics.queries_without:
            what = "queries without negatives: training draws random passages for them"
            logger.info("%s %s: %d %s", task, split, count, what)
        teacher = None
        if teachers:
            teacher = teacher_scores(teachers, queries_set, mined.rows, store)
        # A pipeline's folder can be moved.
        places = {path_from(output_dir, name): weight for name, weight in teachers.items()}
        write_negatives(
            output_dir,
            task,
            split,
            query_ids=[query.id for query in queries],
            rows=mined.rows,
            scores=mined.scores,
            metadata={
                "collection_fingerprint": store.fingerprint,
                "source": path_from(output_dir, runs_dir),
                **({"teachers": places} if teachers else {}),
            },
            facts={
                "mining": to_plain(task_config),
                "statistics": dataclasses.asdict(mined.statistics),
            },
            teacher=teacher,
        )
        counts[task] = mined.statistics.negatives
    return counts


def _answers_among(
    answers: Sequence[Sequence[str]], matcher: AnswerMatcher
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda queries, rows: matcher.hits(rows, [answers[query] for query in queries])


def teacher_scores(
    teachers: Mapping[str, float],
    queries: QuerySet,
    negatives: Sequence[Sequence[int]],
    store: PassageStore,
) -> list[TeacherScores]:
    """A teacher's scores of each query's positives and mined negatives.

    The score of a pair is Σ weight · score over the teachers: one model, an ensemble of several, or
    a hybrid, such as {embeddings: 1, BM25's runs: 1.2}.

    Args:
        teachers: directory -> weight. A directory holds a model's embeddings (`taser encode`),
            whose inner products are exact, or runs of the split, where a passage that is not in its
            query's list gets the list's lowest score.
        queries: the queries of a split.
        negatives: rows of the passages mined for each of them.
        store: the collection's passages.

    Raises:
        ConfigError: a directory that holds no teacher.
        DataError: embeddings of other queries.
    """
    lists = [
        np.array([*query.positives, *mined], np.int64)
        for query, mined in zip(queries, negatives, strict=True)
    ]
    totals = [np.zeros(len(rows)) for rows in lists]
    with phase(f"score {queries.task} {queries.split}"):
        for directory, weight in teachers.items():
            score = _scorer(directory, queries, store)
            for number, rows in enumerate(lists):
                totals[number] += weight * score(number, rows)
    return [
        TeacherScores(*np.split(total.astype(np.float32), [len(query.positives)]))
        for query, total in zip(queries, totals, strict=True)
    ]


def _scorer(directory: str, queries: QuerySet, store: PassageStore) -> Scorer:
    """A teacher of whichever kind the directory holds."""
    if kind_of(directory) == Embeddings.KIND:
        passages = Embeddings(directory, fingerprints={"collection": store.fingerprint})
        encoded = QueryEmbeddings.of_split(
            directory, queries.task, queries.split, fingerprints=passages.fingerprints
        )
        if encoded.query_ids != [query.id for query in queries]:
            problem = f"embeddings of {len(encoded)} queries of task {queries.task!r}"
            expected = f"of the {len(queries)} queries of {queries.directory}"
            fix = "tokenize and encode this collection's queries with the teacher"
            raise DataError(problem, where=str(encoded.directory), expected=expected, fix=fix)
        return embedding_scorer(encoded, passages)
    if inputs.run_path(directory, queries.task, queries.split).exists():
        return run_scorer(inputs.read_task_run(directory, queries, store).result)
    raise ConfigError(
        f"no teacher of task {queries.task!r}, split {queries.split!r} here: no embeddings, and no "
        f"run {inputs.run_path('', queries.task, queries.split)}",
        where=directory,
        fix="run `taser encode`, `taser search` or `taser bm25` for this split",
    )


def run_scorer(result: SearchResult) -> Scorer:
    """Scores from a run; a passage that is not in the run gets its query's lowest score.

    That is the rule of hybrid search (TASER, appendix D); the lowest score of an empty list is 0.

    Example:
        A run of one query with rows 7 and 4 and scores 3 and 1: row 7 scores 3, row 9 scores 1.

    Args:
        result: aligned with the queries.
    """

    def score(query: int, rows: Int[np.ndarray, " pairs"]) -> Float64[np.ndarray, " pairs"]:
        is_result = result.rows[query] != NO_ROW
        scores = result.scores[query][is_result].tolist()
        of_row = dict(zip(result.rows[query][is_result].tolist(), scores, strict=True))
        lowest = min(scores, default=0.0)
        return np.array([of_row.get(row, lowest) for row in rows.tolist()])

    return score


def embedding_scorer(queries: Embeddings, passages: Embeddings) -> Scorer:
    """Inner products of a model's embeddings."""

    def score(query: int, rows: Int[np.ndarray, " pairs"]) -> Float64[np.ndarray, " pairs"]:
        embedding = queries[query : query + 1][0].astype(np.float64)
        return passages.take(rows).astype(np.float64) @ embedding

    return score
