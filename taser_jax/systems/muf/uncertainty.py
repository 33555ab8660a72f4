"""How well specialists' confidences predict errors and domains: curves, AUROC, weights."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.systems.muf.abstention import auroc, risk_coverage
from taser_jax.systems.muf.calibration import BINS, Reliability

_PANEL = 3.2


@dataclasses.dataclass(frozen=True)
class SpecialistUncertainty:
    """One specialist's confidence in its results for every task's queries.

    Attributes:
        name: the specialist's name.
        own: tasks that it was trained on.
        confidence: task -> w of each query.
        correct: task -> whether the first passage of its list is right.
        reliability: reliability on its validation queries; None without calibration.
    """

    name: str
    own: tuple[str, ...]
    confidence: Mapping[str, Float[np.ndarray, " queries"]]
    correct: Mapping[str, Bool[np.ndarray, " queries"]]
    reliability: Reliability | None = None

    def error_auroc(self, task: str) -> float | None:
        """AUROC of w for right first passages of a task; None where all are right or all wrong."""
        correct = self.correct[task]
        if correct.all() or not correct.any():
            return None
        return auroc(self.confidence[task], correct)

    def domain_auroc(self) -> float | None:
        """AUROC of w for own queries against others; None where all tasks are its own, or none."""
        own = np.concatenate([np.full(len(w), task in self.own) for task, w in self._tasks()])
        if own.all() or not own.any():
            return None
        return auroc(np.concatenate([w for _, w in self._tasks()]), own)

    def _tasks(self) -> Sequence[tuple[str, np.ndarray]]:
        return list(self.confidence.items())


def uncertainty_csv(specialists: Sequence[SpecialistUncertainty]) -> str:
    """A line per specialist and task: mean w, accuracy, AUROCs; empty where one is undefined."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("specialist", "task", "own", "queries", "mean_w", "accuracy")
    writer.writerow([*columns, "auroc_of_errors", "auroc_of_own_queries"])
    for one in specialists:
        domain = _shown(one.domain_auroc())
        for task, w in one.confidence.items():
            mean, accuracy = float(np.mean(w)), float(np.mean(one.correct[task]))
            line = [one.name, task, task in one.own, len(w), f"{mean:.4f}", f"{accuracy:.4f}"]
            writer.writerow([*line, _shown(one.error_auroc(task)), domain])
    return text.getvalue()


def effective_specialists(
    weights: Float[np.ndarray, "queries specialists"],
) -> Float[np.ndarray, " queries"]:
    """exp(entropy) of each query's weights: 1 where one specialist has all, their number at most.

    Example:
        >>> effective_specialists(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])).tolist()
        [2.0, 1.0]
    """
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return np.exp(-np.sum(weights * logs, axis=1))


def uncertainty_figures(
    specialists: Sequence[SpecialistUncertainty],
    weights: Mapping[str, Float[np.ndarray, "queries specialists"]],
) -> dict[str, Figure]:
    """Name of each PNG -> the figure.

    Args:
        specialists: each specialist's confidences.
        weights: task -> the fused queries' weights, which add up to 1.
    """
    found = {
        "confidence": _grid(specialists, _confidence_panel, "w", "cumulative share of queries"),
        "abstention": _grid(specialists, _abstention_panel, "coverage", "errors"),
        "weights": _weights_figure(weights),
    }
    calibrated = [one for one in specialists if one.reliability is not None]
    if calibrated:
        found["reliability"] = _grid(calibrated, _reliability_panel, "w", "accuracy")
    return {f"{name}.png": figure for name, figure in found.items()}


def _grid(
    specialists: Sequence[SpecialistUncertainty],
    draw: Callable[[Axes, SpecialistUncertainty], None],
    x: str,
    y: str,
) -> Figure:
    """A panel per specialist, side by side."""
    figure = Figure(figsize=(_PANEL * len(specialists), _PANEL), dpi=120, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(specialists), sharey=True))
    for axis, one in zip(axes, specialists, strict=True):
        draw(axis, one)
        axis.set_title(one.name, loc="left", fontsize=10)
        axis.set_xlabel(x)
        axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel(y)
    return figure


def _confidence_panel(axis: Axes, one: SpecialistUncertainty) -> None:
    for task, w in one.confidence.items():
        width = 2.0 if task in one.own else 1.0
        share = np.arange(1, len(w) + 1) / len(w)
        label = f"{task} (own)" if task in one.own else task
        axis.step(np.sort(w), share, where="post", linewidth=width, label=label)
    axis.set_xlim(0, 1)


def _abstention_panel(axis: Axes, one: SpecialistUncertainty) -> None:
    for task, w in one.confidence.items():
        if task in one.own:
            risk = risk_coverage(w, one.correct[task])
            axis.plot(np.arange(1, len(risk) + 1) / len(risk), risk, label=task)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)


def _reliability_panel(axis: Axes, one: SpecialistUncertainty) -> None:
    table = one.reliability
    assert table is not None
    centres = (np.arange(BINS) + 0.5) / BINS
    filled = table.count > 0
    axis.bar(centres[filled], table.accuracy[filled], 0.9 / BINS, label=f"ECE {table.error:.3f}")
    axis.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)


def _weights_figure(weights: Mapping[str, Float[np.ndarray, "queries specialists"]]) -> Figure:
    """Histogram of exp(entropy): how many specialists share a query."""
    figure = Figure(figsize=(5, _PANEL), dpi=120, layout="constrained")
    axis = figure.subplots()
    most = max(array.shape[1] for array in weights.values())
    edges = np.linspace(1, most, 41)
    for task, array in weights.items():
        counts, _ = np.histogram(np.clip(effective_specialists(array), 1, most), edges)
        axis.stairs(counts / len(array), edges, label=task)
    axis.set_xlabel("exp(entropy) of the weights: specialists that share a query")
    axis.set_ylabel("share of queries")
    axis.legend(fontsize=7, frameon=False)
    return figure


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
