"""DPR-MUF's tables and figures, from the rows of a pipeline's directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.commands.pipelines.retrieval_stages import BM25, Setting
from taser_jax.evaluation.comparisons import compare_with_baselines
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.results import read_results
from taser_jax.retrieval.fusion import FusionConfig, weights_of
from taser_jax.retrieval.query_arrays import FUSED_LISTS, QueryArrays
from taser_jax.storage.artifacts import file_name, replacing, split_path, write_text
from taser_jax.storage.progress import logger
from taser_jax.systems.muf.domains import (
    Evaluations,
    MixedConfig,
    best_other,
    draw_mixes,
    mix,
    pick,
    worst_of,
    write_row,
)
from taser_jax.systems.muf.specialists import read_reliability
from taser_jax.systems.muf.uncertainty import (
    SpecialistUncertainty,
    uncertainty_csv,
    uncertainty_figures,
)

MUF, OWN, WORST, ORACLE = "MUF", "Single, own domain", "Single, worst", "Oracle indicator"
OTHER, UNSEEN = "Single, best other", "Joint without the domain"
BAYESIAN = "Oracle Bayesian"
WITHOUT_DOMAIN, EQUAL = "MUF without the domain", "Equal weights"
# The paper's inverse temperature of 1e-3, to the letter: every w is about 1.
LITERAL, LITERAL_TEMPERATURE = "MUF, T = 1000", 1000.0
TEST = "test"


def of_size(members: int) -> str:
    """The row of a fusion with the first members."""
    return f"MUF, {members} members"


def with_bm25(row: str) -> str:
    """The row of a fusion with BM25 added."""
    return f"{row} + BM25"


@dataclasses.dataclass(frozen=True)
class MufRows:
    """The rows of a pipeline's directory, for its tables.

    Attributes:
        setting: the pipeline's setting.
        tasks: the tasks that were searched.
        specialists: name -> tasks that it was trained on.
        values: row -> its values by query, for every model and fusion, alone and with BM25, and
            for the Bayesian oracle.
    """

    setting: Setting
    tasks: Sequence[str]
    specialists: Mapping[str, Sequence[str]]
    values: Mapping[str, Evaluations]

    @property
    def directory(self) -> pathlib.Path:
        """The pipeline's folder."""
        return pathlib.Path(self.setting.output_dir)

    @property
    def own(self) -> dict[str, str]:
        """Task -> its specialist; the first of several."""
        return {
            task: next(name for name, tasks in self.specialists.items() if task in tasks)
            for task in self.tasks
            if any(task in tasks for tasks in self.specialists.values())
        }


def write_tables(
    rows: MufRows,
    *,
    models: Sequence[str],
    fusions: Sequence[str],
    unseen: Mapping[str, str],
    sizes: Sequence[int],
    mixed: MixedConfig | None,
) -> dict[str, ResultsTable]:
    """The paper's tables 2 to 4, from the rows' values by query.

    Args:
        rows: all rows.
        models: joint and untrained models among them.
        fusions: fusions among them, those of `sizes` aside.
        unseen: specialist -> the joint model that has not seen its tasks; may be empty.
        sizes: numbers of members, for the table of sizes.
        mixed: the mixes of queries; None leaves their table out.

    Returns:
        Name -> table: "domains", "bm25" and, where asked for, "sizes" and "mixed".
    """
    directory, values = rows.directory, rows.values
    singles = {name: values[name] for name in rows.specialists}
    joined = {name: values[with_bm25(name)] for name in rows.specialists}
    measure = rows.setting.hybrid_measure
    combined = {
        OWN: pick(singles, rows.own),
        OTHER: pick(singles, best_other(singles, rows.own, measure)),
        WORST: pick(singles, worst_of(singles, measure)),
    }
    if unseen:
        of_task = {task: unseen[name] for task, name in rows.own.items()}
        combined[UNSEEN] = pick(values, of_task)
        without = {task: with_bm25(name) for task, name in of_task.items()}
        write_row(directory, with_bm25(UNSEEN), pick(values, without), split=TEST)
    for name, row in {**combined, with_bm25(OWN): pick(joined, rows.own)}.items():
        write_row(directory, name, row, split=TEST)
    shown = [*models, *fusions]
    added = [row for row in (OWN, *shown) if row not in (WITHOUT_DOMAIN, EQUAL, LITERAL)]
    if unseen:
        added.insert(1, UNSEEN)
    tables = {
        "domains": _table(rows, directory, "domains", [*singles, *combined, *shown]),
        "bm25": _table(rows, directory, "bm25", [BM25, *map(with_bm25, added)]),
    }
    if sizes:
        sized = [*map(of_size, sizes), MUF]
        tables["sizes"] = _table(rows, directory, "sizes", sized)
    if mixed is not None:
        # Of tasks that have a specialist: the indicator knows one for each.
        counts = {task: singles[name][task].num_queries for task, name in rows.own.items()}
        draws = draw_mixes(counts, mixed)
        found = {**singles, **{name: values[name] for name in shown}}
        found[ORACLE] = pick(singles, rows.own)
        if BAYESIAN in values:
            found[BAYESIAN] = values[BAYESIAN]
        for name, row in found.items():
            write_row(directory / "mixed", name, mix(row, draws), split=TEST)
        tables["mixed"] = _table(rows, directory / "mixed", "mixed", list(found))
    return tables


