"""The findings of an analysis: tables and figures like the paper's Figures 1 to 4 and Table 4."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.evaluation import specialty
from taser_jax.evaluation.commitment import Commitment
from taser_jax.evaluation.reports import markdown_table

# Ten colours that colour-blind readers can distinguish.
_COLOURS = matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"].by_key()["color"]
_PANEL_WIDTH, _PANEL_HEIGHT = 3.4, 2.5


@dataclasses.dataclass(frozen=True)
class Specialties:
    """Counts of one checkpoint's parameters.

    Attributes:
        model: the model's name.
        step: the checkpoint's step.
        leaves: path of a parameter -> its counts.
        noise: counts of some parameters if none preferred a task; None if unknown.
    """

    model: str
    step: int
    leaves: Mapping[str, specialty.LeafCounts]
    noise: specialty.LeafCounts | None = None

    @property
    def total(self) -> specialty.LeafCounts:
        """Counts of all parameters."""
        return specialty.add_up(self.leaves.values())

    @property
    def label(self) -> str:
        """Its name in figures."""
        return f"{self.model} (step {self.step:,})"


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything that the tables and figures show.

    Attributes:
        tasks: names, in the order of the counts' task axis.
        temperature: τ of the softmax over tasks.
        specialties: by model, and within it by step.
        commitments: model -> commitment from step to step, of models that T-SAGE trained.
    """

    tasks: Sequence[str]
    temperature: float
    specialties: Sequence[Specialties] = ()
    commitments: Mapping[str, Sequence[Commitment]] = dataclasses.field(default_factory=dict)

    @property
    def last(self) -> list[Specialties]:
        """Each model's last step."""
        return list({each.model: each for each in self.specialties}.values())


def to_json(findings: Findings) -> dict[str, Any]:
    """All counts, as JSON values: of each model and step those of all parameters and of each."""
    return {
        "tasks": list(findings.tasks),
        "temperature": findings.temperature,
        "bins_per_median": specialty.BINS_PER_MEDIAN,
        "entropy_edges": specialty.entropy_edges(len(findings.tasks)).tolist(),
        "specialties": [
            {
                "model": checkpoint.model,
                "step": checkpoint.step,
                "noise": None if checkpoint.noise is None else _as_json(checkpoint.noise),
                "parameters": {
                    name: _as_json(counts)
                    for name, counts in {"all": checkpoint.total, **checkpoint.leaves}.items()
                },
            }
            for checkpoint in findings.specialties
        ],
        "commitments": {
            model: [commitment._asdict() for commitment in of_model]
            for model, of_model in findings.commitments.items()
        },
    }


def _as_json(counts: specialty.LeafCounts) -> dict[str, Any]:
    return {field: np.asarray(count).tolist() for field, count in counts._asdict().items()}


def to_markdown(findings: Findings, *, measured: str) -> str:
    """A page with all tables.

    Args:
        findings: what to show.
        measured: a sentence that says what was measured, and on which batches.
    """
    totals = [(checkpoint, checkpoint.total) for checkpoint in findings.specialties]
    blocks = [
        "# Parameters and tasks",
        measured,
        f"## Specialty (τ = {findings.temperature:g})",
        "In percent of all parameters. Not activated: every sensitivity below "
        f"{specialty.ACTIVATED:g} medians; task-specific: task entropy below "
        f"{specialty.SPECIFIC_ENTROPY:g} nats. Entropy: mean over activated parameters. Noise: "
        "task-specific parameters and entropy if none preferred a task.",
        markdown_table(
            [
                "model",
                "step",
                "parameters",
                *(kind.label for kind in specialty.Specialty),
                "entropy",
                "noise: task-specific",
                "noise: entropy",
            ],
            [
                [checkpoint.model, checkpoint.step, f"{total.size:,}"]
                + [_percent(total.share(kind)) for kind in specialty.Specialty]
                + [f"{total.mean_entropy:.3f}"]
                + ["-" if noise is None else _percent(noise.share(specialty.Specialty.SPECIFIC))]
                + ["-" if noise is None else f"{noise.mean_entropy:.3f}"]
                for checkpoint, total in totals
                for noise in [checkpoint.noise]
            ],
        ),
        "## Tasks",
        "In percent of all parameters: those specific to the task.",
        markdown_table(
            ["model", "step", *findings.tasks],
            [
                [checkpoint.model, checkpoint.step, *map(_percent, total.specific_by_task())]
                for checkpoint, total in totals
            ],
        ),
    ]
    if findings.commitments:
        blocks += [
            "## Task commitment rate",
            "Of the parameters that are task-specific at the earlier step, the share in percent "
            "that is most sensitive to the same task at both steps, by T-SAGE's moving averages. "
            "Noise: the rate under the same moving average if no parameter preferred a task.",
            commitment_table(findings.commitments),
        ]
    return "\n\n".join(blocks) + "\n"


