"""Results tables: for the terminal, as Markdown and CSV, and a plot of differences."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from taser_jax.evaluation.results import SystemResult, tasks_and_measures, tasks_with
from taser_jax.evaluation.significance import AVERAGE, Comparisons
from taser_jax.storage.artifacts import FilePath, replacing, write_text
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import aligned, plain

LEGEND = (
    "In percent. R@k: queries with a relevant passage (by answers: one that contains an answer) "
    "among the first k."
)
_NONE = "-"
# Of Okabe and Ito's palette, which colour-blind readers can distinguish.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


@dataclasses.dataclass
class ResultsTable:
    """Systems by tasks by measures: all of the results, as they first occur.

    Attributes:
        results: the rows, in order; missing values leave empty cells.
        by_task: the measure shown per task if there is no room for all; empty is the last.
        comparisons: comparisons with each baseline, shown after the figures.

    Raises:
        DataError: no row, task or measure, or `by_task` is not one of the measures.
    """

    results: Sequence[SystemResult]
    by_task: str = ""
    comparisons: Sequence[Comparisons] = ()

    def __post_init__(self) -> None:
        self.tasks, self.measures = tasks_and_measures(self.results)
        if not self.tasks or not self.measures:
            counts = f"{len(self.tasks)} tasks, {len(self.measures)} measures"
            problem, fix = f"{len(self.results)} systems, {counts}", "give at least one of each"
            raise DataError(problem, where="results table", fix=fix)
        self.by_task = self.by_task or self.measures[-1]
        if self.by_task not in self.measures:
            fix = "take one of " + ", ".join(self.measures)
            raise DataError(f"by_task = {self.by_task!r}", where="results table", fix=fix)

    def mean(self, result: SystemResult, measure: str) -> float | None:
        """A row's mean over the tasks for which any row has the measure; None if it lacks one."""
        return result.mean(measure, tasks_with(measure, self.tasks, self.results))

    def to_text(self) -> str:
        """Aligned text: averages of all measures, then one measure per task."""
        lines = [self._average_title(), "", *_aligned(*self._averages())]
        if len(self.tasks) > 1:
            lines += ["", f"{self.by_task} by task", ""]
            lines += _aligned(
                ["system", *self.tasks, AVERAGE],
                [
                    [result.system]
                    + [_percent(result.value(self.by_task, task)) for task in self.tasks]
                    + [_percent(self.mean(result, self.by_task))]
                    for result in self.results
                ],
            )
        for title, compared in self._compared(AVERAGE):
            lines += ["", f"{title}:", "", *_aligned(["system", *self.measures], compared)]
        return "\n".join([*lines, "", LEGEND])

    def to_markdown(self) -> str:
        """Markdown: a table of averages and one per task, with the best of each column in bold."""
        blocks = [
            f"### {self._average_title()}",
            self._markdown(*self._averages()),
            *self._compared_block(AVERAGE),
        ]
        for task in self.tasks if len(self.tasks) > 1 else ():
            blocks += [
                f"### {plain(task)}{self._queries_of(task)}",
                self._markdown(
                    ["system", *self.measures],
                    [
                        [r.system, *(_percent(r.value(name, task)) for name in self.measures)]
                        for r in self.results
                    ],
                ),
                *self._compared_block(task),
            ]
        return "\n\n".join([*blocks, LEGEND]) + "\n"

    def to_csv(self) -> str:
        """CSV: a line per system and task, and one for the average; fractions, not percent."""
        details = self._detail_names()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["system", "parameters", "task", "queries", *self.measures, *details])
        for result in self.results:
            first = [result.system, "" if result.parameters is None else result.parameters]
            last = [result.details.get(name, "") for name in details]
            for task in self.tasks:
                queries = result.tasks[task].num_queries if task in result.tasks else ""
                values = [_fraction(result.value(measure, task)) for measure in self.measures]
                writer.writerow([*first, task, queries, *values, *last])
            values = [_fraction(self.mean(result, measure)) for measure in self.measures]
            writer.writerow([*first, AVERAGE, "", *values, *last])
        return text.getvalue()

    def plot(self) -> Figure:
        """Differences from each baseline with their 95% intervals, one panel per measure."""
        systems = [result.system for result in self.results]
        size = (3.0 + 2.2 * len(self.measures), 1.4 + 0.35 * len(systems))
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        axes = figure.subplots(1, len(self.measures), sharey=True, squeeze=False)[0]
        for axis, measure in zip(axes, self.measures, strict=True):
            for number, each in enumerate(self.comparisons):
                rows = [each.queries.get((system, AVERAGE, measure)) for system in systems]
                drawn = [(place, row) for place, row in enumerate(rows) if row is not None]
                effects = np.array([row.difference for _, row in drawn])
                below = effects - [row.low for _, row in drawn]
                above = [row.high for _, row in drawn] - effects
                axis.errorbar(
                    100 * effects,
                    [place + 0.2 * number for place, _ in drawn],
                    # Where all queries differ alike, rounding leaves the effect outside.
                    xerr=100 * np.stack([below, above]).clip(min=0),
                    label=f"from {each.baseline}",
                    color=_COLOURS[number % len(_COLOURS)],
                    fmt="o",
                    capsize=3,
                )
            axis.axvline(0, color="#8c8c8c", linewidth=1)
            axis.set_title(measure, fontsize=11)
            axis.set_xlabel("points")
            axis.grid(axis="x", color="#dddddd")
        axes[0].set_yticks(range(len(systems)), systems)
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center")
        return figure

    def write(self, directory: FilePath, *, name: str = "results") -> pathlib.Path:
        """Writes name.md, name.csv and, of rows that are compared, name.png; returns the first.

        Raises:
            StorageError: a file cannot be written.
        """
        base = pathlib.Path(directory)
        write_text(base / f"{name}.csv", self.to_csv())
        write_text(base / f"{name}.md", self.to_markdown())
        if any(each.queries for each in self.comparisons):
            save_figure(base / f"{name}.png", self.plot())
        return base / f"{name}.md"

    def _averages(self) -> tuple[list[str], list[list[str]]]:
        """Header and lines of the averages over tasks."""
        details = self._detail_names()
        lines = [
            [result.system, _count(result.parameters)]
            + [_percent(self.mean(result, measure)) for measure in self.measures]
            + [result.details.get(name, _NONE) for name in details]
            for result in self.results
        ]
        return ["system", "parameters", *self.measures, *details], lines

    def _markdown(self, header: list[str], lines: list[list[str]]) -> str:
        """A Markdown table with the best of each measure in bold."""
        for column in map(header.index, self.measures):
            figures = [float(line[column]) for line in lines if line[column] != _NONE]
            for line in lines:
                # By the rounded figure: two systems shown as 71.3 are both the best.
                if len(lines) > 1 and line[column] != _NONE and float(line[column]) == max(figures):
                    line[column] = f"**{line[column]}**"
        return markdown_table(header, lines)

    def _compared(self, task: str) -> list[tuple[str, list[list[str]]]]:
        """Title and lines of each comparison that has rows of a task."""
        compared = []
        for each in self.comparisons:
            lines = []
            for system in (result.system for result in self.results):
                cells = [each.queries.get((system, task, name), _NONE) for name in self.measures]
                if {*cells} != {_NONE}:
                    lines.append([system, *map(str, cells)])
            if lines:
                title = f"Difference from {each.baseline}, 95% interval and p over queries"
                compared.append((title, lines))
        return compared

    def _compared_block(self, task: str) -> list[str]:
        """Markdown of the rows that are compared on a task; nothing where none is."""
        header = ["system", *self.measures]
        blocks = [
            (f"{title}:", markdown_table(header, lines)) for title, lines in self._compared(task)
        ]
        return [text for block in blocks for text in block]

    def _average_title(self) -> str:
        if len(self.tasks) == 1:
            return f"{self.tasks[0]}{self._queries_of(self.tasks[0])}"
        return f"Average over {len(self.tasks)} tasks"

    def _queries_of(self, task: str) -> str:
        counts = {r.tasks[task].num_queries for r in self.results if task in r.tasks}
        return f" ({counts.pop():,} queries)" if len(counts) == 1 else ""

    def _detail_names(self) -> list[str]:
        return list(dict.fromkeys(name for result in self.results for name in result.details))


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    r"""A Markdown table: names to the left in the first column, figures to the right in others.

    Example:
        >>> markdown_table(["task", "R@1"], [["a|b", 71.3]]).splitlines()
        ['| task | R@1 |', '| --- | ---: |', '| a\\|b | 71.3 |']
    """
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(plain, line)) + " |" for line in lines)


def save_figure(path: FilePath, figure: Figure) -> None:
    """Writes a figure as PNG, atomically.

    Raises:
        StorageError: the file cannot be written.
    """
    # A name with $ is no formula.
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with replacing(path) as scratch:
        figure.savefig(scratch, format="png")


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _fraction(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _count(value: int | None) -> str:
    return _NONE if value is None else f"{value:,}"


def _aligned(header: list[str], lines: list[list[str]]) -> list[str]:
    """A table with a line below its header."""
    head, *rows = aligned([header, *lines], left=1)
    return [head, "-" * len(head), *rows]
