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
from claims import Claim, find, markdown, over, pair, registered, write_json
from seed_rows import Row, read_row, spread_table

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
        f"### {measure}\n\n{spread_table(rows, measure)}\n\n{markdown(findings[measure])}"
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


def prompts(rows: Mapping[str, Row], root: pathlib.Path) -> list[Claim]:
    """Claim 7, and the other prompts."""
    others = (("marker", "none"), ("sentence", "none"), ("name", "marker"), ("none", "BM25"))
    beside = [over(first, second, rows) for first, second in others]
    return [registered(7, [pair("name", "none", rows)]), *beside]


def tsage(rows: Mapping[str, Row], root: pathlib.Path) -> list[Claim]:
    """Claim 8, and the other optimisers."""
    chosen = f"{T_SAGE}{best(root, T_SAGE, 'nDCG@10')}"
    beside = [over(row, "naive", rows) for row in rows if row not in ("naive", chosen, "BM25")]
    claim = registered(8, [pair(chosen, "naive", rows)])
    return [claim, *beside, over("naive", "BM25", rows)]


def experts(rows: Mapping[str, Row], root: pathlib.Path) -> list[Claim]:
    """Claim 10, and TASER over an encoder of as many parameters."""
    chosen = f"{TASER}{best(root, TASER, 'R@20')}"
    others = ((chosen, "wide"), ("wide", "shared"), (chosen, "BM25"))
    beside = [over(first, second, rows) for first, second in others]
    return [registered(10, [pair(chosen, "shared", rows)]), *beside]


CLAIMS = {"prompts": prompts, "tsage": tsage, "experts": experts}


if __name__ == "__main__":
    main()
