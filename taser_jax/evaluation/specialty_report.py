"""The findings of an analysis: tables, and figures like the paper's Figures 1 to 4 and Table 4."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import matplotlib.style
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.evaluation.commitment import CommitmentRow
from taser_jax.evaluation.reports import markdown_table
from taser_jax.evaluation.specialty import (
    ACTIVATED,
    BINS_PER_MEDIAN,
    NUM_BINS,
    SPECIFIC_ENTROPY,
    LeafCounts,
    Specialty,
    add_up,
    entropy_edges,
)

LARGEST_SHOWN = 6.0
"""End of the axis of sensitivities, in medians."""
_POINTS = 241
_BANDWIDTH = LARGEST_SHOWN / 40
# Ten colours that colour-blind readers can distinguish.
_COLOURS = matplotlib.style.library["tableau-colorblind10"]["axes.prop_cycle"].by_key()["color"]
_PANEL_WIDTH, _PANEL_HEIGHT = 3.4, 2.5

Row = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Specialties:
    """Counts of one checkpoint's parameters.

    Attributes:
        model: the model's name.
        step: the checkpoint's step.
        leaves: path of a parameter -> its counts.
    """

    model: str
    step: int
    leaves: Mapping[str, LeafCounts]

    @property
    def total(self) -> LeafCounts:
        """Counts of all parameters."""
        return add_up(self.leaves.values())

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
        commitments: by model and step; empty if no two checkpoints were compared.
    """

    tasks: Sequence[str]
    temperature: float
    specialties: Sequence[Specialties] = ()
    commitments: Sequence[CommitmentRow] = ()

    @property
    def last(self) -> list[Specialties]:
        """Each model's last step."""
        return list({each.model: each for each in self.specialties}.values())


def csv_files(findings: Findings) -> dict[str, str]:
    """Name of each CSV file -> its content; a figure of the same name shows it."""
    rows = {
        "sensitivity": _sensitivity_rows(findings),
        "entropy": _entropy_rows(findings),
        "specialty": _specialty_rows(findings),
    }
    if findings.commitments:
        rows["commitment"] = _commitment_rows(findings.commitments)
    return {f"{name}.csv": _csv(list(of_file)) for name, of_file in rows.items()}


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sensitivity_rows(findings: Findings) -> Iterator[Row]:
    for checkpoint in findings.last:
        for task, counts in zip(findings.tasks, checkpoint.total.sensitivity, strict=True):
            for x, y in zip(*sensitivity_density(np.asarray(counts)), strict=True):
                yield _head(checkpoint) | {
                    "task": task,
                    "sensitivity": f"{x:.4f}",
                    "density": f"{y:.6g}",
                }


def sensitivity_density(
    counts: Int[np.ndarray, " bins"],
) -> tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    """Kernel density of one task's sensitivities, on an axis from 0 to `LARGEST_SHOWN` medians.

    density(x) = Σ_b (c_b/n)·[φ((x − m_b)/w) + φ((x + m_b)/w)]/w, with m_b the middle of bin b: what
    a Gaussian kernel puts below 0 is mirrored at 0. It integrates to the share of values that are
    not in the last bin.

    Returns:
        The axis and the density.
    """
    axis = np.linspace(0.0, LARGEST_SHOWN, _POINTS)
    middles = (np.arange(NUM_BINS - 1) + 0.5) / BINS_PER_MEDIAN
    distances = np.stack([axis[:, None] - middles, axis[:, None] + middles]) / _BANDWIDTH
    kernels = np.exp(-0.5 * distances**2).sum(0) / (_BANDWIDTH * np.sqrt(2 * np.pi))
    return axis, kernels @ (counts[:-1] / counts.sum())


def _entropy_rows(findings: Findings) -> Iterator[Row]:
    """Parameters by task entropy; those not activated in a row of their own."""
    edges = [f"{edge:.4f}" for edge in entropy_edges(len(findings.tasks))]
    kinds = [Specialty.NOT_ACTIVATED, Specialty.SPECIFIC] + [Specialty.SHARED] * (len(edges) - 2)
    bins = list(zip(kinds, ["", *edges[:-1]], ["", *edges[1:]], strict=True))
    for checkpoint in findings.specialties:
        total = checkpoint.total
        counts = [total.size - total.entropy.sum(), *total.entropy]
        for (kind, low, high), count in zip(bins, counts, strict=True):
            yield _head(checkpoint) | {
                "specialty": kind.value,
                "low": low,
                "high": high,
                "parameters": int(count),
                "share": f"{count / total.size:.6f}",
            }


def _specialty_rows(findings: Findings) -> Iterator[Row]:
    for checkpoint in findings.specialties:
        for name, counts in {"all": checkpoint.total, **checkpoint.leaves}.items():
            shares = {kind.value: counts.share(kind) for kind in Specialty}
            by_task = zip(findings.tasks, counts.specific_by_task(), strict=True)
            shares |= {f"task-specific/{task}": share for task, share in by_task}
            yield (
                _head(checkpoint)
                | {"parameter": name, "size": counts.size}
                | {column: f"{share:.6f}" for column, share in shares.items()}
            )


def _commitment_rows(rows: Iterable[CommitmentRow]) -> Iterator[Row]:
    for row in rows:
        yield {
            "model": row.model,
            "step": row.step,
            "earlier step": row.earlier_step,
            "task-specific": row.commitment.specific,
            "committed": row.commitment.committed,
            "rate": f"{row.commitment.rate:.6f}",
            "rate of noise": f"{row.noise.rate:.6f}" if row.noise else "",
        }


def _head(checkpoint: Specialties) -> dict[str, object]:
    return {"model": checkpoint.model, "step": checkpoint.step}


