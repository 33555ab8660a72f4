"""DPR-MUF's tables, from the rows of a pipeline's directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from taser_jax.commands.inputs import tasks_with
from taser_jax.commands.pipelines.retrieval_stages import BM25, Setting, System
from taser_jax.data.collections.store import PassageStore
from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.results import (
    SystemResult,
    TaskResult,
    per_query_path,
    read_per_query,
    read_results,
    write_per_query,
    write_result,
)
from taser_jax.evaluation.significance import TaskQueries, compare_with_baselines
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, Positive

Evaluations = Mapping[str, Evaluation]
"""Task -> a row's values by query."""
MUF, OWN, WORST, ORACLE = "MUF", "Single, own domain", "Single, worst", "Oracle indicator"
OTHER, UNSEEN = "Single, best other", "Joint without the domain"
BAYESIAN = "Oracle Bayesian"
WITHOUT_DOMAIN, EQUAL = "MUF without the domain", "Equal weights"
# Rows that are no model's: no model may have their names.
OTHER_ROWS = (*(MUF, OWN, WORST, ORACLE, OTHER, UNSEEN, BAYESIAN, WITHOUT_DOMAIN, EQUAL), BM25)
TEST = "test"


def of_size(members: int) -> str:
    """The row of a fusion with the first members."""
    return f"MUF, {members} members"


def with_bm25(row: str) -> str:
    """The row of a fusion with BM25 added."""
    return f"{row} + BM25"


@dataclasses.dataclass(frozen=True)
class MixedConfig(Checked):
    """Random mixes of several tasks' queries (DPR-MUF, section 6.2); draws have a fixed seed.

    Attributes:
        tasks: tasks that are mixed in equal shares; empty means all that are searched.
        sets: number of mixes that are averaged over.
        queries: queries in each mix.
    """

    tasks: tuple[str, ...] = ()
    sets: Positive = 5
    queries: Positive = 3000


def check(
    specialists: Mapping[str, System], setting: Setting, mixed: MixedConfig, collection: str
) -> None:
    """Rejects tables that could not be written once all models are there.

    Raises:
        ConfigError: a measure that is not evaluated, or mixes that tasks do not divide.
    """
    if setting.hybrid_measure not in setting.evaluation.measures:
        problem = f"{setting.hybrid_measure!r} chooses rows and is none of the measures"
        fix = f"set Setting.hybrid_measure to one of {', '.join(setting.evaluation.measures)}"
        raise ConfigError(problem, where="EvaluationConfig.measures", fix=fix)
    passages = PassageStore.open(setting.data_dir, collection)
    owned = {task for system in specialists.values() for task in system.tasks or ()}
    searched = tasks_with(passages, split=TEST, tasks=setting.tasks)
    draw_mixes({t: len(passages.queries(t, TEST)) for t in searched if t in owned}, mixed)