def mean_confidence(
    lists: pathlib.Path, tasks: Sequence[str], *, split: str
) -> dict[str, dict[str, float]]:
    """Task -> specialist -> mean w of a fusion's queries."""
    found = {task: QueryArrays.open(split_path(lists, task, split), FUSED_LISTS) for task in tasks}
    return {
        task: dict(zip(one.columns, one.arrays["confidence"].mean(axis=0).tolist(), strict=True))
        for task, one in found.items()
    }


def write_uncertainty(rows: MufRows, lists: pathlib.Path, config: FusionConfig) -> None:
    """Writes how well confidences predict errors, as uncertainty.csv and figures/.

    Args:
        rows: all rows.
        lists: of the fusion, with the specialists' confidences.
        config: how they became weights.
    """
    measure = next((name for name in rows.setting.evaluation.measures if name == "R@1"), None)
    if measure is None:
        logger.info("no figures of confidence: they need the measure R@1")
        return
    fused = {
        task: QueryArrays.open(split_path(lists, task, TEST), FUSED_LISTS) for task in rows.tasks
    }
    found, weights = [], {}
    for place, (name, own) in enumerate(rows.specialists.items()):
        sure, correct = {}, {}
        for task, arrays in fused.items():
            column = arrays.arrays["confidence"][:, place]
            w = dict(zip(arrays.query_ids, column, strict=True))
            judged = rows.values[name][task]
            sure[task] = np.array([w[query_id] for query_id in judged.query_ids])
            correct[task] = judged.values[measure] > 0
        table = read_reliability(rows.directory / "specialists" / file_name(name))
        found.append(SpecialistUncertainty(name, tuple(own), sure, correct, table))
    for task in rows.tasks:
        columns = np.stack([one.confidence[task] for one in found], axis=1)
        weights[task] = weights_of(columns, config).values
    write_text(rows.directory / "uncertainty.csv", uncertainty_csv(found))
    for name, figure in uncertainty_figures(found, weights).items():
        with replacing(rows.directory / "figures" / name) as scratch:
            figure.savefig(scratch, format="png")


def _table(rows: MufRows, directory: pathlib.Path, name: str, shown: Sequence[str]) -> ResultsTable:
    """Rows of a directory as a table of their own, written beside the others."""
    found = read_results(directory / "results", shown)
    table = ResultsTable.of(found, by_task=rows.setting.evaluation.measures[-1])
    if (config := rows.setting.significance) is not None:
        if config.baseline is not None and with_bm25(config.baseline) in shown:
            config = dataclasses.replace(config, baseline=with_bm25(config.baseline))
        compared = compare_with_baselines(directory, found, split=TEST, config=config)
        table = dataclasses.replace(table, comparisons=compared)
    table.write(rows.directory, name=name)
    return table
