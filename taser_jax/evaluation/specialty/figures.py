"""The findings as figures like the paper's Figures 1 to 4 and Table 4."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.evaluation.specialty.report import (
    LARGEST_SHOWN,
    Findings,
    Specialties,
    sensitivity_density,
)
from taser_jax.evaluation.specialty.specialty import entropy_edges

# Ten colours that colour-blind readers can distinguish, and line styles for more than ten lines.
_COLOURS = matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"].by_key()["color"]
_LINES = ("-", "--", ":", "-.")
_PANEL_WIDTH, _PANEL_HEIGHT = 3.4, 2.5


def figures(findings: Findings) -> dict[str, Figure]:
    """Name of each PNG -> the figure; the CSV of that name holds its data."""
    by_name = {
        "sensitivity.png": sensitivity_figure(findings),
        "entropy.png": entropy_figure(findings),
    }
    if findings.commitments:
        by_name["commitment.png"] = commitment_figure(findings)
    return by_name


def sensitivity_figure(findings: Findings) -> Figure:
    """Figures 1a, 2, 4: density of sensitivities, a panel per task, a line per model."""
    figure, axes = _panels(len(findings.tasks))
    for number, checkpoint in enumerate(findings.last):
        by_task = checkpoint.total.sensitivity
        for axis, counts in zip(axes, by_task, strict=True):
            points, density = sensitivity_density(np.asarray(counts))
            axis.plot(points, density, label=_label(checkpoint), **_style(number))
    for axis, task in zip(axes, findings.tasks, strict=True):
        axis.set_title(task, loc="left", fontsize=10)
        axis.set_xlim(0, LARGEST_SHOWN)
        axis.set_ylim(bottom=0)
    figure.supxlabel("sensitivity, in medians of the task", fontsize=9)
    figure.supylabel("density", fontsize=9)
    _legend(figure, axes[0], f"values from {LARGEST_SHOWN:g} medians on are dropped")
    return figure


def entropy_figure(findings: Findings) -> Figure:
    """Figures 1b, 3a: parameters by task entropy, with bins for task-specific and not activated."""
    config = findings.config
    edges = entropy_edges(len(findings.tasks), config)[1:]
    names = [f"task-specific\n< {config.specific_entropy:g}"]
    names += [f"{low:.2f} to\n{high:.2f}" for low, high in itertools.pairwise(edges)]
    names += [f"not activated\nall < {config.activated:g}"]
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(findings.last)
    for number, checkpoint in enumerate(findings.last):
        total = checkpoint.total
        counts = np.append(total.entropy, total.size - total.entropy.sum())
        places = np.arange(len(names)) + (number - (len(findings.last) - 1) / 2) * width
        bars = axis.bar(
            places,
            100 * counts / total.size,
            0.94 * width,
            label=_label(checkpoint),
            color=_COLOURS[number % len(_COLOURS)],
        )
        axis.bar_label(bars, fmt="%.1f", fontsize=7 if len(findings.last) < 4 else 5, padding=1)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_xlabel(f"task entropy in nats, τ = {config.temperature:g}")
    axis.set_ylabel("% of parameters")
    _plain(axis)
    _legend(figure, axis)
    return figure


def commitment_figure(findings: Findings) -> Figure:
    """Table 4: the commitment rate over steps, a line per β (dotted: noise), a panel per model."""
    models = list(dict.fromkeys(row.model for row in findings.commitments))
    averages = list(dict.fromkeys(row.label for row in findings.commitments))
    figure, axes = _panels(len(models))
    for axis, model in zip(axes, models, strict=True):
        for number, average in enumerate(averages):
            rows = [r for r in findings.commitments if (r.model, r.label) == (model, average)]
            steps = [row.step for row in rows]
            rates = [100 * row.commitment.rate for row in rows]
            noise = [100 * row.noise.rate if row.noise else np.nan for row in rows]
            axis.plot(steps, rates, label=average, marker="o", **_style(number))
            axis.plot(steps, noise, **(_style(number) | {"linestyle": ":"}))
        axis.set_xticks(sorted({row.step for row in findings.commitments if row.model == model}))
        axis.set_ylim(0, 102)
        axis.set_title(model, loc="left", fontsize=10)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("committed, %", fontsize=9)
    _legend(figure, axes[0], "of those task-specific at the earlier step; dotted: noise")
    return figure


def _panels(number: int) -> tuple[Figure, Sequence[Axes]]:
    """At most four panels per row."""
    columns = min(number, 4)
    rows = -(-number // columns)
    width, height = max(_PANEL_WIDTH * columns, 5.5), _PANEL_HEIGHT * rows + 0.7
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for unused in axes[number:]:
        unused.set_visible(False)
    for axis in axes[:number]:
        _plain(axis)
    return figure, list(axes[:number])


def _plain(axis: Axes) -> None:
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _legend(figure: Figure, axis: Axes, note: str = "") -> None:
    handles, labels = axis.get_legend_handles_labels()
    # About 0.08 inch per character and 0.7 for the line and the space between entries.
    columns = int(figure.get_figwidth() / (0.7 + 0.08 * max(map(len, labels))))
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=max(1, min(len(labels), columns)),
        frameon=False,
        fontsize=9,
        title=note or None,
        title_fontsize=8,
        alignment="left",
    )


def _label(checkpoint: Specialties) -> str:
    return f"{checkpoint.model} (step {checkpoint.step:,})"


def _style(number: int) -> dict[str, Any]:
    """Colour and line of the number-th of several lines."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)],
        "linewidth": 1.4,
    }
