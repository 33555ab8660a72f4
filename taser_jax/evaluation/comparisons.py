"""The rows of a results table against one of them: differences with their intervals."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import (
    SystemResult,
    per_query_path,
    read_per_query,
    read_results,
)
from taser_jax.evaluation.significance import (
    PairedComparison,
    SignificanceConfig,
    bootstrap_over_tasks,
    paired_over_seeds,
)
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.progress import logger

AVERAGE = "average"
_NONE = "-"
_PARTS = ("difference", "low", "high", "p")


@dataclasses.dataclass(frozen=True)
class ComparedRows:
    """Some rows of a table, as shown.

    Attributes:
        title: what is compared with what.
        header: names of the columns.
        lines: per system, its name and its differences in points.
    """

    title: str
    header: list[str]
    lines: list[list[str]]


@dataclasses.dataclass(frozen=True)
class Comparisons:
    """The rows of a table against one of them.

    Attributes:
        baseline: the row's name.
        queries: system, task (or `AVERAGE`), measure -> difference, by a bootstrap over queries.
        seeds: system, measure -> difference of the averages, by a t-test over seeds.
    """

    baseline: str
    queries: Mapping[tuple[str, str, str], PairedComparison]
    seeds: Mapping[tuple[str, str], PairedComparison] = dataclasses.field(default_factory=dict)

    def rows(
        self, systems: Sequence[str], task: str, measures: Sequence[str]
    ) -> ComparedRows | None:
        """The systems compared on a task, as cells to print; None where no system is."""
        over_seeds = bool(self.seeds) and task == AVERAGE
        header = ["system", *measures, *(f"{name} (seeds)" for name in measures if over_seeds)]
        lines = []
        for system in systems:
            cells = [_shown(one) for one in self._found(system, task, measures)]
            cells = cells[: len(header) - 1]
            if any(cell != _NONE for cell in cells):
                lines.append([system, *cells])
        title = f"Difference from {self.baseline}, 95% interval and p over queries"
        title += " and over seeds" if over_seeds else ""
        return ComparedRows(title, header, lines) if lines else None

    def csv_names(self, measures: Sequence[str], baseline: str = "baseline") -> list[str]:
        """Columns of `csv_values`."""
        kinds = [f"vs {baseline}", *([f"vs {baseline} over seeds"] if self.seeds else [])]
        return [f"{name} {kind} {part}" for kind in kinds for name in measures for part in _PARTS]

    def csv_values(self, system: str, task: str, measures: Sequence[str]) -> list[str]:
        """Difference, interval and p-value of each measure; empty where nothing is compared."""
        cells: list[str] = []
        for one in self._found(system, task, measures):
            parts = (one.difference, one.low, one.high, one.p_value) if one else ()
            cells += [f"{part:.6f}" for part in parts] or [""] * len(_PARTS)
        return cells

    def _found(
        self, system: str, task: str, measures: Sequence[str]
    ) -> list[PairedComparison | None]:
        found = [self.queries.get((system, task, name)) for name in measures]
        if self.seeds:
            of_average = self.seeds if task == AVERAGE else {}
            found += [of_average.get((system, name)) for name in measures]
        return found


def compare_with_baselines(
    directory: FilePath,
    results: Sequence[SystemResult],
    *,
    split: str,
    config: SignificanceConfig,
) -> list[Comparisons]:
    """`compare_rows` with each baseline that is a row with values by query, in their order."""
    baselines = [config.baseline, *config.more_baselines]
    configs = [dataclasses.replace(config, baseline=name) for name in baselines]
    found = [compare_rows(directory, results, split=split, config=one) for one in configs]
    return [one for one in found if one is not None]


def compare_rows(
    directory: FilePath,
    results: Sequence[SystemResult],
    *,
    split: str,
    config: SignificanceConfig,
) -> Comparisons | None:
    """Tests every row of a directory's table against the baseline.

    A row is compared on the tasks that it shares with the baseline, and on average where the table
    has an average of both.

    Args:
        directory: has results/ and per_query/.
        results: the rows, in order.
        split: whose queries they were evaluated on.
        config: the baseline, the resampling, and other seeds' directories.

    Returns:
        The comparisons; None where the baseline is not a row, or has no values by query.

    Raises:
        DataError: a row was evaluated on other queries than the baseline, or another seed's
            directory has no results.
    """
    name = config.baseline or results[0].system
    baseline = next((result for result in results if result.system == name), None)
    if baseline is None:
        # Rows are evaluated one by one: the baseline's may be yet to come.
        rows = ", ".join(result.system for result in results)
        logger.warning("baseline %r is not a row (%s): no row is tested against it", name, rows)
    of_baseline = _by_task(directory, baseline, split) if baseline else {}
    if baseline is None or not of_baseline:
        return None
    tasks, measures = _tasks_and_measures(results)
    seeds = [read_results(pathlib.Path(one) / "results") for one in config.seed_dirs]
    over_queries: dict[tuple[str, str, str], PairedComparison] = {}
    over_seeds: dict[tuple[str, str], PairedComparison] = {}
    for result in results:
        if result is baseline:
            continue
        values = _by_task(directory, result, split)
        shared = [task for task in tasks if task in values and task in of_baseline]
        by_task, averages = bootstrap_over_tasks(
            {task: values[task] for task in shared},
            {task: of_baseline[task] for task in shared},
            measures,
            where=f"rows {result.system!r} and {baseline.system!r}",
        )
        for task, found in by_task.items():
            over_queries |= {(result.system, task, name): one for name, one in found.items()}
        for name, average in averages.items():
            wanted = _tasks_with(name, tasks, results)
            if set(wanted) <= {task for task in shared if name in by_task.get(task, ())}:
                over_queries[result.system, AVERAGE, name] = average
            figures = _over_seeds(result, baseline, name, wanted, seeds)
            if seeds and figures is not None:
                over_seeds[result.system, name] = paired_over_seeds(*figures)
    return Comparisons(baseline.system, over_queries, over_seeds)


def _over_seeds(
    result: SystemResult,
    baseline: SystemResult,
    measure: str,
    tasks: Sequence[str],
    seeds: Sequence[Sequence[SystemResult]],
) -> tuple[list[float], list[float]] | None:
    """Both rows' averages under each seed; None where one of them is missing."""
    pairs = [(result, baseline)]
    for rows in seeds:
        by_name = {row.system: row for row in rows}
        if result.system not in by_name or baseline.system not in by_name:
            return None
        pairs.append((by_name[result.system], by_name[baseline.system]))
    first = [row.mean(measure, tasks) for row, _ in pairs]
    second = [row.mean(measure, tasks) for _, row in pairs]
    known = [value for value in first if value is not None]
    known_second = [value for value in second if value is not None]
    complete = len(known) == len(known_second) == len(pairs)
    return (known, known_second) if complete else None