def to_markdown(findings: Findings, *, measured: str) -> str:
    """A page with all tables.

    Args:
        findings: what to show.
        measured: a sentence that says what was measured, and on which batches.
    """
    blocks = [
        "# Parameters and tasks",
        measured,
        f"## Specialty (τ = {findings.temperature:g})",
        f"In percent of all parameters. Not activated: every sensitivity below {ACTIVATED:g} "
        f"medians; task-specific: task entropy below {SPECIFIC_ENTROPY:g} nats. Entropy: mean over "
        "activated parameters.",
        _specialty_table(findings),
        "## Tasks",
        "In percent of all parameters: those specific to the task.",
        _task_table(findings),
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


def _specialty_table(findings: Findings) -> str:
    totals = [(checkpoint, checkpoint.total) for checkpoint in findings.specialties]
    rows = [
        [checkpoint.model, checkpoint.step, f"{total.size:,}"]
        + [_percent(total.share(kind)) for kind in Specialty]
        + [f"{total.mean_entropy:.3f}"]
        for checkpoint, total in totals
    ]
    head = ["model", "step", "parameters", *(kind.value for kind in Specialty), "entropy"]
    return markdown_table(head, rows)


def _task_table(findings: Findings) -> str:
    rows = [
        [checkpoint.model, checkpoint.step, *map(_percent, checkpoint.total.specific_by_task())]
        for checkpoint in findings.specialties
    ]
    return markdown_table(["model", "step", *findings.tasks], rows)


def commitment_table(rows: Sequence[CommitmentRow]) -> str:
    """As the paper's Table 4: one line per pair of steps, with each model's rate and its noise."""
    models = list(dict.fromkeys(row.model for row in rows))
    cells = {
        (row.earlier_step, row.step, row.model): [
            _percent(row.commitment.rate),
            _percent(row.noise.rate) if row.noise else "-",
        ]
        for row in rows
    }
    return markdown_table(
        ["steps", *(head for model in models for head in (model, "noise"))],
        [
            [f"{earlier} to {later}"]
            + [cell for model in models for cell in cells.get((earlier, later, model), ["-"] * 2)]
            for earlier, later in dict.fromkeys((row.earlier_step, row.step) for row in rows)
        ],
    )


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.1f}"


def figures(findings: Findings) -> dict[str, Figure]:
    """Name of each PNG -> the figure; the CSV of that name holds its data."""
    by_name = {
        "sensitivity.png": _sensitivity_figure(findings),
        "entropy.png": _entropy_figure(findings),
    }
    if findings.commitments:
        by_name["commitment.png"] = _commitment_figure(findings.commitments)
    return by_name


def _sensitivity_figure(findings: Findings) -> Figure:
    """Figures 1a, 2, 4: density of sensitivities, a panel per task, a line per model."""
    columns = min(len(findings.tasks), 4)
    rows = -(-len(findings.tasks) // columns)
    width, height = max(_PANEL_WIDTH * columns, 5.5), _PANEL_HEIGHT * rows + 0.7
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for unused in axes[len(findings.tasks) :]:
        unused.set_visible(False)
    for place, (axis, task) in enumerate(zip(axes, findings.tasks, strict=False)):
        for number, checkpoint in enumerate(findings.last):
            counts = np.asarray(checkpoint.total.sensitivity[place])
            points, density = sensitivity_density(counts)
            axis.plot(points, density, label=checkpoint.label, color=_colour(number))
        axis.set_title(task, loc="left", fontsize=10)
        axis.set_xlim(0, LARGEST_SHOWN)
        axis.set_ylim(bottom=0)
        _plain(axis)
    figure.supxlabel("sensitivity, in medians of the task", fontsize=9)
    figure.supylabel("density", fontsize=9)
    _legend(figure, axes[0], f"values from {LARGEST_SHOWN:g} medians on are dropped")
    return figure


def _entropy_figure(findings: Findings) -> Figure:
    """Figures 1b, 3a: parameters by task entropy, with bins for task-specific and not activated."""
    edges = entropy_edges(len(findings.tasks))[1:]
    names = [f"task-specific\n< {SPECIFIC_ENTROPY:g}"]
    names += [f"{low:.2f} to\n{high:.2f}" for low, high in itertools.pairwise(edges)]
    names += [f"not activated\nall < {ACTIVATED:g}"]
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
            label=checkpoint.label,
            color=_colour(number),
        )
        axis.bar_label(bars, fmt="%.1f", fontsize=7 if len(findings.last) < 4 else 5, padding=1)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_xlabel(f"task entropy in nats, τ = {findings.temperature:g}")
    axis.set_ylabel("% of parameters")
    _plain(axis)
    _legend(figure, axis)
    return figure


def _commitment_figure(rows: Sequence[CommitmentRow]) -> Figure:
    """Table 4: the commitment rate over steps, a line per model; dotted: noise."""
    figure = Figure(figsize=(5.5, 3.5), dpi=120, layout="constrained")
    axis = figure.subplots()
    for number, model in enumerate(dict.fromkeys(row.model for row in rows)):
        of_model = [row for row in rows if row.model == model]
        steps = [row.step for row in of_model]
        rates = [100 * row.commitment.rate for row in of_model]
        noise = [100 * row.noise.rate if row.noise else np.nan for row in of_model]
        axis.plot(steps, rates, label=model, marker="o", color=_colour(number))
        axis.plot(steps, noise, linestyle=":", color=_colour(number))
    axis.set_xticks(sorted({row.step for row in rows}))
    axis.set_ylim(0, 102)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel("committed, %", fontsize=9)
    _plain(axis)
    _legend(figure, axis, "of those task-specific at the earlier step; dotted: noise")
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
