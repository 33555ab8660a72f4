"""Rows of a table combined from others task by task, and mixes of several tasks' queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import (
    SystemResult,
    TaskResult,
    per_query_path,
    read_per_query,
    write_per_query,
    write_result,
)
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError

Evaluations = Mapping[str, Evaluation]
"""Task -> a row's values by query."""


@dataclasses.dataclass(frozen=True)
class MixedConfig:
    """Random mixes of several tasks' queries (DPR-MUF, section 6.2).

    Attributes:
        tasks: tasks that are mixed in equal shares; empty means all that are searched.
        sets: number of mixes that are averaged over.
        queries: queries in each mix.
        seed: seed of the draws.
    """

    tasks: tuple[str, ...] = ()
    sets: int = 5
    queries: int = 3000
    seed: int = 0


def read_row(directory: FilePath, system: str, tasks: Sequence[str], *, split: str) -> Evaluations:
    """A row's values by query, from the directory of a table."""
    return {task: read_per_query(per_query_path(directory, system, task, split)) for task in tasks}


def write_row(
    directory: FilePath,
    system: str,
    row: Evaluations,
    *,
    split: str,
    evaluated: SystemResult | None = None,
) -> None:
    """Writes a row into the directory of a table, as if it had been evaluated there.

    Args:
        directory: gets results/ and per_query/ of the row.
        system: its name.
        row: its values by query.
        split: split of the queries.
        evaluated: the evaluated row, with its parameters and details; None for a combined row.
    """
    for task, evaluation in row.items():
        write_per_query(per_query_path(directory, system, task, split), evaluation)
    results = {task: TaskResult.of(evaluation) for task, evaluation in row.items()}
    described = evaluated or SystemResult(system, results)
    write_result(f"{directory}/results", dataclasses.replace(described, tasks=results))


def worst_of(rows: Mapping[str, Evaluations], measure: str) -> dict[str, str]:
    """Task -> the row with the lowest mean of a measure; the first among equals."""
    tasks = next(iter(rows.values()))
    return {
        task: min(rows, key=lambda name: rows[name][task].values[measure].mean()) for task in tasks
    }


def best_other(
    rows: Mapping[str, Evaluations], own: Mapping[str, str], measure: str
) -> dict[str, str]:
    """Task -> the row with the highest mean of a measure, its own specialist's aside.

    It is chosen on the values that are reported, which favours it.
    """
    return {
        task: max(
            (name for name in rows if name != specialist),
            key=lambda name: rows[name][task].values[measure].mean(),
        )
        for task, specialist in own.items()
    }


def pick(rows: Mapping[str, Evaluations], chosen: Mapping[str, str]) -> Evaluations:
    """A row whose values on each task are those of the chosen row."""
    return {task: rows[name][task] for task, name in chosen.items()}


def draw_mixes(
    sizes: Mapping[str, int], config: MixedConfig
) -> list[dict[str, Int[np.ndarray, " drawn"]]]:
    """Lines of each task's queries in every mix, without repetition inside a mix.

    Args:
        sizes: task -> its number of queries.
        config: tasks, sizes and seed.

    Raises:
        ConfigError: an unknown task, a mix that the tasks do not divide, or a task too small.
    """
    tasks = list(config.tasks or sizes)
    share, rest = divmod(config.queries, max(len(tasks), 1))
    unknown = [task for task in tasks if task not in sizes]
    small = [task for task in tasks if sizes.get(task, 0) < share]
    if not tasks or unknown or rest or share < 1 or config.sets < 1 or small:
        shown = ", ".join(f"{task} {sizes.get(task, 'unknown')}" for task in unknown + small)
        raise ConfigError(
            f"{config.sets} mixes of {config.queries} queries from {len(tasks)} tasks"
            + (f"; there are of {shown}" if shown else ""),
            where="MixedConfig",
            expected="equal shares of known tasks, none larger than its task",
            fix="take fewer queries, a multiple of the number of tasks, or other tasks",
        )
    return [
        {
            task: np.random.default_rng([config.seed, number, place]).permutation(sizes[task])[
                :share
            ]
            for place, task in enumerate(tasks)
        }
        for number in range(config.sets)
    ]


def mix(row: Evaluations, draws: Sequence[Mapping[str, np.ndarray]]) -> Evaluations:
    """A row's values on every mix, named "mix 1", "mix 2", ..."""
    found = {}
    for number, draw in enumerate(draws, start=1):
        measures = set.intersection(*(set(row[task].values) for task in draw))
        ids = tuple(f"{task}:{row[task].query_ids[line]}" for task in draw for line in draw[task])
        values = {
            name: np.concatenate([row[task].values[name][draw[task]] for task in draw])
            for name in next(iter(row.values())).values
            if name in measures
        }
        found[f"mix {number}"] = Evaluation(ids, values)
    return found
