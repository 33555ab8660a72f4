"""Figures of a fusion: its size against quality and latency, members' softmaxes, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

_PANEL = 3.2


@dataclasses.dataclass(frozen=True)
class Strips:
    """Some members' softmaxes over one query's first passages.

    Attributes:
        query_id: the query.
        confidence: the whole ensemble's w.
        probabilities: each member's softmax over the list, cut after the first passages.
    """

    query_id: str
    confidence: float
    probabilities: Float[np.ndarray, "members passages"]


def sizes_figure(
    values: Mapping[str, Mapping[int, float]], relative: Mapping[int, float], measure: str
) -> Figure:
    """Quality by the number of members, over bars of latency (DPR-MUF, figure 2).

    Args:
        values: task -> members -> the measure.
        relative: members -> latency over a single specialist's search.
        measure: its name.
    """
    figure = Figure(figsize=(5.5, _PANEL), dpi=120, layout="constrained")
    lines = figure.subplots()
    bars = lines.twinx()
    sizes = sorted(relative)
    places = {size: place for place, size in enumerate(sizes)}
    bars.bar(range(len(sizes)), [relative[size] for size in sizes], 0.5, color="#dddddd")
    bars.set_ylabel("latency over a single specialist's")
    lines.set_zorder(bars.get_zorder() + 1)
    lines.patch.set_visible(False)
    for task, of_task in values.items():
        known = sorted(of_task)
        heights = [100 * of_task[size] for size in known]
        lines.plot([places[size] for size in known], heights, marker="o", label=task)
    lines.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    lines.set_xlabel("members")
    lines.set_ylabel(f"{measure} (%)")
    lines.legend(fontsize=7, frameon=False)
    return figure


def strips_figure(queries: Sequence[Strips]) -> Figure:
    """A panel per query, a strip of bars per member (DPR-MUF, figure 3)."""
    members = len(queries[0].probabilities)
    figure = Figure(figsize=(_PANEL * len(queries), _PANEL), dpi=120, layout="constrained")
    axes = figure.subplots(members, len(queries), squeeze=False, sharex=True, sharey=True)
    for column, query in zip(axes.T, queries, strict=True):
        column[0].set_title(f"{query.query_id}: w {query.confidence:.2f}", loc="left", fontsize=8)
        for axis, line in zip(column, query.probabilities, strict=True):
            axis.bar(np.arange(1, len(line) + 1), line)
            axis.set_ylim(0, 1)
        column[-1].set_xlabel("passage of the list")
    return figure


def weights_figure(
    weights: Mapping[tuple[str, str], Float[np.ndarray, "queries specialists"]],
    names: Sequence[str],
) -> Figure:
    """Each example query's weights as a stacked bar (DPR-MUF, figure 5).

    Args:
        weights: (row, task) -> weights of some queries; a panel each, rows below each other.
        names: the specialists' names.
    """
    rows = list(dict.fromkeys(row for row, _ in weights))
    tasks = list(dict.fromkeys(task for _, task in weights))
    figure = Figure(figsize=(2.2 * len(tasks), 2.2 * len(rows)), dpi=120, layout="constrained")
    axes = figure.subplots(len(rows), len(tasks), squeeze=False, sharey=True)
    for (row, task), values in weights.items():
        axis = axes[rows.index(row), tasks.index(task)]
        below = np.zeros(len(values))
        for name, column in zip(names, values.T, strict=True):
            axis.bar(np.arange(len(values)), column, bottom=below, label=name)
            below = below + column
        axis.set_title(f"{row}, {task}", loc="left", fontsize=8)
        axis.set_xticks([])
    axes[0, -1].legend(fontsize=6, frameon=False)
    return figure
