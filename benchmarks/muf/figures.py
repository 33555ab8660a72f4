"""DPR-MUF's figures 2, 3 and 5, and what its confidences are worth, from a finished run.

    python benchmarks/muf/figures.py PIPELINE_DIR

writes PIPELINE_DIR/figures/: sizes.png (after costs.py), members' softmaxes, weights of example
queries; distributions of w, risk by coverage, reliability, and how many specialists share a query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from finished_run import FinishedRun, run_of_arguments
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from taser_jax.evaluation.results import per_query_path, read_per_query
from taser_jax.retrieval.fusion import weights_of
from taser_jax.storage.artifacts import file_name, read_json
from taser_jax.systems.muf.confidence import BINS, member_logits
from taser_jax.systems.muf.specialists import Specialist
from taser_jax.systems.muf.tables import BAYESIAN, MUF, TEST, of_size

PANEL = 3.2
# Drawn as examples.
EXAMPLES, STRIPS, STRIP_MEMBERS, STRIP_PASSAGES = 8, 4, 5, 20

OfTasks = Mapping[str, Float[np.ndarray, " queries"]]
"""Task -> a value of each query."""


def main() -> None:
    """Draws the figures of a run that has its tables."""
    run = run_of_arguments(__doc__)
    if run is None:
        return
    (run.directory / "figures").mkdir(exist_ok=True)
    for name, figure in figures(run).items():
        figure.savefig(run.directory / "figures" / f"{name}.png")


def figures(run: FinishedRun) -> dict[str, Figure]:
    """Name -> figure."""
    tasks, own_tasks = run.tasks, run.own
    own = {task: name for name, of_name in own_tasks.items() for task in of_name}
    w: dict[str, dict[str, np.ndarray]] = {name: {} for name in run.specialists}
    for task in tasks:
        columns = run.confidences(MUF, task).arrays["confidence"].T
        for name, column in zip(run.specialists, columns, strict=True):
            w[name][task] = column
    drawn = {
        "confidence": grid({name: (w[name], own_tasks[name]) for name in w}, confidence_panel),
        "abstention": abstention_figure(run, w, own_tasks),
        "weights": sharing_figure(
            {
                task: weights_of(
                    np.stack([w[name][task] for name in w], axis=1), run.weighing.fusion
                )
                for task in tasks
            }
        ),
        "examples": examples_figure(run, list(own)),
    }
    opened = run.opened()
    for task, name in own.items():
        drawn[f"members-{file_name(name)}"] = strips_figure(run, opened[name], task)
    tables = {name: reliability_of(run, name) for name in run.specialists}
    if all(tables.values()):
        drawn["reliability"] = grid(tables, reliability_panel)
    costs = run.directory / "costs.json"
    if costs.exists():
        latency = {
            int(size): milliseconds for size, milliseconds in json.loads(costs.read_text()).items()
        }
        if len(latency) > 1:
            drawn["sizes"] = sizes_figure(run, latency, tasks)
    return drawn


def grid(panels: Mapping, draw) -> Figure:
    """A panel per specialist, side by side."""
    figure = Figure(figsize=(PANEL * len(panels), PANEL), dpi=120, layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axis, (name, content) in zip(axes, panels.items(), strict=True):
        draw(axis, content)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_xlim(0, 1)
        axis.legend(fontsize=7, frameon=False)
    return figure


def confidence_panel(axis: Axes, content: tuple[OfTasks, Sequence[str]]) -> None:
    """Cumulative share of queries by w, own tasks in bold."""
    w, own = content
    for task, of_task in w.items():
        share = np.arange(1, len(of_task) + 1) / len(of_task)
        label, width = (f"{task} (own)", 2.0) if task in own else (task, 1.0)
        axis.step(np.sort(of_task), share, where="post", linewidth=width, label=label)
    axis.set_xlabel("w")
    axis.set_ylabel("cumulative share of queries")


def abstention_figure(
    run: FinishedRun, w: Mapping[str, OfTasks], own: Mapping[str, Sequence[str]]
) -> Figure:
    """Share of errors among the queries of highest w, by their share of all."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    for name, tasks in own.items():
        curves[name] = {}
        for task in tasks:
            fused = run.confidences(MUF, task)
            w_of = dict(zip(fused.query_ids, w[name][task], strict=True))
            judged = read_per_query(per_query_path(run.directory, name, task, TEST))
            sure = np.array([w_of[query_id] for query_id in judged.query_ids])
            curves[name][task] = risk_coverage(sure, judged.values["R@1"] > 0)
    return grid(curves, abstention_panel)


