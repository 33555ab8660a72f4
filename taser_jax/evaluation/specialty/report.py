"""The findings of an analysis, as CSV and as a Markdown page to read."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from taser_jax.evaluation.reports import markdown_table
from taser_jax.evaluation.specialty.commitment import OWN, CommitmentRow
from taser_jax.evaluation.specialty.specialty import (
    BINS_PER_MEDIAN,
    NUM_BINS,
    LeafCounts,
    Specialty,
    SpecialtyConfig,
    add_up,
    entropy_edges,
)
from taser_jax.optim.median import MedianOver
from taser_jax.storage.errors import check_fields


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """What is measured.

    Attributes:
        num_batches: batches of each task at each checkpoint.
        specialty: what makes a parameter task-specific.
        median_over: entries over which medians are taken.
        betas: β of the moving averages for commitment; empty measures none.
    """

    num_batches: int = 16
    specialty: SpecialtyConfig = SpecialtyConfig()
    median_over: MedianOver = MedianOver.ALL
    betas: tuple[float, ...] = (0.0, 0.6, 0.9, 0.99, 0.999)

    def __post_init__(self) -> None:
        check_fields(self, "num_batches", is_valid=lambda n: n >= 1, expected="1 or more")
        check_fields(
            self,
            "betas",
            is_valid=lambda values: all(0 <= beta < 1 for beta in values),
            expected="0 <= beta < 1",
        )


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


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything that the tables and figures show.

    Attributes:
        tasks: names, in the order of the counts' task axis.
        config: what makes a parameter task-specific.
        specialties: by model, and within it by step.
        commitments: by model and step; empty if no two checkpoints were compared.
    """

    tasks: Sequence[str]
    config: SpecialtyConfig
    specialties: Sequence[Specialties] = ()
    commitments: Sequence[CommitmentRow] = ()

    @property
    def last(self) -> list[Specialties]:
        """Each model's last step."""
        return list({each.model: each for each in self.specialties}.values())


LARGEST_SHOWN = 6.0
"""End of the axis of sensitivities, in medians."""
_POINTS = 241
_BANDWIDTH = LARGEST_SHOWN / 40

Row = Mapping[str, object]


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
    edges = [f"{edge:.4f}" for edge in entropy_edges(len(findings.tasks), findings.config)]
    kinds = [Specialty.NOT_ACTIVATED, Specialty.SPECIFIC] + [Specialty.SHARED] * (len(edges) - 2)
    bins = zip(kinds, ["", *edges[:-1]], ["", *edges[1:]], strict=True)
    places = list(bins)
    for checkpoint in findings.specialties:
        total = checkpoint.total
        counts = [total.size - total.entropy.sum(), *total.entropy]
        for (kind, low, high), count in zip(places, counts, strict=True):
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
            "beta": row.beta,
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
    config = findings.config
    blocks = [
        "# Parameters and tasks",
        measured,
        f"## Specialty (τ = {config.temperature:g})",
        f"In percent of all parameters. Not activated: every sensitivity below "
        f"{config.activated:g} medians; task-specific: task entropy below "
        f"{config.specific_entropy:g} nats. Entropy: mean over activated parameters.",
        _specialty_table(findings),
        "## Tasks",
        "In percent of all parameters: those specific to the task, those whose sensitivity to it "
        f"is below {config.activated:g} medians of the task, and those of {LARGEST_SHOWN:g} or "
        "more, which sensitivity.png does not show.",
        _task_table(findings),
    ]
    if findings.commitments:
        blocks += [
            "## Task commitment rate",
            "Of the parameters that are task-specific at the earlier step, the share in percent "
            "that is most sensitive to the same task at both steps. Noise: the rate under the same "
            "moving average if no parameter preferred a task.",
            *_commitment_tables(findings.commitments),
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
    rows = []
    for checkpoint in findings.specialties:
        total: LeafCounts = checkpoint.total
        shares = np.stack(
            [
                total.specific_by_task(),
                total.sensitivity_below(findings.config.activated),
                1 - total.sensitivity_below(LARGEST_SHOWN),
            ]
        )
        for task, of_task in zip(findings.tasks, shares.T, strict=True):
            rows.append([checkpoint.model, checkpoint.step, task, *map(_percent, of_task)])
    head = ["model", "step", "task", "task-specific", "low", "not shown"]
    return markdown_table(head, rows)


def _commitment_tables(rows: Sequence[CommitmentRow]) -> Iterator[str]:
    """As the paper's Table 4: a row per step, a column per β, one table per model.

    Of several models with T-SAGE, one more compares the averages that each of them used.
    """
    for model in dict.fromkeys(row.model for row in rows):
        yield f"### {model}"
        yield commitment_table([(row.label, row) for row in rows if row.model == model])
    own = [(row.model, row) for row in rows if row.beta == OWN]
    if len({model for model, _ in own}) > 1:
        yield "### T-SAGE's own averages, by model"
        yield commitment_table(own)


def commitment_table(rows: Sequence[tuple[str, CommitmentRow]]) -> str:
    """One line per pair of steps, with the rate of each (column, row) and that of noise."""
    names = list(dict.fromkeys(name for name, _ in rows))
    cells = {
        (row.earlier_step, row.step, name): [
            _percent(row.commitment.rate),
            _percent(row.noise.rate) if row.noise else "-",
        ]
        for name, row in rows
    }
    return markdown_table(
        ["steps", *(head for name in names for head in (name, "noise"))],
        [
            [f"{earlier} to {later}"]
            + [cell for name in names for cell in cells.get((earlier, later, name), ["-"] * 2)]
            for earlier, later in dict.fromkeys((row.earlier_step, row.step) for _, row in rows)
        ],
    )


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:.1f}"
