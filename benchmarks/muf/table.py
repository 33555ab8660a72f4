"""DPR-MUF's rows and claims, from the finished seeds of benchmarks/muf/run.sh.

    python benchmarks/muf/table.py OUTPUT_DIR

reads OUTPUT_DIR/seed-*, writes OUTPUT_DIR/{muf.md,claims.json} and prints muf.md: each table's rows
by task, the mean over seeds with their standard deviation, and the paper's claims with intervals
over queries and over seeds. Claim 5 of docs/claims.md needs a joint model without each domain.
"""

from __future__ import annotations

import csv
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import (
    Claim,
    Finding,
    Pair,
    Row,
    find,
    markdown,
    mean_over_tasks,
    on_tasks,
    over,
    read_row,
    registered,
    write_json,
)

MEASURES = ("R@1", "R@20", "R@100")
COMMAND = "benchmarks/muf/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED"
# Task -> its name in the rows of joint models without it.
DOMAINS = {
    "squad": "SQuAD",
    "nq_qed": "NQ",
    "medquad": "MedQuAD",
    "fewrel": "FewRel",
    "cmu_dog": "CMU DoG",
}
# Table -> the folder of its rows, below the seed's.
TABLES = {"domains": ".", "mixed": "mixed", "bm25": ".", "sizes": "."}
# Table -> rows of which the first is to be ahead, as the paper has it (its tables 2 and 3).
CLAIMS = {
    "domains": (
        ("Single, own domain", "Single, worst"),
        ("MUF", "Single, own domain"),
        ("MUF", "Joint"),
        ("MUF without SQuAD", "Joint without SQuAD"),
        ("MUF without the domain", "Single, worst"),
        ("MUF, T = 1000", "Equal weights"),
    ),
    "mixed": (
        ("MUF", "Joint"),
        ("MUF", "Equal weights"),
        ("MUF", "Oracle indicator"),
        ("MUF", "Oracle Bayesian"),
        ("MUF without SQuAD", "Joint without SQuAD"),
    ),
    "bm25": (
        ("MUF + BM25", "MUF"),
        ("MUF + BM25", "Joint + BM25"),
        ("MUF + BM25", "Single, own domain + BM25"),
    ),
}


def main() -> None:
    """Writes and prints the tables."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    seeds = {
        int(directory.name.removeprefix("seed-")): directory
        for directory in sorted(root.glob("seed-*"))
        if (directory / "domains.csv").exists()
    }
    blocks = [f"{len(seeds)} seeds."]
    all_findings: list[Finding] = []
    for table, folder in TABLES.items():
        names = list(dict.fromkeys(name for one in seeds.values() for name in rows(one, table)))
        named = [name for claim in CLAIMS.get(table, ()) for name in claim]
        if table == "domains":
            named += ["MUF", "Equal weights", *map(without, DOMAINS)]
        found = {name: read(seeds, folder, name) for name in dict.fromkeys([*names, *named])}
        claims = [over(first, second, found) for first, second in CLAIMS.get(table, ())]
        if table == "domains":
            claims = [*registered_claims(found), *claims]
        for measure in MEASURES:
            shown = {name: found[name] for name in names}
            if shown:
                blocks.append(f"### {table}, {measure}")
                blocks.append(spread(shown, measure))
            findings = find(claims, measure, command=COMMAND)
            if table != "mixed":
                all_findings += findings
            if findings:
                blocks.append(markdown(findings))
    text = "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"
    (root / "muf.md").write_text(text, encoding="utf-8")
    write_json(all_findings, root / "claims.json")
    print(text)


def registered_claims(rows: Mapping[str, Row]) -> list[Claim]:
    """Claims 5 and 6 of docs/claims.md."""
    joint = unseen({task: rows[without(task)] for task in DOMAINS})
    on_domains = Pair("MUF over Joint without the domain", on_tasks(rows["MUF"], [*DOMAINS]), joint)
    equal = Pair("MUF over Equal weights", rows["MUF"], rows["Equal weights"])
    return [registered(5, [on_domains]), registered(6, [equal])]


def without(task: str) -> str:
    """The row of the joint model that has not seen a task's domain."""
    return f"Joint without {DOMAINS[task]}"


def unseen(rows: Mapping[str, Row]) -> Row:
    """Each task's values from the row of its own, under the seeds that all rows have."""
    seeds = set.intersection(*({*on_tasks(row, [task])} for task, row in rows.items()))
    return {seed: {task: row[seed][task] for task, row in rows.items()} for seed in sorted(seeds)}


def rows(directory: pathlib.Path, table: str) -> list[str]:
    """The rows of a seed's table, in order; none where it is not written."""
    path = directory / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(dict.fromkeys(line["system"] for line in csv.DictReader(file)))


def read(seeds: Mapping[int, pathlib.Path], folder: str, name: str) -> Row:
    """A row's values by query, of the seeds that have it."""
    found = {seed: read_row(directory / folder, name) for seed, directory in seeds.items()}
    return {seed: tasks for seed, tasks in found.items() if tasks}


def spread(found: Mapping[str, Row], measure: str) -> str:
    """A line per row: mean ± standard deviation over seeds, in per cent, by task and on average."""
    tasks = list(dict.fromkeys(t for row in found.values() for one in row.values() for t in one))
    lines = [f"| system | {' | '.join([*tasks, 'mean'])} |", f"|---|{'---:|' * (len(tasks) + 1)}"]
    for name, row in found.items():
        cells = [
            _cell([100 * float(one[task].values[measure].mean()) for one in row.values()])
            for task in tasks
        ]
        cells.append(_cell([100 * mean_over_tasks(one, measure) for one in row.values()]))
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation}" if values else "-"


if __name__ == "__main__":
    main()