def commitment_table(commitments: Mapping[str, Sequence[Commitment]]) -> str:
    """As the paper's Table 4: one line per pair of steps, with each model's rate and its noise."""
    cells = {
        (model, each.earlier_step, each.step): [
            _percent(each.rate),
            "-" if each.noise is None else _percent(each.noise),
        ]
        for model, of_model in commitments.items()
        for each in of_model
    }
    return markdown_table(
        ["steps", *(head for model in commitments for head in (model, "noise"))],
        [
            [f"{earlier} to {later}"]
            + [c for model in commitments for c in cells.get((model, earlier, later), ["-"] * 2)]
            for earlier, later in dict.fromkeys((earlier, later) for _, earlier, later in cells)
        ],
    )


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.1f}"


def sensitivity_figure(findings: Findings) -> Figure:
    """Figures 1a, 2, 4: density of sensitivities, a panel per task, a line per model."""
    columns = min(len(findings.tasks), 4)
    rows = -(-len(findings.tasks) // columns)
    width, height = max(_PANEL_WIDTH * columns, 5.5), _PANEL_HEIGHT * rows + 0.7
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for unused in axes[len(findings.tasks) :]:
        unused.set_visible(False)
    edges = np.arange(specialty.NUM_BINS) / specialty.BINS_PER_MEDIAN
    for place, (axis, task) in enumerate(zip(axes, findings.tasks, strict=False)):
        for number, checkpoint in enumerate(findings.last):
            total = checkpoint.total
            density = total.sensitivity[place, :-1] * specialty.BINS_PER_MEDIAN / total.size
            axis.stairs(density, edges, label=checkpoint.label, color=_colour(number))
        axis.set_title(task, loc="left", fontsize=10)
        axis.set_xlim(0, specialty.LARGEST_BINNED)
        axis.set_ylim(bottom=0)
        _plain(axis)
    figure.supxlabel("sensitivity, in medians of the task", fontsize=9)
    figure.supylabel("density", fontsize=9)
    _legend(figure, axes[0], f"values from {specialty.LARGEST_BINNED} medians on are dropped")
    return figure


def entropy_figure(findings: Findings) -> Figure:
    """Figures 1b, 3a: parameters by task entropy, with bins for task-specific and not activated."""
    edges = specialty.entropy_edges(len(findings.tasks))[1:]
    names = [f"task-specific\n< {specialty.SPECIFIC_ENTROPY:g}"]
    names += [f"{low:.2f} to\n{high:.2f}" for low, high in itertools.pairwise(edges)]
    names += [f"not activated\nall < {specialty.ACTIVATED:g}"]
    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    axis = figure.subplots()
    width = 0.84 / len(findings.last)
    for number, checkpoint in enumerate(findings.last):
        total = checkpoint.total
        counts = np.append(total.entropy, total.size - total.entropy.sum())
        bars = axis.bar(
            np.arange(len(names)) + (number - (len(findings.last) - 1) / 2) * width,
            100 * counts / total.size,
            0.94 * width,
            label=checkpoint.label,
            color=_colour(number),
        )
        axis.bar_label(bars, fmt="%.1f", fontsize=5, padding=1)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_xlabel(f"task entropy in nats, τ = {findings.temperature:g}")
    axis.set_ylabel("% of parameters")
    _plain(axis)
    _legend(figure, axis)
    return figure


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


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