def abstention_panel(axis: Axes, curves: OfTasks) -> None:
    """Errors by coverage."""
    for task, risk in curves.items():
        axis.plot(np.arange(1, len(risk) + 1) / len(risk), risk, label=task)
    axis.set_ylim(0, 1)
    axis.set_xlabel("coverage")
    axis.set_ylabel("errors")


def risk_coverage(
    confidence: Float[np.ndarray, " queries"], correct: Bool[np.ndarray, " queries"]
) -> Float[np.ndarray, " queries"]:
    """Share of errors among the n queries of highest confidence, for every n; stable for equals.

    Example:
        >>> risk_coverage(np.array([0.2, 0.9, 0.5]), np.array([False, True, False])).tolist()
        [0.0, 0.5, 0.6666666666666666]

    Source: Geifman and El-Yaniv, NeurIPS 2017, "Selective classification for deep neural networks".
    """
    wrong = ~correct[np.argsort(-confidence, kind="stable")]
    return np.cumsum(wrong) / np.arange(1, len(wrong) + 1)


def reliability_of(run: FinishedRun, name: str) -> dict[str, list[float]]:
    """A specialist's bins of confidence at its chosen temperature; empty where none was chosen."""
    path = run.directory / "specialists" / file_name(name) / "temperature.json"
    return read_json(path) if path.exists() else {}


def reliability_panel(axis: Axes, table: Mapping[str, list[float]]) -> None:
    """Accuracy by confidence on validation queries."""
    count, accuracy = np.array(table["count"]), np.array(table["accuracy"])
    centres = (np.arange(BINS) + 0.5) / BINS
    axis.bar(
        centres[count > 0], accuracy[count > 0], 0.9 / BINS, label=f"ECE {min(table['errors']):.3f}"
    )
    axis.plot([0, 1], [0, 1], color="#999999", linewidth=0.8)
    axis.set_ylim(0, 1)
    axis.set_xlabel("w")
    axis.set_ylabel("accuracy")


def sharing_figure(weights: Mapping[str, Float[np.ndarray, "queries specialists"]]) -> Figure:
    """Histogram of exp(entropy): how many specialists share a query."""
    figure = Figure(figsize=(5, PANEL), dpi=120, layout="constrained")
    axis = figure.subplots()
    most = max(of_task.shape[1] for of_task in weights.values())
    edges = np.linspace(1, most, 41)
    for task, of_task in weights.items():
        counts, _ = np.histogram(np.clip(effective_specialists(of_task), 1, most), edges)
        axis.stairs(counts / len(of_task), edges, label=task)
    axis.set_xlabel("exp(entropy) of the weights: specialists that share a query")
    axis.set_ylabel("share of queries")
    axis.legend(fontsize=7, frameon=False)
    return figure


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


