"""Joins the rows of benchmarks/kilt_mini/run.sh into tables and a figure.

    python benchmarks/kilt_mini/table.py OUTPUT_DIR

reads OUTPUT_DIR/seed-*/*/results/*.json and writes {pages,passages}.md, .csv and .png beside them:
page and passage R-precision by task and on average, as in the paper's Tables 2 and 3. Rows of
several seeds have their mean and standard deviation.
"""

from __future__ import annotations

import csv
import io
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from taser_jax.evaluation.results import SystemResult, read_results

# Folder -> row, in the order of the table; per-task models are one row of several folders.
ROWS = {
    "bm25": "BM25",
    "warm-up": "Warm-up (BM25 negatives)",
    "per-task": "Per-task models",
    "qspec": "Task-specific query encoders",
    "naive": "Naive multi-task",
    "marker": "Naive, with marker",
    "prompts": "Naive, with prompts",
    "pcgrad": "PCGrad",
    "cgd": "CGD",
    "gradnorm": "GradNorm",
    "t-sage": "T-SAGE, without prompts",
    "t-sage-prompts": "T-SAGE, with prompts",
    "taco-dr": "TACO-DR (prompts; equal weights, then T-SAGE)",
}
# A row that has fewer has not finished.
EPISODES = {"bm25": 0, "warm-up": 0, "taco-dr": 2}
MEASURES = {"pages": "PageRprec", "passages": "Rprec"}
Values = Mapping[str, float]


def main() -> None:
    """Reads the finished rows and writes what they come to."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    for name, measure in MEASURES.items():
        by_seed = {
            title: {
                int(seed.name.removeprefix("seed-")): found
                for seed in sorted(root.glob("seed-*"))
                if (found := read(seed, row, measure))
            }
            for row, title in ROWS.items()
        }
        rows = {title: list(seeds.values()) for title, seeds in by_seed.items() if seeds}
        tasks = list(next(iter(rows.values()))[0])
        (root / f"{name}.md").write_text(markdown(rows, tasks), encoding="utf-8")
        (root / f"{name}.csv").write_text(comma_separated(by_seed, tasks), encoding="utf-8")
        plot(rows, tasks, measure).savefig(root / f"{name}.png", dpi=150, bbox_inches="tight")
        print(f"{measure}\n\n{(root / f'{name}.md').read_text(encoding='utf-8')}")


def read(seed: pathlib.Path, row: str, measure: str) -> Values:
    """Task -> value of one row and seed; empty where it has not finished."""
    if row == "per-task":
        found = [result_of(folder, 1) for folder in sorted(seed.glob("per-task-*"))]
        values = {
            task: one.tasks[task].metrics[measure] for one in found if one for task in one.tasks
        }
        return values if len(values) == len(read(seed, "bm25", measure)) else {}
    folder = seed / ("warm-up" if row == "bm25" else row)
    result = (
        _results(folder).get("BM25") if row == "bm25" else result_of(folder, EPISODES.get(row, 1))
    )
    return {} if result is None else {t: one.metrics[measure] for t, one in result.tasks.items()}


def result_of(folder: pathlib.Path, episode: int) -> SystemResult | None:
    """The result after an episode; 0 is the warm-up."""
    label = f"episode-{episode}" if episode else "warm-up"
    found = [one for name, one in _results(folder).items() if f"({label})" in name]
    return found[0] if found else None


def _results(folder: pathlib.Path) -> Mapping[str, SystemResult]:
    """System -> result of a run; empty before its first evaluation."""
    directory = folder / "results"
    return {one.system: one for one in read_results(directory)} if directory.is_dir() else {}


def average(values: Values) -> float:
    """Mean over tasks."""
    return statistics.fmean(values.values())


def spread(values: Sequence[float]) -> str:
    """The mean in per cent, with the standard deviation of several seeds."""
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def markdown(rows: Mapping[str, Sequence[Values]], tasks: Sequence[str]) -> str:
    """One line a row: tasks, average, seeds."""
    lines = [
        f"| System | {' | '.join(tasks)} | average | seeds |",
        f"|---|{'---:|' * (len(tasks) + 2)}",
    ]
    for title, seeds in rows.items():
        cells = [spread([values[task] for values in seeds]) for task in tasks]
        cells += [spread([average(values) for values in seeds]), str(len(seeds))]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def comma_separated(rows: Mapping[str, Mapping[int, Values]], tasks: Sequence[str]) -> str:
    """One line a row and seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["system", "seed", *tasks, "average"])
    for title, seeds in rows.items():
        for seed, values in seeds.items():
            figures = [values[task] for task in tasks] + [average(values)]
            writer.writerow([title, seed, *(f"{figure:.6f}" for figure in figures)])
    return text.getvalue()


def plot(rows: Mapping[str, Sequence[Values]], tasks: Sequence[str], measure: str) -> plt.Figure:
    """Averages over tasks as bars, each task as a dot; the spread of seeds as a line."""
    figure, axes = plt.subplots(figsize=(7, 0.45 * len(rows) + 1.2))
    titles = list(rows)[::-1]
    for height, title in enumerate(titles):
        averages = [100 * average(values) for values in rows[title]]
        error = statistics.stdev(averages) if len(averages) > 1 else 0.0
        bar = axes.barh(height, statistics.fmean(averages), xerr=error or None, color="#9ecae1")
        bar.set_label("mean over tasks (line: standard deviation of seeds)" if not height else "")
        for task, colour in zip(tasks, plt.get_cmap("tab10").colors, strict=False):
            value = 100 * statistics.fmean(values[task] for values in rows[title])
            axes.plot(value, height, "o", color=colour, ms=4, label=task if not height else "")
    axes.set_yticks(range(len(titles)), titles)
    axes.set_xlabel(f"{measure} (%)")
    axes.set_xlim(0, 100)
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.18))
    return figure


if __name__ == "__main__":
    main()
