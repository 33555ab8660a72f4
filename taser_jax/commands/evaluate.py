"""`taser evaluate`: run files against qrels or answers, into a result file and a table."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from taser_jax.commands import inputs
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.collection import gold_path
from taser_jax.data.readers.questions import Question, read_kilt
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.evaluation import kilt, metrics, results
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.significance import SignificanceConfig, compare_with_baselines
from taser_jax.retrieval.runs import NO_ROW, Run
from taser_jax.storage.errors import ConfigError, DataError, check_known
from taser_jax.storage.progress import logger, phase

# Share of the queries: a run with results for fewer is not of this split.
_MOST_LACKING = 0.5


class Judge(enum.Enum):
    """The criterion for a hit.

    QRELS: the passage is a positive of the query.
    ANSWERS: the passage contains an answer.
    KILT: the passage is on a gold page, for measures that start with Page; otherwise as QRELS.
    """

    QRELS = "qrels"
    ANSWERS = "answers"
    KILT = "kilt"


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How runs are scored.

    Attributes:
        judge: positives, answers in the passage's body, or KILT's pages and positives.
        measures: R@k is the share of queries with a hit at rank k or better (DPR's top-k
            accuracy, "Recall@k" in the papers' tables); also MRR@k, nDCG@k, Recall@k, MAP, Rprec;
            by KILT's pages PageRprec and PageRecall@k.
        regex_tasks: tasks whose answers are regular expressions (CuratedTREC beside sets of
            strings).
        qrels_tasks: tasks judged by their positives, whatever `judge` says (sets without answers
            beside sets with them).
        page_only_tasks: tasks scored only by measures that start with Page, since their gold is
            whole pages (AIDA); averages of other measures leave them out.
    """

    judge: Judge = Judge.QRELS
    measures: tuple[str, ...] = ("R@1", "R@5", "R@20", "MRR@10", "nDCG@10")
    regex_tasks: tuple[str, ...] = ()
    qrels_tasks: tuple[str, ...] = ()
    page_only_tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.measures:
            fix = "name one or more, such as R@20, MRR@10 or nDCG@10"
            raise ConfigError("no measure", where="EvaluationConfig.measures", fix=fix)
        has_pages = any(map(kilt.is_page_measure, self.measures))
        if self.page_only_tasks and not (self.judge is Judge.KILT and has_pages):
            problem = f"page_only_tasks {self.page_only_tasks} with judge {self.judge.value!r}, by "
            fix = "judge by 'kilt' and add PageRprec, or leave page_only_tasks out"
            raise ConfigError(problem + ", ".join(self.measures), where="EvaluationConfig", fix=fix)

    def measures_of(self, task: str) -> tuple[str, ...]:
        """The measures that a task is scored by."""
        measures = tuple(self.measures)
        if task in self.page_only_tasks:
            return tuple(filter(kilt.is_page_measure, measures))
        return measures

    def check_tasks(self, tasks: Iterable[str]) -> None:
        """Checks that the collection has the tasks that this configuration names.

        Raises:
            ConfigError: an unknown task.
        """
        for field in ("page_only_tasks", "regex_tasks", "qrels_tasks"):
            check_known(getattr(self, field), tasks, where=f"EvaluationConfig.{field}")

    def judge_of(self, task: str) -> Judge:
        """The criterion for a hit of a task's queries."""
        return Judge.QRELS if task in self.qrels_tasks else self.judge


@writes("{output_dir}", kinds=[])
@first_host_only
def evaluate(
    *,
    runs_dir: str,
    data_dir: str,
    collection: str,
    output_dir: str,
    system: str,
    split: str = "test",
    tasks: Sequence[str] | None = None,
    config: EvaluationConfig = EvaluationConfig(),
    parameters: int | None = None,
    details: Mapping[str, str] | None = None,
    significance: SignificanceConfig | None = SignificanceConfig(),
) -> results.SystemResult:
    """Scores a system's runs and rebuilds the table of all systems in `output_dir`.

    Averages are over all queries of the split, by qrels over those with a positive; a query missing
    from the run counts as zero.

    Args:
        runs_dir: run files of the split.
        data_dir: folder of collections.
        collection: the collection.
        output_dir: receives results/<system>.json, per-query values and table.md, .csv, .png; with
            KILT's pages also kilt/*.jsonl, predictions for KILT's own script.
        system: the row's name.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.
        config: how runs are scored.
        parameters: number of the model's parameters, for the table.
        details: further columns of the row, name -> text.
        significance: the baseline of the table's tests; None tests nothing.

    Returns:
        The system's row.
    """
    store = PassageStore.open(data_dir, collection)
    config.check_tasks(store.tasks)
    # Before another system's values by query are replaced.
    results.check_system(pathlib.Path(output_dir) / "results", system, split)
    evaluations = {}
    for task in inputs.tasks_with(store, split=split, tasks=tasks):
        queries = store.queries(task, split)
        run = inputs.read_task_run(runs_dir, queries, store)
        check_complete(run, where=os.fspath(inputs.run_path(runs_dir, task, split)))
        with phase(f"evaluate {system} on {task} {split}"):
            evaluation = evaluations[task] = judge_run(run, queries, store, config)
        per_query = results.per_query_path(output_dir, system, task, split)
        results.write_per_query(per_query, evaluation)
        if config.judge_of(task) is Judge.KILT:
            # In the format of KILT's own script, whose gold is `kilt.jsonl`.
            kilt.write_predictions(
                pathlib.Path(output_dir) / "kilt" / f"{per_query.stem}.jsonl",
                run,
                inputs={query.id: query.text for query in _gold(queries)},
                pages_of=store.pages,
                titles_of=store.titles,
                ids=store.ids,
            )
        if (lacking := len(queries) - evaluation.num_queries) > 0:
            told = "%s %s: %d of %d queries have no positive and are left out of averages"
            logger.warning(told, task, split, lacking, len(queries))
    result = results.SystemResult(
        system=system,
        tasks={task: results.TaskResult.of(evaluation) for task, evaluation in evaluations.items()},
        parameters=parameters,
        fingerprint=store.fingerprint,
        split=split,
        details=dict(details or {}),
    )
    results.write_result(pathlib.Path(output_dir) / "results", result)
    # A measure of passages has no value if all of these tasks are judged by pages only.
    measures = [
        name
        for name in config.measures
        if any(name in scored.values for scored in evaluations.values())
    ]
    write_table(output_dir, by_task=measures[-1], split=split, significance=significance)
    averages = {name: metrics.group_averages(evaluations.values(), name) for name in measures}
    means = ", ".join(f"{name} {macro:.4f}" for name, (macro, _) in averages.items())
    logger.info("%s: %s (macro: mean over %d tasks)", system, means, len(evaluations))
    if len(evaluations) > 1:
        pooled = ", ".join(f"{name} {micro:.4f}" for name, (_, micro) in averages.items())
        logger.info("%s: %s (micro: all queries pooled)", system, pooled)
    logger.info("table of all systems: %s", pathlib.Path(output_dir) / "table.md")
    return result