def _by_task(directory: FilePath, result: SystemResult, split: str) -> dict[str, Evaluation]:
    """Task -> values by query, where they were written."""
    paths = {task: per_query_path(directory, result.system, task, split) for task in result.tasks}
    return {task: read_per_query(path) for task, path in paths.items() if path.exists()}


def _tasks_and_measures(results: Sequence[SystemResult]) -> tuple[list[str], list[str]]:
    tasks = dict.fromkeys(task for result in results for task in result.tasks)
    measures = dict.fromkeys(
        name for result in results for task in result.tasks.values() for name in task.metrics
    )
    return list(tasks), list(measures)


def _tasks_with(measure: str, tasks: Sequence[str], results: Sequence[SystemResult]) -> list[str]:
    """The tasks that the table's average of a measure is over."""
    return [
        task for task in tasks if any(result.value(measure, task) is not None for result in results)
    ]


def _shown(value: PairedComparison | None) -> str:
    """The difference and its interval in points, and the p-value."""
    if value is None:
        return _NONE
    points = [f"{100 * number:+.1f}" for number in (value.difference, value.low, value.high)]
    p_value = "p < 0.001" if value.p_value < 0.001 else f"p {value.p_value:.3f}"
    return f"{points[0]} [{points[1]}, {points[2]}] {p_value}"
