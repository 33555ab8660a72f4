"""Joins the rows of benchmarks/pydocs_tasks/run.sh into a table and claims.

    python benchmarks/pydocs_tasks/table.py PART OUTPUT_DIR/PART
    python benchmarks/pydocs_tasks/table.py --best OUTPUT_DIR/PART PREFIX MEASURE

The first reads what is in OUTPUT_DIR/PART/seed-*/ and writes claims.md and claims.json: the rows'
means over tasks and seeds, and the effects of docs/claims.md on them. The second prints what of
PREFIX1, PREFIX2, ... is best on the validation queries.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import read_results

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import (
    Claim,
    Pair,
    Row,
    find,
    markdown,
    mean_over_tasks,
    read_row,
    registered,
    write_json,
)

COMMAND = "benchmarks/pydocs_tasks/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED"
MEASURES = ("nDCG@10", "R@1", "R@20")
# Part -> the model that counts of each row.
LABELS = {"prompts": "warm-up", "tsage": "episode-2", "experts": "warm-up"}
T_SAGE, TASER, PER_TASK = "t-sage-", "taser-", "per-task-"
# The collections that the experts are trained on, each apart.
COLLECTIONS = ("pydocs", "muf_mini")


def main() -> None:
    """Reads the finished rows and writes what they come to."""
    match sys.argv[1:]:
        case ["--best", root, prefix, measure]:
            print(best(pathlib.Path(root), prefix, measure))
        case [part, root] if part in LABELS:
            print(report(part, pathlib.Path(root)))
        case _:
            print(__doc__, file=sys.stderr)
            sys.exit(2)


def report(part: str, root: pathlib.Path) -> str:
    """Writes claims.md and claims.json; the text of the first."""
    rows = read(part, root)
    claims = CLAIMS[part](rows, root)
    findings = {measure: find(claims, measure, command=COMMAND) for measure in MEASURES}
    write_json(
        [finding for of_measure in findings.values() for finding in of_measure],
        root / "claims.json",
    )
    blocks = [
        f"### {measure}\n\n{means(rows, measure)}\n{markdown(findings[measure])}"
        for measure in MEASURES
    ]
    text = "\n".join(blocks)
    (root / "claims.md").write_text(text, encoding="utf-8")
    return text


def read(part: str, root: pathlib.Path) -> dict[str, Row]:
    """Row -> seed -> task -> values by query.

    Rows of several trainings, one a task or one a collection, are joined: they have all tasks.
    """
    rows: dict[str, dict[int, dict[str, Evaluation]]] = defaultdict(lambda: defaultdict(dict))
    for folder in sorted(root.glob("seed-*/*")):
        seed = int(folder.parent.name.removeprefix("seed-"))
        values = read_row(folder, f"{folder.name} ({LABELS[part]})")
        rows[row_of(folder.name)][seed] |= values
        if part == "tsage" and folder.name == "naive":
            rows["warm-up"][seed] |= read_row(folder, "naive (warm-up)")
        bm25 = read_row(folder, "BM25")
        rows["BM25"][seed] |= {task: bm25[task] for task in values if task in bm25}
    return {name: row for name, row in rows.items() if any(row.values())}


def row_of(folder: str) -> str:
    """The row that a training belongs to.

    Example:
        "taser-3-muf_mini" is of "taser-3", "per-task-code" of "per-task".
    """
    if folder.startswith(PER_TASK):
        return PER_TASK.removesuffix("-")
    return re.sub(f"-({'|'.join(COLLECTIONS)})$", "", folder)


def best(root: pathlib.Path, prefix: str, measure: str) -> str:
    """What follows the prefix in the row that is best on the validation queries."""
    values: dict[str, list[float]] = defaultdict(list)
    directory = root / "validation" / "results"
    for result in read_results(directory) if directory.is_dir() else []:
        if result.system.startswith(prefix):
            option = row_of(result.system).removeprefix(prefix)
            values[option] += [task.metrics[measure] for task in result.tasks.values()]
    return max(values, key=lambda option: statistics.fmean(values[option])) if values else ""


def _over(rows: Mapping[str, Row], first: str, second: str) -> Pair:
    return Pair(f"{first} over {second}", rows.get(first, {}), rows.get(second, {}))


def prompts(rows: Mapping[str, Row], root: pathlib.Path) -> list[Claim]:
    """Claim 7, and the other prompts."""
    others = [_over(rows, kind, "none") for kind in ("marker", "sentence")]
    others += [_over(rows, "name", "marker"), _over(rows, "none", "BM25")]
    beside = [Claim(pair.text, [pair]) for pair in others]
    return [registered(7, [_over(rows, "name", "none")]), *beside]


def tsage(rows: Mapping[str, Row], root: pathlib.Path) -> list[Claim]:
    """Claim 8, and the other optimisers."""
    chosen = f"{T_SAGE}{best(root, T_SAGE, 'nDCG@10')}"
    others = [_over(rows, row, "naive") for row in rows if row not in ("naive", chosen, "BM25")]
    beside = [Claim(pair.text, [pair]) for pair in [*others, _over(rows, "naive", "BM25")]]
    return [registered(8, [_over(rows, chosen, "naive")]), *beside]


def experts(rows: Mapping[str, Row], root: pathlib.Path) -> list[Claim]:
    """Claim 10, and TASER over an encoder of as many parameters."""
    chosen = f"{TASER}{best(root, TASER, 'R@20')}"
    pairs = [
        _over(rows, chosen, "wide"),
        _over(rows, "wide", "shared"),
        _over(rows, chosen, "BM25"),
    ]
    beside = [Claim(pair.text, [pair]) for pair in pairs]
    return [registered(10, [_over(rows, chosen, "shared")]), *beside]


CLAIMS = {"prompts": prompts, "tsage": tsage, "experts": experts}


def means(rows: Mapping[str, Row], measure: str) -> str:
    """One line per row: each task's mean over seeds, their mean, and the seeds."""
    tasks = list(dict.fromkeys(task for row in rows.values() for of in row.values() for task in of))
    lines = [f"| row | {' | '.join(tasks)} | mean | seeds |", f"|---|{'---:|' * (len(tasks) + 2)}"]
    for name, row in rows.items():
        finished = [values for values in row.values() if len(values) == len(tasks)]
        if not finished:
            continue
        cells = [
            statistics.fmean(float(values[task].values[measure].mean()) for values in finished)
            for task in tasks
        ]
        cells.append(statistics.fmean(mean_over_tasks(values, measure) for values in finished))
        text = " | ".join(f"{100 * cell:.1f}" for cell in cells)
        lines.append(f"| {name} | {text} | {len(finished)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
