"""The findings as CSV, and as a Markdown page to read."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from taser_jax.evaluation.specialty.commitment import JudgedAt
from taser_jax.evaluation.specialty.findings import OWN, CommitmentRow, Findings, Specialties
from taser_jax.evaluation.specialty.float_bins import (
    bin_edges,
    kernel_density,
    quantile,
    share_below,
)
from taser_jax.evaluation.specialty.places import by_layer, by_module
from taser_jax.evaluation.specialty.specialty import LeafCounts, Specialty, entropy_edges
from taser_jax.storage.markdown import markdown_table

_POINTS = 241
_KERNEL = 1 / 40
"""The kernel's standard deviation as a share of the axis."""

JUDGED_TEXT = {
    JudgedAt.EARLIER: "at the earlier step",
    JudgedAt.LATER: "at the later step",
    JudgedAt.BOTH: "at both steps",
}

Row = Mapping[str, object]


def csv_files(findings: Findings) -> dict[str, str]:
    """Name of each CSV file -> its content; a figure of the same name shows it."""
    files = {
        "sensitivity": _csv(sensitivity_curves(findings)),
        "sensitivity_log": _csv(_sensitivity_bins(findings)),
        "entropy": _csv(entropy_bins(findings)),
        "temperature": _csv(temperature_rows(findings)),
        "specialty": _csv(_specialty_rows(findings)),
    }
    if any(found.agreements for found in findings.specialties):
        files["agreement"] = _csv(_agreement_rows(findings))
    if findings.commitments:
        files["commitment"] = _csv(_commitment_rows(findings.commitments))
    return {f"{name}.csv": text for name, text in files.items()}


def sensitivity_curves(findings: Findings) -> Iterator[Row]:
    """Kernel densities of each task's sensitivities at each model's last step."""
    at = np.linspace(0.0, findings.largest_shown, _POINTS)
    for found in findings.last:
        for task, counts in zip(findings.tasks, found.total.sensitivity, strict=True):
            density = kernel_density(counts, at, bandwidth=_KERNEL * findings.largest_shown)
            for x, y in zip(at, density, strict=True):
                yield _head(found) | {
                    "task": task,
                    "sensitivity": f"{x:.4f}",
                    "density": f"{y:.6g}",
                }


def _sensitivity_bins(findings: Findings) -> Iterator[Row]:
    edges = bin_edges()
    for found in findings.specialties:
        for task, counts in zip(findings.tasks, found.total.sensitivity, strict=True):
            for place in np.flatnonzero(counts):
                yield _head(found) | {
                    "task": task,
                    "low": repr(float(edges[place])),
                    "high": repr(float(edges[place + 1])),
                    "parameters": int(counts[place]),
                }


def entropy_bins(findings: Findings) -> Iterator[Row]:
    """Parameters by task entropy, at each τ; those not activated in a row of their own."""
    edges = entropy_edges(len(findings.tasks), findings.bounds)
    for found in findings.specialties:
        total = found.total
        for place in findings.temperature_order:
            temperature = findings.temperatures[place]
            head = _head(found) | {"temperature": temperature}
            silent = total.size - int(total.entropy[place].sum())
            yield head | _bin(Specialty.NOT_ACTIVATED, "", "", silent, silent / total.size)
            for low, high, count in zip(edges[:-1], edges[1:], total.entropy[place], strict=True):
                is_low = high <= findings.bounds.specific_entropy
                kind = Specialty.SPECIFIC if is_low else Specialty.SHARED
                yield head | _bin(kind, f"{low:.4f}", f"{high:.4f}", count, count / total.size)


def _bin(kind: Specialty, low: str, high: str, count: int, share: float) -> dict[str, object]:
    return {
        "specialty": kind.value,
        "low": low,
        "high": high,
        "parameters": int(count),
        "share": f"{share:.6f}",
    }


def temperature_rows(findings: Findings) -> Iterator[dict[str, object]]:
    """Shares, mean entropy of activated parameters and mean weights at each temperature."""
    for found in findings.specialties:
        total = found.total
        for place in findings.temperature_order:
            temperature = findings.temperatures[place]
            weights = total.weight_sum[place] / total.size
            yield (
                _head(found)
                | {"temperature": temperature}
                | _shares(total, place)
                | {
                    "mean entropy": f"{mean_entropy(total, place):.6f}",
                    "mean largest weight": f"{total.largest_sum[place] / total.size:.6f}",
                }
                | {
                    f"mean weight/{task}": f"{weight:.6f}"
                    for task, weight in zip(findings.tasks, weights, strict=True)
                }
            )


