"""A finished run of `taser pipeline muf`, for the scripts beside this one."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

import numpy as np

from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.collections.store import PassageStore
from taser_jax.evaluation.results import per_query_path, read_per_query, read_results
from taser_jax.retrieval.runs import FUSED_LISTS, QueryArrays
from taser_jax.storage.artifacts import file_name, read_json, split_path
from taser_jax.storage.typed_files import typed
from taser_jax.systems.muf.ensemble_files import Ensemble
from taser_jax.systems.muf.fuse import FUSION_FILE
from taser_jax.systems.muf.specialists import Specialist, Weighing
from taser_jax.systems.muf.tables import MUF, TEST


def run_of_arguments(usage: str | None) -> FinishedRun | None:
    """The run whose folder is the script's one argument; None if it has no tables yet.

    Args:
        usage: printed where there is not one argument.
    """
    if len(sys.argv) != 2:
        print(usage, file=sys.stderr)
        sys.exit(2)
    directory = pathlib.Path(sys.argv[1])
    return FinishedRun(directory) if (directory / "domains.csv").exists() else None


class FinishedRun:
    """The specialists, rows and stages of a finished run.

    Args:
        directory: the pipeline's OUTPUT_DIR.

    Attributes:
        stages: the records of its stages.
        weighing: how its specialists are weighed.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory, self.stages = directory, Stages(directory)
        self._fusion = read_json(self.fusion_of(MUF) / FUSION_FILE)
        self.weighing = typed(self._fusion["weighing"], Weighing, where=FUSION_FILE)

    def fusion_of(self, row: str) -> pathlib.Path:
        """The folder of a row's fusion of all specialists."""
        return next((self.directory / "fusions").glob(f"{file_name(row)}-??????"))

    def has_fusion(self, row: str) -> bool:
        """Whether there is one."""
        return any((self.directory / "fusions").glob(f"{file_name(row)}-??????"))

    @property
    def specialists(self) -> list[str]:
        """Names of the specialists."""
        return list(self._fusion["specialists"])

    @property
    def own(self) -> dict[str, tuple[str, ...]]:
        """Specialist -> tasks that it was trained on."""
        root = self.fusion_of(MUF)
        return {
            name: Ensemble.open(root / folder / "ensemble").tasks
            for name, folder in self._fusion["specialists"].items()
        }

    @property
    def tasks(self) -> list[str]:
        """The tasks of MUF's row."""
        [row] = read_results(self.directory / "results", [MUF])
        return list(row.tasks)

    def opened(self, *, members: int | None = None) -> dict[str, Specialist]:
        """The specialists with the results that they have stored, at their temperatures.

        Args:
            members: the first members alone; None means all.
        """
        temperatures: Mapping[str, float] = self._fusion["summary"]["temperatures"]
        root = self.fusion_of(MUF)
        store = PassageStore.open(self._fusion["data_dir"], self._fusion["collection"])
        return {
            name: Specialist(
                name,
                root / folder,
                self.directory / "specialists" / file_name(name),
                store=store,
                weighing=dataclasses.replace(self.weighing, temperatures=(temperatures[name],)),
                evaluation=EvaluationConfig(),
                own_passage_tasks=self._fusion.get("own_passage_tasks", ()),
                first_members=members,
            )
            for name, folder in self._fusion["specialists"].items()
        }

    def confidences(self, row: str, task: str) -> QueryArrays:
        """A fusion's lists of a task's queries, with the specialists' confidences."""
        return QueryArrays.open(split_path(self.fusion_of(row) / "lists", task, TEST), FUSED_LISTS)

    def value(self, row: str, task: str, measure: str) -> float:
        """A row's mean of a measure."""
        values = read_per_query(per_query_path(self.directory, row, task, TEST)).values
        return float(np.mean(values[measure]))
