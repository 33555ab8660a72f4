"""TASER's claims, from the finished seeds of benchmarks/open_qa/claims.sh.

    python benchmarks/open_qa/claims.py OUTPUT_DIR

reads OUTPUT_DIR/seed-*/{results,per_query}, writes OUTPUT_DIR/claims.md and prints it: the effect
of every claim on R@k, averaged over both sets and on each, with intervals over queries and seeds.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

from taser_jax.commands.pipelines.setting import BM25, row_name
from taser_jax.evaluation.results import SystemResult, read_results

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Row, markdown, read_row

MEASURES = ("R@1", "R@5", "R@20", "R@100")
DPR, SHARED, DET_R = "DPR", "Shared", "TASER Det-R"
LEARNED = ("TASER Seq-R", "TASER Seq-R, token mean", "TASER Tok-R")


def main() -> None:
    """Writes and prints the claims."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    found = read(root)
    tasks = list(dict.fromkeys(t for row in found.values() for one in row.values() for t in one))
    blocks = [parameters(root)]
    for measure in MEASURES:
        for task in ("average", *tasks):
            blocks.append(f"### {measure}, {task}")
            blocks.append(markdown(all_claims(found, None if task == "average" else task), measure))
    text = "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"
    (root / "claims.md").write_text(text, encoding="utf-8")
    print(text)


def read(root: pathlib.Path) -> dict[str, Row]:
    """Row -> seed -> task -> values by query."""
    rows: dict[str, dict[int, Mapping]] = {}
    for directory in sorted(root.glob("seed-*")):
        for result in _results(directory):
            tasks = read_row(directory, result.system)
            rows.setdefault(result.system, {})[int(directory.name.removeprefix("seed-"))] = tasks
    return dict(rows)


def all_claims(found: Mapping[str, Row], task: str | None) -> list[Claim]:
    """The paper's claims, on one task or on all.

    (a) TASER over DPR and over the other encoders, (b) each encoder's mined negatives over BM25's,
    (c) each hybrid over the encoder and over BM25.
    """

    def row(name: str) -> Row:
        seeds = found.get(name, {})
        return {
            seed: tasks if task is None else {task: tasks[task]} for seed, tasks in seeds.items()
        }

    def mined(system: str) -> str:
        return row_name(system, 2)

    named = [
        (f"(a) {DET_R} over {other}", mined(DET_R), mined(other))
        for other in (DPR, SHARED, *LEARNED)
    ]
    named += [
        (f"(b) {system}: mined negatives over BM25's", mined(system), row_name(system, 1))
        for system in (DPR, SHARED, DET_R, *LEARNED)
    ]
    for system in (DPR, DET_R):
        named += [
            (f"(c) {system} + BM25 over {part}", f"{system} + BM25", name)
            for part, name in ((system, mined(system)), (BM25, BM25))
        ]
    return [Claim(text, row(first), row(second)) for text, first, second in named]


def parameters(root: pathlib.Path) -> str:
    """What TASER has of DPR's parameters."""
    counts = {
        result.system: result.parameters
        for directory in sorted(root.glob("seed-*"))
        for result in _results(directory)
    }
    taser, dpr = counts.get(row_name(DET_R, 2)), counts.get(row_name(DPR, 2))
    if not taser or not dpr:
        return "Not finished."
    return f"{DET_R} has {taser:,} parameters, {taser / dpr:.2f} of DPR's {dpr:,}."


def _results(directory: pathlib.Path) -> list[SystemResult]:
    results = directory / "results"
    return read_results(results) if results.is_dir() else []


if __name__ == "__main__":
    main()