def mean_entropy(counts: LeafCounts, temperature: int = 0) -> float:
    """Mean task entropy of the activated parameters, in nats; NaN where there are none."""
    number = int(counts.entropy[temperature].sum())
    return float(counts.entropy_sum[temperature] / number) if number else float("nan")


def _specialty_rows(findings: Findings) -> Iterator[Row]:
    for found in findings.specialties:
        groups: dict[str, Mapping[str, LeafCounts]] = {
            "all": {"all parameters": found.total},
            "module": by_module(found.leaves),
            "layer": by_layer(found.leaves),
            "parameter": found.leaves,
        }
        for group, members in groups.items():
            for name, counts in members.items():
                yield (
                    _head(found)
                    | {"of": group, "name": name, "parameters": counts.size}
                    | _shares(counts, 0)
                    | {
                        f"task-specific/{task}": f"{share:.6f}"
                        for task, share in zip(
                            findings.tasks, specific_by_task(counts), strict=True
                        )
                    }
                )


def specific_by_task(counts: LeafCounts) -> np.ndarray:
    """Share of all parameters that are specific to each task, [tasks]."""
    place = list(Specialty).index(Specialty.SPECIFIC)
    return np.asarray(counts.specialty)[0, place, :-1] / counts.size


def _agreement_rows(findings: Findings) -> Iterator[Row]:
    for found in findings.specialties:
        for agreement in found.agreements:
            yield (
                _head(found)
                | {"batches": agreement.batches}
                | {
                    f"queries/{task}": agreement.batches * size
                    for task, size in findings.batch_sizes.items()
                }
                | {
                    "agreement": f"{agreement.activated:.6f}",
                    "agreement of task-specific": f"{agreement.specific:.6f}",
                    "chance": f"{agreement.chance:.6f}",
                }
            )


def _commitment_rows(rows: Iterable[CommitmentRow]) -> Iterator[Row]:
    for row in rows:
        for judged_at in JudgedAt:
            yield {
                "model": row.model,
                "beta": row.beta,
                "step": row.step,
                "earlier step": row.earlier_step,
                "judged at": judged_at.value,
                "task-specific": row.commitment.specific[judged_at],
                "committed": row.commitment.committed[judged_at],
                "rate": f"{row.commitment.rate(judged_at):.6f}",
                "rate of noise": f"{row.noise.rate(judged_at):.6f}" if row.noise else "",
            }


def _head(found: Specialties) -> dict[str, object]:
    return {"model": found.model, "step": found.step}


def _shares(counts: LeafCounts, temperature: int) -> dict[str, object]:
    return {kind.value: f"{counts.share(kind, temperature=temperature):.6f}" for kind in Specialty}


def _csv(rows: Iterable[Row]) -> str:
    found = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def to_markdown(findings: Findings, *, measured: str) -> str:
    """A page with all tables.

    Args:
        findings: what to show.
        measured: a sentence that says what was measured, and on which batches.
    """
    tau = f"τ = {findings.temperatures[0]:g}"
    blocks = [
        "# Parameters and tasks",
        measured,
        f"## Specialty ({tau})",
        f"In percent of all parameters. Not activated: every sensitivity below "
        f"{findings.bounds.activated:g} medians; task-specific: task entropy below "
        f"{findings.bounds.specific_entropy:g} nats. Entropy: mean over activated parameters.",
        _specialty_table(findings),
        f"## Task-specific parameters by task ({tau})",
        "In percent of all parameters.",
        _by_task_table(findings),
        "## Sensitivities, in medians of the task",
        f"Below: share of values under {findings.bounds.activated:g}. Dropped: share of values "
        f"of {findings.largest_shown:g} or more, which sensitivity.png does not show.",
        _quantile_table(findings),
        "## Effect of τ",
        "Of the softmax over the same sensitivities, in percent.",
        _temperature_table(findings),
        f"## By module ({tau})",
        _group_table(findings, "module"),
        f"## By layer ({tau})",
        _group_table(findings, "layer"),
    ]
    if any(found.agreements for found in findings.last):
        blocks += [
            "## Agreement of independent batches",
            "Of a sample of the parameters, the share in percent that is most sensitive to one and "
            "the same task in two means over disjoint batches: of those activated in both, of "
            "those task-specific in the first, and by chance, if the two were independent.",
            _agreement_table(findings),
        ]
    if findings.commitments:
        blocks += [
            "## Task commitment rate",
            f"Of the parameters that are task-specific {JUDGED_TEXT[findings.judged_at]}, the "
            "share in percent that is most sensitive to the same task at both steps. Noise: the "
            "rate under the same moving average if no parameter preferred a task.",
            *_commitment_tables(findings),
        ]
    return "\n\n".join(blocks) + "\n"


