"""Whether the rows of a results table differ from one of them, with intervals and p-values.

A paired bootstrap over queries says what another draw of queries would change for these trained
models; only several seeds say what another training would.
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import (
    SystemResult,
    per_query_path,
    read_per_query,
    tasks_and_measures,
    tasks_with,
)
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import logger

AVERAGE = "average"
_RESAMPLES = 10_000
# Number of resamples whose weights are held in memory at a time.
_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class SignificanceConfig:
    """What the rows of a table are tested against.

    Attributes:
        baseline: the row; None means the table's first.
        more_baselines: further rows, each with differences of its own.
    """

    baseline: str | None = None
    more_baselines: tuple[str, ...] = ()


class TaskQueries(enum.Enum):
    """Of what the tasks of a table are, whose means are tested.

    OWN: of queries of their own, which are resampled apart. MIXED: mixes of the same queries, named
    as the queries are.
    """

    OWN = "own"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """Difference of two systems on the same queries.

    Attributes:
        difference: mean of the first minus mean of the second.
        low: lower end of the 95% interval.
        high: its upper end.
        p_value: two-sided.
    """

    difference: float
    low: float
    high: float
    p_value: float

    def __str__(self) -> str:
        """The difference and its interval in points, and the p-value."""
        mean, low, high = (
            f"{100 * value:+.1f}" for value in (self.difference, self.low, self.high)
        )
        p_value = "p < 0.001" if self.p_value < 0.001 else f"p {self.p_value:.3f}"
        return f"{mean} [{low}, {high}] {p_value}"


def bootstrap_over_tasks(
    first: Mapping[str, Evaluation],
    second: Mapping[str, Evaluation],
    measures: Sequence[str],
    *,
    resamples: int = _RESAMPLES,
    where: str = "paired bootstrap",
) -> dict[tuple[str, str], PairedComparison]:
    """Tests the differences of two systems on each task, and that of their means over tasks.

    For the mean, the queries of each task are resampled apart: tasks count the same, as in the
    table, and are not drawn themselves.

    Source: Sakai, SIGIR 2006, "Evaluating evaluation metrics based on the bootstrap"; here the
    percentile interval of the mean difference, and as p-value twice the share of resamples on the
    other side of zero.

    Args:
        first: task -> one system's evaluation.
        second: the other's; the same tasks, and in each the same queries in the same order.
        measures: those to compare; a task without one has no part in its mean.
        resamples: number of bootstrap samples.
        where: what is compared, for messages.

    Returns:
        Task, measure -> comparison; the task of the means is `AVERAGE`.

    Raises:
        DataError: a task's queries differ.
    """
    compared: dict[tuple[str, str], PairedComparison] = {}
    drawn: dict[str, list[tuple[float, Float64[np.ndarray, " resamples"]]]] = {}
    for task in first:
        shared = [
            name for name in measures if name in first[task].values and name in second[task].values
        ]
        if not shared:
            continue
        _check_same_queries(first[task], second[task], where=f"{where}, task {task!r}")
        differences = np.stack(
            [first[task].values[name] - second[task].values[name] for name in shared], axis=1
        )
        # Each task draws apart from the others, whatever else the table holds.
        task_seed = [0, zlib.crc32(task.encode("utf-8"))]
        means = resampled_means(differences, resamples, task_seed)
        for column, name in enumerate(shared):
            effect = float(differences[:, column].mean())
            compared[task, name] = _comparison(effect, means[:, column])
            drawn.setdefault(name, []).append((effect, means[:, column]))
    for name, of_tasks in drawn.items():
        effects, samples = zip(*of_tasks, strict=True)
        compared[AVERAGE, name] = _comparison(np.mean(effects), np.mean(samples, axis=0))
    return compared


def bootstrap_over_mixes(
    first: Mapping[str, Evaluation],
    second: Mapping[str, Evaluation],
    measures: Sequence[str],
    *,
    resamples: int = _RESAMPLES,
) -> dict[tuple[str, str], PairedComparison]:
    """Tests the mean over mixes, of which several have the same query: that is drawn once for all.

    Drawn in each mix apart, five mixes of the same queries would seem to be five times as many.

    Args:
        first: mix -> one system's evaluation.
        second: the other's; the same mixes, of the same queries in the same order.
        measures: those to compare, which all mixes have.
        resamples: number of bootstrap samples.
    """
    ids = dict.fromkeys(id for evaluation in first.values() for id in evaluation.query_ids)
    place = {id: number for number, id in enumerate(ids)}
    # Of each query its part of each mean; last, of the number that it is divided by.
    parts = np.zeros((len(ids), len(measures) + 1))
    for name, evaluation in first.items():
        pairs = [(evaluation.values[m], second[name].values[m]) for m in measures]
        columns = [*(one - other for one, other in pairs), np.ones(evaluation.num_queries)]
        rows = [place[id] for id in evaluation.query_ids]
        parts[rows] += np.stack(columns, axis=1) / len(rows)
    drawn = resampled_means(parts, resamples, 0)
    means, effects = drawn[:, :-1] / drawn[:, -1:], parts.sum(axis=0) / len(first)
    return {
        (AVERAGE, name): _comparison(effects[column], means[:, column])
        for column, name in enumerate(measures)
    }


def resampled_means(
    values: Float64[np.ndarray, "queries columns"], resamples: int, seed: int | Sequence[int]
) -> Float64[np.ndarray, "resamples columns"]:
    """Means of every column over bootstrap samples of the rows; columns share the samples."""
    rng, count = np.random.default_rng(seed), len(values)
    means = []
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        drawn = rng.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        # How often each row is in each sample.
        weights = np.bincount(drawn.reshape(-1), minlength=size * count).reshape(size, count)
        means.append(weights.astype(np.float64) @ values / count)
    return np.concatenate(means)


def _check_same_queries(first: Evaluation, second: Evaluation, *, where: str) -> None:
    if first.query_ids != second.query_ids:
        alone = sorted({*first.query_ids} ^ {*second.query_ids})
        some = f": {len(alone):,} are of one alone, such as {alone[0]!r}" if alone else "' order"
        problem = f"the two were evaluated on different queries{some}"
        fix = "evaluate both on the same split of the same collection"
        raise DataError(problem, where=where, fix=fix)


def _comparison(
    difference: float | np.floating, means: Float64[np.ndarray, " resamples"]
) -> PairedComparison:
    low, high = np.quantile(means, [0.025, 0.975])
    p_value = min(1.0, 2 * min((means <= 0).mean(), (means >= 0).mean()))
    return PairedComparison(*map(float, (difference, low, high, p_value)))


@dataclasses.dataclass(frozen=True)
class Comparisons:
    """The rows of a table against one of them.

    Attributes:
        baseline: the row's name.
        queries: system, task (or `AVERAGE`), measure -> difference, by a bootstrap over queries.
    """

    baseline: str
    queries: Mapping[tuple[str, str, str], PairedComparison]


def compare_with_baselines(
    directory: FilePath,
    results: Sequence[SystemResult],
    *,
    split: str,
    config: SignificanceConfig,
    queries: TaskQueries = TaskQueries.OWN,
) -> list[Comparisons]:
    """Tests every row of a directory's table against each baseline that has values by query.

    A row is compared on the tasks that it shares with the baseline, and on average where the table
    has an average of both.

    Args:
        directory: has results/ and per_query/.
        results: the rows, in order.
        split: whose queries they were evaluated on.
        config: names of the rows that the others are tested against.
        queries: whether tasks share their queries.

    Returns:
        The comparisons, in the baselines' order.

    Raises:
        DataError: a row was evaluated on other queries than the baseline.
    """
    tasks, measures = tasks_and_measures(results)
    values = {result.system: _by_task(directory, result, split) for result in results}
    comparisons = []
    for baseline in (config.baseline or results[0].system, *config.more_baselines):
        if baseline not in values:
            # Rows are evaluated one by one: the baseline's may be yet to come.
            rows = ", ".join(values)
            logger.warning(
                "baseline %r is not a row (%s): no row is tested against it", baseline, rows
            )
        if not (of_baseline := values.get(baseline)):
            continue
        over_queries: dict[tuple[str, str, str], PairedComparison] = {}
        for system, of_system in values.items():
            if system == baseline:
                continue
            shared = [task for task in tasks if task in of_system and task in of_baseline]
            differences = bootstrap_over_tasks(
                {task: of_system[task] for task in shared},
                {task: of_baseline[task] for task in shared},
                measures,
                where=f"rows {system!r} and {baseline!r}",
            )
            if queries is TaskQueries.MIXED:
                averaged = [name for task, name in differences if task == AVERAGE]
                differences |= bootstrap_over_mixes(of_system, of_baseline, averaged)
            for (task, name), compared in differences.items():
                of_table = tasks_with(name, tasks, results) if task == AVERAGE else [task]
                if all((each, name) in differences for each in of_table):
                    over_queries[system, task, name] = compared
        comparisons.append(Comparisons(baseline, over_queries))
    return comparisons


def _by_task(directory: FilePath, result: SystemResult, split: str) -> dict[str, Evaluation]:
    """Task -> values by query, where they were written."""
    paths = {task: per_query_path(directory, result.system, task, split) for task in result.tasks}
    return {task: read_per_query(path) for task, path in paths.items() if path.exists()}
