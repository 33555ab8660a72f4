"""Joins the rows of benchmarks/kilt_mini/run.sh into tables and claims.

    python benchmarks/kilt_mini/table.py OUTPUT_DIR
    python benchmarks/kilt_mini/table.py --best-temperature OUTPUT_DIR

The first reads what is in OUTPUT_DIR/seed-*/ and writes {pages,passages}.md: page and passage
R-precision by task and on average, as in the paper's Tables 2 and 3, and below them the claims,
also in claims.json. Rows of several seeds have their mean and standard deviation. The second prints
the temperature of T-SAGE that is best on the validation queries; nothing where none was run.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import read_results

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Finding, Pair, find, markdown, registered, write_json
from seed_rows import Row, read_row, seed_folders, spread_table

TASKS = ("squad", "nq_qed", "selqa", "fm2", "climate_fever", "fewrel", "cmu_dog")
T_SAGE = "t-sage-"
# Row -> folder, system's label in it, title; in the order of the table.
ROWS = {
    "bm25": ("naive", None, "BM25"),
    "warm-up": ("naive", "warm-up", "Warm-up (BM25 negatives)"),
    "episode-1": ("naive", "episode-1", "Naive, first episode"),
    "naive": ("naive", "episode-2", "Naive multi-task"),
    "no-prompts": ("no-prompts", "episode-2", "Naive, without prompts"),
    "marker": ("marker", "episode-2", "Naive, with markers"),
    "per-task": ("per-task", "episode-2", "Per-task models"),
    "qspec": ("qspec", "episode-2", "Task-specific query encoders"),
    "pcgrad": ("pcgrad", "episode-2", "PCGrad"),
    "cgd": ("cgd", "episode-2", "CGD"),
    "gradnorm": ("gradnorm", "episode-2", "GradNorm"),
    **{
        f"{T_SAGE}{tau}": (f"{T_SAGE}{tau}", "episode-2", f"TACO-DR: T-SAGE, temperature {tau}")
        for tau in ("2.0", "0.5", "0.25")
    },
}
COMMAND = "benchmarks/kilt_mini/run.sh SOURCE_DIR OUTPUT_DIR PRETRAINED"
MEASURES = {"pages": "PageRprec", "passages": "Rprec"}


def main() -> None:
    """Reads the finished rows and writes what they come to."""
    if len(sys.argv) == 3 and sys.argv[1] == "--best-temperature":
        print(best_temperature(pathlib.Path(sys.argv[2])))
        return
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    by_row = {row: read(root, row) for row in ROWS}
    claims = all_claims(by_row, best_temperature(root))
    finished = {ROWS[row][2]: seeds for row, seeds in by_row.items() if seeds}
    all_findings: list[Finding] = []
    for name, measure in MEASURES.items():
        findings = find(claims, measure, command=COMMAND)
        all_findings += findings
        text = f"{spread_table(finished, measure)}\n\n{markdown(findings)}"
        (root / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"{measure}\n\n{text}")
    write_json(all_findings, root / "claims.json")


def read(root: pathlib.Path, row: str) -> Row:
    """Seed -> task -> values by query, of the seeds whose row is finished."""
    by_seed = {seed: read_seed(folder, row) for seed, folder in seed_folders(root).items()}
    return {seed: tasks for seed, tasks in by_seed.items() if len(tasks) == len(TASKS)}


def read_seed(seed: pathlib.Path, row: str) -> Mapping[str, Evaluation]:
    """Task -> values by query; not all tasks where the row has not finished."""
    folder, label, _ = ROWS[row]
    names = [f"{folder}-{task}" for task in TASKS] if row == "per-task" else [folder]
    evaluations: dict[str, Evaluation] = {}
    for name in names:
        evaluations |= read_row(seed / name, f"{name} ({label})" if label else "BM25")
    return {task: evaluations[task] for task in TASKS if task in evaluations}


def best_temperature(root: pathlib.Path) -> str:
    """T-SAGE's, of the highest PageRprec on the validation queries; empty where none was run."""
    results = root / "validation" / "results"
    system_results = read_results(results) if results.is_dir() else []
    means = {
        system_result.system.removeprefix(T_SAGE): system_result.mean("PageRprec", TASKS) or 0.0
        for system_result in system_results
        if system_result.system.startswith(T_SAGE)
    }
    return max(means, key=lambda temperature: means[temperature]) if means else ""


def all_claims(rows: Mapping[str, Row], temperature: str) -> list[Claim]:
    """Claims 7 and 8 of docs/claims.md, and what stands beside them."""
    best = rows.get(f"{T_SAGE}{temperature}", {})
    named = (
        ("T-SAGE over per-task models", best, rows["per-task"]),
        ("naive over per-task models", rows["naive"], rows["per-task"]),
        ("prompts over markers", rows["naive"], rows["marker"]),
        ("first episode over the warm-up", rows["episode-1"], rows["warm-up"]),
        ("second episode over the first", rows["naive"], rows["episode-1"]),
        ("PCGrad over naive", rows["pcgrad"], rows["naive"]),
        ("CGD over naive", rows["cgd"], rows["naive"]),
        ("GradNorm over naive", rows["gradnorm"], rows["naive"]),
        ("task-specific query encoders over naive", rows["qspec"], rows["naive"]),
    )
    prompts = Pair("prompts over none", rows["naive"], rows["no-prompts"])
    t_sage = Pair(f"T-SAGE, temperature {temperature}, over naive", best, rows["naive"])
    beside = [Claim(text, [Pair(text, first, second)]) for text, first, second in named]
    return [registered(7, [prompts]), registered(8, [t_sage]), *beside]


if __name__ == "__main__":
    main()