def _specialty_table(findings: Findings) -> str:
    rows = [
        [found.model, found.step, f"{found.total.size:,}"]
        + [_percent(found.total.share(kind)) for kind in Specialty]
        + [f"{mean_entropy(found.total):.3f}"]
        for found in findings.specialties
    ]
    head = ["model", "step", "parameters", *(kind.value for kind in Specialty), "entropy"]
    return markdown_table(head, rows)


def _by_task_table(findings: Findings) -> str:
    rows = [
        [found.model, found.step, *map(_percent, specific_by_task(found.total))]
        for found in findings.specialties
    ]
    return markdown_table(["model", "step", *findings.tasks], rows)


def _quantile_table(findings: Findings) -> str:
    rows = []
    for found in findings.last:
        for task, counts in zip(findings.tasks, found.total.sensitivity, strict=True):
            below = share_below(counts, findings.bounds.activated)
            rows.append(
                [found.model, task, _percent(below)]
                + [f"{quantile(counts, share):.3g}" for share in (0.25, 0.75, 0.95, 0.99)]
                + [_percent(1 - share_below(counts, findings.largest_shown))]
            )
    head = ["model", "task", "below", "25%", "75%", "95%", "99%", "dropped"]
    return markdown_table(head, rows)


def _temperature_table(findings: Findings) -> str:
    rows = []
    for found in findings.last:
        for place in findings.temperature_order:
            temperature = findings.temperatures[place]
            total = found.total
            largest = total.largest_sum[place] / total.size
            rows.append(
                [found.model, f"{temperature:g}"]
                + [_percent(total.share(kind, temperature=place)) for kind in Specialty]
                + [f"{mean_entropy(total, place):.3f}", f"{largest:.3f}"]
            )
    head = ["model", "τ", *(kind.value for kind in Specialty), "entropy", "mean largest weight"]
    return markdown_table(head, rows)


def _group_table(findings: Findings, group: str) -> str:
    groups = {
        found.model: by_module(found.leaves) if group == "module" else by_layer(found.leaves)
        for found in findings.last
    }
    rows = [
        [model, name, f"{counts.size:,}", *(_percent(counts.share(kind)) for kind in Specialty)]
        for model, members in groups.items()
        for name, counts in members.items()
    ]
    return markdown_table(["model", group, "parameters", *(kind.value for kind in Specialty)], rows)


def _agreement_table(findings: Findings) -> str:
    sizes = findings.batch_sizes.values()
    rows = [
        [found.model, found.step, agreement.batches]
        + [f"{agreement.batches * min(sizes)} to {agreement.batches * max(sizes)}"]
        + [_percent(rate) for rate in (agreement.activated, agreement.specific, agreement.chance)]
        for found in findings.last
        for agreement in found.agreements
    ]
    head = ["model", "step", "batches", "queries per task", "activated", "task-specific", "chance"]
    return markdown_table(head, rows)


def _commitment_tables(findings: Findings) -> Iterator[str]:
    """As the paper's Table 4: a row per step, a column per β, one table per model.

    Of several models with T-SAGE, one more compares the averages that each of them used.
    """
    for model in dict.fromkeys(row.model for row in findings.commitments):
        rows = [row for row in findings.commitments if row.model == model]
        yield f"### {model}"
        yield commitment_table([(row.label, row) for row in rows], findings.judged_at)
    own = [(row.model, row) for row in findings.commitments if row.beta == OWN]
    if len({model for model, _ in own}) > 1:
        yield "### T-SAGE's own averages, by model"
        yield commitment_table(own, findings.judged_at)


def commitment_table(rows: Sequence[tuple[str, CommitmentRow]], judged_at: JudgedAt) -> str:
    """One line per pair of steps, with the rate of each (column, row) and that of noise."""
    names = list(dict.fromkeys(name for name, _ in rows))
    cells = {
        (row.earlier_step, row.step, name): [
            _percent(found.rate(judged_at)) if found else "-"
            for found in (row.commitment, row.noise)
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