def write_tables(
    setting: Setting,
    values: Mapping[str, Evaluations],
    own: Mapping[str, str],
    *,
    specialists: Sequence[str],
    models: Sequence[str],
    fusions: Sequence[str],
    unseen: Mapping[str, str],
    sizes: Sequence[int],
    mixed: MixedConfig,
) -> dict[str, ResultsTable]:
    """The paper's tables 2 to 4, from the rows' values by query.

    Args:
        setting: the pipeline's setting.
        values: row -> its values by query, for every model and fusion, alone and with BM25, and
            for the Bayesian oracle.
        own: task -> its specialist.
        specialists: names of the specialists among them.
        models: joint and untrained models among them.
        fusions: fusions among them, those of `sizes` aside.
        unseen: specialist -> the joint model that has not seen its tasks; may be empty.
        sizes: numbers of members, for the table of sizes.
        mixed: the mixes of queries.

    Returns:
        Name -> table: "domains", "bm25", "mixed" and, where asked for, "sizes".
    """
    directory, measure = pathlib.Path(setting.output_dir), setting.hybrid_measure
    singles = {name: values[name] for name in specialists}
    joined = {name: values[with_bm25(name)] for name in specialists}
    combined = {
        OWN: pick(singles, own),
        OTHER: pick(singles, best_other(singles, own, measure)),
        WORST: pick(singles, worst_of(singles, measure)),
    }
    if unseen:
        of_task = {task: unseen[name] for task, name in own.items()}
        combined[UNSEEN] = pick(values, of_task)
        without = {task: with_bm25(name) for task, name in of_task.items()}
        write_row(directory, with_bm25(UNSEEN), pick(values, without), split=TEST)
    for name, row in {**combined, with_bm25(OWN): pick(joined, own)}.items():
        write_row(directory, name, row, split=TEST)
    shown = [*models, *fusions]
    added = [row for row in (OWN, *shown) if row not in (WITHOUT_DOMAIN, EQUAL)]
    if unseen:
        added.insert(1, UNSEEN)
    tables = {
        "domains": _table(setting, directory, "domains", [*singles, *combined, *shown]),
        "bm25": _table(setting, directory, "bm25", [BM25, *map(with_bm25, added)]),
    }
    if sizes:
        sized = [*map(of_size, sizes), MUF]
        tables["sizes"] = _table(setting, directory, "sizes", sized)
    # Of tasks that have a specialist: the indicator knows one for each.
    counts = {task: singles[name][task].num_queries for task, name in own.items()}
    draws = draw_mixes(counts, mixed)
    mixable = {**singles, **{name: values[name] for name in shown}}
    mixable[ORACLE] = pick(singles, own)
    if BAYESIAN in values:
        mixable[BAYESIAN] = values[BAYESIAN]
    for name, row in mixable.items():
        write_row(directory / "mixed", name, mix(row, draws), split=TEST)
    tables["mixed"] = _table(setting, directory / "mixed", "mixed", list(mixable))
    return tables


def _table(
    setting: Setting, directory: pathlib.Path, name: str, shown: Sequence[str]
) -> ResultsTable:
    """Rows of a directory as a table of their own, written beside the others."""
    results = read_results(directory / "results", shown)
    table = ResultsTable(results, setting.evaluation.measures[-1])
    if (config := setting.significance) is not None:
        if config.baseline is not None and with_bm25(config.baseline) in shown:
            config = dataclasses.replace(config, baseline=with_bm25(config.baseline))
        queries = TaskQueries.MIXED if name == "mixed" else TaskQueries.OWN
        table.comparisons = compare_with_baselines(
            directory, results, split=TEST, config=config, queries=queries
        )
    table.write(setting.output_dir, name=name)
    return table


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
        config: tasks and sizes.

    Raises:
        ConfigError: an unknown task, a mix that the tasks do not divide, or a task too small.
    """
    tasks = list(config.tasks or sizes)
    share, rest = divmod(config.queries, max(len(tasks), 1))
    if not tasks or rest or any(sizes.get(task, 0) < share for task in tasks):
        shown = ", ".join(f"{task} {sizes.get(task, 'unknown')}" for task in tasks)
        problem = (
            f"{config.sets} mixes of {config.queries} queries; there are of {shown or 'no task'}"
        )
        fix = "take equal shares of known tasks, none larger than its task"
        raise ConfigError(problem, where="MixedConfig", fix=fix)

    def lines(number: int, place: int, task: str) -> Int[np.ndarray, " drawn"]:
        return np.random.default_rng([0, number, place]).permutation(sizes[task])[:share]

    return [
        {task: lines(number, place, task) for place, task in enumerate(tasks)}
        for number in range(config.sets)
    ]


def mix(row: Evaluations, draws: Sequence[Mapping[str, np.ndarray]]) -> Evaluations:
    """A row's values on every mix, named "mix 1", "mix 2", ..."""
    mixes = {}
    for number, draw in enumerate(draws, start=1):
        measures = set.intersection(*(set(row[task].values) for task in draw))
        ids = tuple(f"{task}:{row[task].query_ids[line]}" for task in draw for line in draw[task])
        values = {
            name: np.concatenate([row[task].values[name][draw[task]] for task in draw])
            for name in next(iter(row.values())).values
            if name in measures
        }
        mixes[f"mix {number}"] = Evaluation(ids, values)
    return mixes
