"""Evaluation results on disk: one JSON file per system, one CSV of per-query values per task.

The JSON files alone are enough to rebuild a table.

    {"format_version": 1, "system": "TASER (after mining)", "parameters": 4202496,
     "fingerprint": "0f3a...", "details": {"wall time": "4 min"},
     "tasks": {"summary": {"num_queries": 412, "metrics": {"R@1": 0.512, ...}}, ...}}
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.storage.artifacts import FilePath, file_name, replacing, write_json
from taser_jax.storage.checksums import check_file
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import read_typed

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One system's averages on one task.

    Attributes:
        metrics: measure -> mean over the task's queries, between 0 and 1.
        num_queries: number of queries averaged over.
    """

    metrics: dict[str, float]
    num_queries: int

    @classmethod
    def of(cls, evaluation: Evaluation) -> TaskResult:
        """The averages of an evaluation."""
        return cls(evaluation.averages(), evaluation.num_queries)


@dataclasses.dataclass(frozen=True)
class SystemResult:
    """One row of a results table.

    Attributes:
        system: the row's name.
        tasks: task -> its averages.
        parameters: parameters of the model; None if it has none (BM25).
        fingerprint: the collection's fingerprint.
        split: whose queries were evaluated.
        details: further columns, name -> text ("wall time" -> "12 min").
    """

    system: str
    tasks: dict[str, TaskResult]
    parameters: int | None = None
    fingerprint: str = ""
    split: str = "test"
    details: dict[str, str] = dataclasses.field(default_factory=dict)

    def mean(self, measure: str, tasks: Sequence[str]) -> float | None:
        """Mean of a measure over tasks; None if one of them is missing."""
        values = [self.value(measure, task) for task in tasks]
        complete = [value for value in values if value is not None]
        return sum(complete) / len(values) if values and len(complete) == len(values) else None

    def value(self, measure: str, task: str) -> float | None:
        """A measure on one task; None if it is missing."""
        result = self.tasks.get(task)
        return None if result is None else result.metrics.get(measure)


def tasks_and_measures(results: Sequence[SystemResult]) -> tuple[list[str], list[str]]:
    """All tasks and measures of a table's rows, in the order of their first occurrence."""
    tasks = dict.fromkeys(task for result in results for task in result.tasks)
    measures = dict.fromkeys(
        name for result in results for task in result.tasks.values() for name in task.metrics
    )
    return list(tasks), list(measures)


def tasks_with(measure: str, tasks: Sequence[str], results: Sequence[SystemResult]) -> list[str]:
    """The tasks that the table's average of a measure is over."""
    return [
        task for task in tasks if any(result.value(measure, task) is not None for result in results)
    ]


def result_path(directory: FilePath, system: str) -> pathlib.Path:
    """The system's file: taser-bm25.json for "TASER + BM25"."""
    name = file_name(system)
    if not name:
        fix = "give it a letter or a digit"
        raise DataError(f"system name {system!r}", where="results", fix=fix)
    return pathlib.Path(directory) / f"{name}.json"


def check_system(directory: FilePath, system: str, split: str) -> pathlib.Path:
    """The system's file, which may not be there yet.

    Raises:
        ConfigError: other systems' rows are of another split.
        DataError: the file belongs to another system, whose name gives the same file name.
    """
    for row in map(_load, sorted(pathlib.Path(directory).glob("*.json"))):
        if row.system != system and row.split != split:
            problem = f"queries of {split!r}, and the row {row.system!r} is of {row.split!r}"
            fix = "evaluate each split into a directory of its own"
            raise ConfigError(problem, where=str(directory), fix=fix)
    path = result_path(directory, system)
    if path.exists() and (other := _load(path).system) != system:
        problem = f"it has the result of system {other!r}, not of {system!r}"
        fix = "rename one of the two systems so that their letters and digits differ"
        raise DataError(problem, where=str(path), fix=fix)
    return path


def write_result(directory: FilePath, result: SystemResult) -> pathlib.Path:
    """Writes or replaces a system's file and returns its path.

    Raises:
        ConfigError: other systems' rows are of another split.
        DataError: the file belongs to another system, whose name gives the same file name.
        StorageError: it cannot be written.
    """
    path = check_system(directory, result.system, result.split)
    write_json(path, {"format_version": FORMAT_VERSION, **dataclasses.asdict(result)})
    return path


def read_results(directory: FilePath, systems: Sequence[str] | None = None) -> list[SystemResult]:
    """All results of a directory, for a table.

    Args:
        directory: the directory of results.
        systems: names in the table's order; names without a file are skipped. None means all
            files, by name.

    Raises:
        DataError: there are no results, or a file is not a result.
    """
    if systems is None:
        results = [_load(path) for path in sorted(pathlib.Path(directory).glob("*.json"))]
    else:
        paths = {system: result_path(directory, system) for system in systems}
        saved = {system: _load(path) for system, path in paths.items() if path.exists()}
        # Another system's name may give the same file name.
        results = [result for system, result in saved.items() if result.system == system]
    if not results:
        fix = "evaluate a system first, or correct the path"
        raise DataError("no evaluation result here", where=str(directory), fix=fix)
    return results


def per_query_path(directory: FilePath, system: str, task: str, split: str) -> pathlib.Path:
    """The file of a system's values by query, below the directory of a table."""
    name = f"{system}.{task}.{split}".replace("/", "-").replace(" ", "_")
    return pathlib.Path(directory) / "per_query" / f"{name}.csv"


def write_per_query(path: FilePath, evaluation: Evaluation) -> None:
    """Writes one line per query: its id and each measure, as shortest exact decimals."""
    columns = [values.tolist() for values in evaluation.values.values()]
    with replacing(path) as scratch, open(scratch, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["query_id", *evaluation.values])
        writer.writerows(zip(evaluation.query_ids, *columns, strict=True))


def read_per_query(path: FilePath) -> Evaluation:
    """Reads what `write_per_query` wrote, for comparisons of systems.

    Raises:
        DataError: another kind of file, or a line that does not match the header.
    """
    again = "run `taser evaluate` again"
    check_file(path, fix=again)
    with open(path, encoding="utf-8", newline="") as file:
        header, *lines = [*csv.reader(file)] or [[]]
    try:
        if header[:1] != ["query_id"]:
            raise ValueError(f"header {header}")
        values = np.array([line[1:] for line in lines], np.float64)
        values = values.reshape(len(lines), len(header) - 1)
    except ValueError as error:
        raise DataError(f"not values by query ({error})", where=str(path), fix=again) from error
    query_ids = tuple(line[0] for line in lines)
    return Evaluation(query_ids, dict(zip(header[1:], values.T.copy(), strict=True)))


def _load(path: pathlib.Path) -> SystemResult:
    again = "evaluate the system again, or move the file away"
    return read_typed(path, SystemResult, fix=again, version=FORMAT_VERSION)