def examples_figure(run: FinishedRun, tasks: Sequence[str]) -> Figure:
    """Weights of some queries as stacked bars, of MUF and of the oracle (DPR-MUF, figure 5)."""
    rows = [row for row in (MUF, BAYESIAN) if run.has_fusion(row)]
    size = (2.2 * len(tasks), 2.2 * len(rows))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(len(rows), len(tasks), squeeze=False, sharey=True)
    for of_row, row in zip(axes, rows, strict=True):
        for axis, task in zip(of_row, tasks, strict=True):
            weights = run.confidences(row, task).arrays["confidence"][:EXAMPLES]
            if row == MUF:
                weights = weights_of(weights, run.weighing.fusion)
            below = np.zeros(len(weights))
            for name, column in zip(run.specialists, weights.T, strict=True):
                axis.bar(np.arange(len(weights)), column, bottom=below, label=name)
                below = below + column
            axis.set_title(f"{row}, {task}", loc="left", fontsize=8)
            axis.set_xticks([])
    axes[0, -1].legend(fontsize=6, frameon=False)
    return figure


def strips_figure(run: FinishedRun, specialist: Specialist, task: str) -> Figure:
    """Members' softmaxes over the first passages of some queries (DPR-MUF, figure 3)."""
    w = specialist.confidence(task, TEST)
    order = np.argsort(w, kind="stable")
    places = np.linspace(0, len(order) - 1, min(STRIPS, len(order))).round().astype(int)
    lines = order[places]
    softmaxes = member_probabilities(specialist, task, lines, k=run.weighing.k)
    query_ids = specialist.lists(task, TEST).query_ids
    size = (PANEL * len(lines), PANEL)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(softmaxes.shape[1], len(lines), squeeze=False, sharex=True, sharey=True)
    for column, line, members in zip(axes.T, lines, softmaxes, strict=True):
        column[0].set_title(f"{query_ids[line]}: w {w[line]:.2f}", loc="left", fontsize=8)
        for axis, probabilities in zip(column, members[:, :STRIP_PASSAGES], strict=True):
            axis.bar(np.arange(1, len(probabilities) + 1), probabilities)
            axis.set_ylim(0, 1)
        column[-1].set_xlabel("passage of the list")
    return figure


def member_probabilities(
    specialist: Specialist, task: str, lines: np.ndarray, *, k: int
) -> Float[np.ndarray, "lines members k"]:
    """Softmaxes of a specialist's first members over some queries' lists, at its temperature."""
    assert specialist.ensemble is not None
    rows = specialist.lists(task, TEST).rows[lines, :k]
    passages = np.stack([specialist.passages.take(np.maximum(row, 0)) for row in rows])
    vectors = specialist.vectors(task, TEST)[lines]
    embedded = specialist.ensemble.embed(vectors)[:STRIP_MEMBERS]
    logits = member_logits(embedded, jnp.asarray(passages)) / specialist.temperature
    return np.asarray(jax.nn.softmax(jnp.where(rows[:, None] >= 0, logits, -jnp.inf)))


def sizes_figure(
    run: FinishedRun, latency: Mapping[int, Mapping[str, float]], tasks: Sequence[str]
) -> Figure:
    """Quality by the number of members, over bars of latency (DPR-MUF, figure 2)."""
    figure = Figure(figsize=(5.5, PANEL), dpi=120, layout="constrained")
    lines = figure.subplots()
    bars = lines.twinx()
    sizes = sorted(latency)
    relative = [
        (latency[size]["search"] + latency[size]["confidence"] + latency[size]["fusion"])
        / latency[size]["single"]
        for size in sizes
    ]
    bars.bar(range(len(sizes)), relative, 0.5, color="#dddddd")
    bars.set_ylabel("latency over a single specialist's")
    lines.set_zorder(bars.get_zorder() + 1)
    lines.patch.set_visible(False)
    rows = [MUF if size == max(sizes) else of_size(size) for size in sizes]
    measure = next(
        reversed(read_per_query(per_query_path(run.directory, MUF, tasks[0], TEST)).values)
    )
    for task in tasks:
        heights = [100 * run.value(row, task, measure) for row in rows]
        lines.plot(range(len(sizes)), heights, marker="o", label=task)
    lines.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    lines.set_xlabel("members")
    lines.set_ylabel(f"{measure} (%)")
    lines.legend(fontsize=7, frameon=False)
    return figure


if __name__ == "__main__":
    main()
