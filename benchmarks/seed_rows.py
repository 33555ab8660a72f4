"""Rows of results under several seeds: read from folders of tables, averaged, and shown."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import per_query_path, read_per_query, read_results

Row = Mapping[int, Mapping[str, Evaluation]]
"""Seed -> task -> values by query."""


def read_row(directory: pathlib.Path, system: str, *, split: str = "test") -> dict[str, Evaluation]:
    """Task -> values by query of a row of a results folder; empty where it is not there yet."""
    if not (directory / "results").is_dir():
        return {}
    results = {result.system: result for result in read_results(directory / "results")}
    if system not in results:
        return {}
    return {
        task: read_per_query(per_query_path(directory, system, task, split))
        for task in results[system].tasks
    }


def seed_folders(output_dir: pathlib.Path) -> dict[int, pathlib.Path]:
    """Seed -> its folder, of OUTPUT_DIR/seed-*."""
    folders = sorted(output_dir.glob("seed-*"))
    return {int(folder.name.removeprefix("seed-")): folder for folder in folders}


def read_rows(folders: Mapping[int, Sequence[pathlib.Path]]) -> dict[str, Row]:
    """Row -> seed -> task -> values by query, of each seed's tables in one or more folders."""
    names = [
        result.system
        for directories in folders.values()
        for directory in directories
        if (directory / "results").is_dir()
        for result in read_results(directory / "results")
    ]
    rows: dict[str, Row] = {}
    for name in dict.fromkeys(names):
        by_seed: dict[int, dict[str, Evaluation]] = {}
        for seed, directories in folders.items():
            for directory in directories:
                by_seed.setdefault(seed, {}).update(read_row(directory, name))
        rows[name] = {seed: tasks for seed, tasks in by_seed.items() if tasks}
    return rows


def on_tasks(row: Row, tasks: Sequence[str]) -> Row:
    """A row's values on some tasks, under the seeds that have all of them."""
    return {
        seed: {task: values[task] for task in tasks}
        for seed, values in row.items()
        if values.keys() >= set(tasks)
    }


def mean_over_tasks(tasks: Mapping[str, Evaluation], measure: str) -> float:
    """Each task counts the same."""
    return statistics.fmean(float(task.values[measure].mean()) for task in tasks.values())


def mean_over_seeds(seeds: Sequence[Mapping[str, Evaluation]]) -> dict[str, Evaluation]:
    """Values by query averaged over seeds, of the tasks and measures that all seeds have."""
    means = {}
    for task, first in seeds[0].items():
        of_seeds = [tasks[task] for tasks in seeds if task in tasks]
        if len(of_seeds) == len(seeds):
            assert all(other.query_ids == first.query_ids for other in of_seeds), task
            shared = set.intersection(*(set(other.values) for other in of_seeds))
            values = {
                name: np.mean([other.values[name] for other in of_seeds], axis=0)
                for name in first.values
                if name in shared
            }
            means[task] = Evaluation(first.query_ids, values)
    return means


def spread_table(rows: Mapping[str, Row], measure: str) -> str:
    """A line per row: mean ± standard deviation over seeds, in per cent, by task and on average."""
    tasks = list(
        dict.fromkeys(t for row in rows.values() for values in row.values() for t in values)
    )
    lines = [f"| system | {' | '.join([*tasks, 'mean'])} |", f"|---|{'---:|' * (len(tasks) + 1)}"]
    for name, row in rows.items():
        shares = {
            task: [
                float(seed[task].values[measure].mean()) for seed in row.values() if task in seed
            ]
            for task in tasks
        }
        complete = [seed for seed in row.values() if len(seed) == len(tasks)]
        shares["mean"] = [mean_over_tasks(seed, measure) for seed in complete]
        cells = [spread_text([100 * share for share in seeds]) for seeds in shares.values()]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def spread_text(values: Sequence[float], *, digits: int = 1) -> str:
    """70.0 ± 14.1 of several values, 70.0 of one, "-" without any."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}" if values else "-"
