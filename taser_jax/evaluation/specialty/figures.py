"""The findings as figures like the paper's Figures 1 to 3 and Table 4."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.evaluation.specialty.findings import Findings, Specialties
from taser_jax.evaluation.specialty.float_bins import bin_edges
from taser_jax.evaluation.specialty.places import by_layer, by_module
from taser_jax.evaluation.specialty.specialty import (
    SPECIFIC_BINS,
    LeafCounts,
    Specialty,
    entropy_edges,
)
from taser_jax.evaluation.specialty.tables import JUDGED_TEXT, mean_entropy, sensitivity_curves

# Ten colours that colour-blind readers can distinguish, and line styles for more than ten lines.
_COLOURS = matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"].by_key()["color"]
_LINES = ("-", "--", ":", "-.")
_PANEL_WIDTH, _PANEL_HEIGHT = 3.4, 2.5
_BINS_A_POINT = 4


def figures(findings: Findings) -> dict[str, Figure]:
    """Name of each PNG -> the figure; the CSV of that name holds its data."""
    found = {
        "sensitivity": sensitivity_figure(findings),
        "sensitivity_log": sensitivity_log_figure(findings),
        "entropy": entropy_figure(findings),
        "temperature": temperature_figure(findings),
        "specialty": specialty_figure(findings),
    }
    if findings.commitments:
        found["commitment"] = commitment_figure(findings)
    return {f"{name}.png": figure for name, figure in found.items()}


def sensitivity_figure(findings: Findings) -> Figure:
    """Figure 2: kernel density of sensitivities, one panel per task, one line per model."""
    figure, axes = _panels(len(findings.tasks))
    rows = list(sensitivity_curves(findings))
    for axis, task in zip(axes, findings.tasks, strict=True):
        for number, found in enumerate(findings.last):
            curve = [r for r in rows if r["model"] == found.model and r["task"] == task]
            x = [float(str(row["sensitivity"])) for row in curve]
            y = [float(str(row["density"])) for row in curve]
            axis.plot(x, y, label=_label(found), **_style(number))
        axis.set_title(task, loc="left", fontsize=10)
        axis.set_xlim(0, findings.largest_shown)
        axis.set_ylim(bottom=0)
    _name_axes(figure, x="sensitivity, in medians of the task", y="density")
    _legend(figure, axes, f"values from {findings.largest_shown:g} medians on are dropped")
    return figure


def sensitivity_log_figure(findings: Findings) -> Figure:
    """Figure 2 on a logarithmic axis, which drops zeros alone."""
    figure, axes = _panels(len(findings.tasks))
    edges = bin_edges()[1:-1]
    octaves = np.diff(np.log2(edges))
    # Neighbouring bins are joined: a sixteenth of an octave is more detail than a line shows.
    centres = np.sqrt(edges[:-1] * edges[1:]).reshape(-1, _BINS_A_POINT).mean(1)
    bound = findings.bounds.activated
    for place, (axis, task) in enumerate(zip(axes, findings.tasks, strict=True)):
        for number, found in enumerate(findings.last):
            total = found.total
            share = total.sensitivity[place][1:-1] / total.size
            joined = share.reshape(-1, _BINS_A_POINT).sum(1)
            width = octaves.reshape(-1, _BINS_A_POINT).sum(1)
            zeros = 100 * total.zeros[place] / total.size
            label = f"{_label(found)}, {zeros:.0f}% zeros" if zeros >= 0.5 else _label(found)
            axis.plot(centres, joined / width, label=label, **_style(number))
        axis.axvline(bound, color="#999999", linewidth=0.8)
        axis.set_xscale("log", base=10)
        axis.set_xlim(1e-4, 1e4)
        # Room for the legend.
        axis.set_ylim(0, axis.get_ylim()[1] * (1.1 + 0.12 * len(findings.last)))
        axis.set_title(task, loc="left", fontsize=10)
        axis.legend(fontsize=7, frameon=False, loc="upper left")
    _name_axes(figure, x="sensitivity, in medians of the task", y="share an octave")
    figure.suptitle(f"grey line: {bound:g} medians", fontsize=9, x=0.99, ha="right")
    return figure


def entropy_figure(findings: Findings) -> Figure:
    """Figure 3a: parameters by task entropy, with bins for task-specific and not activated."""
    edges = entropy_edges(len(findings.tasks), findings.bounds)[SPECIFIC_BINS:]
    names = [f"task-specific\n< {findings.bounds.specific_entropy:g}"]
    names += [f"{low:.2f} to\n{high:.2f}" for low, high in itertools.pairwise(edges)]
    names += [f"not activated\nall < {findings.bounds.activated:g}"]
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(findings.last)
    for number, found in enumerate(findings.last):
        total = found.total
        low, shared = np.split(total.entropy[0], [SPECIFIC_BINS])
        heights = np.array([low.sum(), *shared, total.size - total.entropy[0].sum()]) / total.size
        at = np.arange(len(names)) + (number - (len(findings.last) - 1) / 2) * width
        bars = axis.bar(
            at,
            100 * heights,
            0.94 * width,
            label=_label(found),
            color=_COLOURS[number % len(_COLOURS)],
        )
        axis.bar_label(bars, fmt="%.1f", fontsize=7 if len(findings.last) < 4 else 5, padding=1)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_xlabel(f"task entropy in nats, τ = {findings.temperatures[0]:g}")
    axis.set_ylabel("% of parameters")
    _plain(axis)
    _legend(figure, [axis])
    return figure


def temperature_figure(findings: Findings) -> Figure:
    """Figure 3b: the same sensitivities at several τ."""
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    shares, entropy, weight = figure.subplots(1, 3)
    order = findings.temperature_order
    taus = np.asarray(findings.temperatures)[order]
    for number, found in enumerate(findings.last):
        total, style = found.total, _style(number)
        specific = [100 * total.share(Specialty.SPECIFIC, temperature=place) for place in order]
        shares.plot(taus, specific, label=_label(found), marker="o", **style)
        entropy.plot(taus, [mean_entropy(total, place) for place in order], marker="o", **style)
        weight.plot(taus, total.largest_sum[order] / total.size, marker="o", **style)
    shares.set_ylabel("task-specific, % of parameters")
    entropy.set_ylabel("mean task entropy of activated, nats")
    weight.set_ylabel("mean largest weight")
    entropy.axhline(math.log(len(findings.tasks)), color="#999999", linewidth=0.8)
    weight.axhline(1 / len(findings.tasks), color="#999999", linewidth=0.8)
    for axis in (shares, entropy, weight):
        axis.set_xscale("log", base=2)
        axis.set_xticks(taus, [f"{tau:g}" for tau in taus])
        axis.set_xlabel("τ")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
        _plain(axis)
    _legend(figure, [shares], "grey lines: all tasks weigh the same")
    return figure


def specialty_figure(findings: Findings) -> Figure:
    """Shares of the three kinds by module and by layer, one bar per model."""
    modules = {found.model: by_module(found.leaves) for found in findings.last}
    layers = {found.model: by_layer(found.leaves) for found in findings.last}
    rows = [
        len({name for groups in found.values() for name in groups}) for found in (modules, layers)
    ]
    height = 1.2 + 0.2 * sum(count * len(findings.last) + 1 for count in rows)
    figure = Figure(figsize=(10, max(height, 3.5)), dpi=110, layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=rows)
    for axis, title, found in zip(axes, ("by module", "by layer"), (modules, layers), strict=True):
        _stacked_bars(axis, found)
        axis.set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel(f"% of parameters, τ = {findings.temperatures[0]:g}")
    _legend(figure, axes)
    return figure


def _stacked_bars(axis: Axes, groups: dict[str, dict[str, LeafCounts]]) -> None:
    names = list(dict.fromkeys(name for members in groups.values() for name in members))
    lines = [
        (name, model, members[name])
        for name in names
        for model, members in groups.items()
        if name in members
    ]
    labels = [f"{name} ({model})" if len(groups) > 1 else name for name, model, _ in lines]
    left = np.zeros(len(lines))
    colours = {
        Specialty.SPECIFIC: _COLOURS[1],
        Specialty.SHARED: _COLOURS[0],
        Specialty.NOT_ACTIVATED: _COLOURS[3],
    }
    for kind, colour in colours.items():
        widths = np.array([100 * counts.share(kind) for _, _, counts in lines])
        axis.barh(range(len(lines)), widths, 0.8, left=left, color=colour, label=kind.value)
        left += widths
    axis.set_yticks(range(len(lines)), labels, fontsize=7)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_xlim(0, 100)
    axis.spines[["top", "right"]].set_visible(False)


def commitment_figure(findings: Findings) -> Figure:
    """Table 4: the commitment rate over steps, a line per β (dotted: noise), a panel per model."""
    models = list(dict.fromkeys(row.model for row in findings.commitments))
    figure, axes = _panels(len(models))
    averages = list(dict.fromkeys(row.label for row in findings.commitments))
    for axis, model in zip(axes, models, strict=True):
        for number, average in enumerate(averages):
            rows = [r for r in findings.commitments if (r.model, r.label) == (model, average)]
            if not rows:
                continue
            rates = [100 * row.commitment.rate(findings.judged_at) for row in rows]
            steps = [row.step for row in rows]
            axis.plot(steps, rates, label=average, marker="o", **_style(number))
            noise = [
                100 * row.noise.rate(findings.judged_at) if row.noise else float("nan")
                for row in rows
            ]
            axis.plot(steps, noise, **(_style(number) | {"linestyle": ":"}))
        axis.set_xticks(sorted({row.step for row in findings.commitments if row.model == model}))
        axis.set_ylim(0, 102)
        axis.set_title(model, loc="left", fontsize=10)
    _name_axes(figure, x="step", y="committed, %")
    _legend(
        figure, axes, f"of those task-specific {JUDGED_TEXT[findings.judged_at]}; dotted: noise"
    )
    return figure


def _panels(number: int) -> tuple[Figure, list[Axes]]:
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


def _name_axes(figure: Figure, *, x: str, y: str) -> None:
    figure.supxlabel(x, fontsize=9)
    figure.supylabel(y, fontsize=9)


def _legend(figure: Figure, axes: Sequence[Axes], note: str = "") -> None:
    by_label: dict[str, Artist] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        by_label |= dict(zip(labels, handles, strict=True))
    longest = max(map(len, by_label))
    # About 0.08 inch per character and 0.7 for the line and the space between entries.
    columns = max(1, min(len(by_label), int(figure.get_figwidth() / (0.7 + 0.08 * longest))))
    figure.legend(
        by_label.values(),
        by_label.keys(),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        title=note or None,
        title_fontsize=8,
        alignment="left",
    )


def _label(found: Specialties) -> str:
    return f"{found.model} (step {found.step:,})"


def _style(number: int) -> dict[str, Any]:
    """Colour and line of the number-th of several lines."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)],
        "linewidth": 1.4,
    }