def check_complete(run: Run, *, where: str) -> None:
    """Tells how many queries have no result and count as zero.

    Raises:
        DataError: they are more than half of all.
    """
    lacking = int((run.rows == NO_ROW).all(axis=1).sum())
    told = f"{lacking:,} of {len(run.query_ids):,} queries have no result"
    if lacking > _MOST_LACKING * len(run.query_ids):
        raise DataError(
            told,
            where=where,
            expected=f"results for at least {1 - _MOST_LACKING:.0%} of them",
            fix="search this split again, or give the runs of this collection's queries",
        )
    if lacking:
        logger.warning("%s: %s and count as zero", where, told)


def judge_run(
    run: Run, queries: QuerySet, store: PassageStore, config: EvaluationConfig
) -> metrics.Evaluation:
    """Scores one run.

    Raises:
        ConfigError: no query has an answer to judge by, or the task has no KILT gold because it
            was not prepared from KILT's files.
    """
    measures = config.measures_of(queries.task)
    judge = config.judge_of(queries.task)
    if judge is Judge.QRELS:
        return metrics.evaluate_qrels(run, metrics.qrels_of(queries), measures)
    if judge is Judge.KILT:
        return judge_kilt(run, queries, store, measures)
    answers = {query.id: query.answers for query in queries}
    if not any(answers.values()):
        problem = f"no query of task {queries.task!r} has answers"
        fix = "judge by 'qrels', name the task in qrels_tasks, or prepare it with answers"
        raise ConfigError(problem, where="EvaluationConfig.judge", fix=fix)
    matcher = inputs.answer_matcher(store, queries.task, config.regex_tasks)
    return metrics.evaluate_answers(run, answers, matcher, measures)


def judge_kilt(
    run: Run, queries: QuerySet, store: PassageStore, measures: Sequence[str]
) -> metrics.Evaluation:
    """Page measures by the official gold, others by gold passages; over all queries of the gold.

    A query whose gold names no passage of the collection counts as zero at passage level.

    Raises:
        ConfigError: the task was not prepared from KILT's files.
    """
    gold = {
        query.id: [
            None if output.provenance is None else {p.page_id for p in output.provenance}
            for output in query.outputs
        ]
        for query in _gold(queries)
    }
    values: dict[str, np.ndarray] = {}
    if by_page := [name for name in measures if kilt.is_page_measure(name)]:
        pages = kilt.ranked_pages(run, store.pages)
        values |= kilt.evaluate_pages(pages, gold, by_page).values
    if by_passage := [name for name in measures if not kilt.is_page_measure(name)]:
        by_gold = metrics.evaluate_qrels(run, metrics.qrels_of(queries), by_passage)
        place = {query_id: number for number, query_id in enumerate(by_gold.query_ids)}
        for name, scores in by_gold.values.items():
            values[name] = np.array([scores[place[id]] if id in place else 0.0 for id in gold])
    return metrics.Evaluation(tuple(gold), {name: values[name] for name in measures})


def _gold(queries: QuerySet) -> list[Question]:
    path = gold_path(queries)
    if not path.exists():
        problem = f"task {queries.task!r} was not prepared from KILT's files"
        fix = "prepare it from files of KILT's format, or judge by 'qrels'"
        raise ConfigError(problem, where=str(path), fix=fix)
    return list(read_kilt(path))


def write_table(
    output_dir: str | pathlib.Path,
    *,
    systems: Sequence[str] | None = None,
    by_task: str = "",
    split: str = "test",
    significance: SignificanceConfig | None = SignificanceConfig(),
) -> ResultsTable:
    """Collects the result files of a directory into table.md, table.csv and table.png.

    Args:
        output_dir: has results/ and per_query/.
        systems: the rows, in order; None means all, by name.
        by_task: the measure shown per task; empty is the last.
        split: whose queries were evaluated.
        significance: the baseline of the tests; None tests nothing.

    Raises:
        DataError: no result, or rows of different queries.
    """
    rows = results.read_results(pathlib.Path(output_dir) / "results", systems)
    table = ResultsTable(rows, by_task)
    if significance is not None:
        table.comparisons = compare_with_baselines(
            output_dir, rows, split=split, config=significance
        )
    table.write(output_dir, name="table")
    return table
