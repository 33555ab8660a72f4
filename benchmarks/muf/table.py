"""DPR-MUF's rows and claims, from the finished seeds of benchmarks/muf/run.sh.

    python benchmarks/muf/table.py OUTPUT_DIR

reads OUTPUT_DIR/seed-*, writes OUTPUT_DIR/{muf.md,claims.json} and prints muf.md: each table's rows
by task, the mean over seeds with their standard deviation, and the paper's claims with intervals
over queries and over seeds.
"""

from __future__ import annotations

import csv
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Row, markdown, mean_over_tasks, read_row, write_json

MEASURES = ("R@20", "R@100")
# Table -> the folder of its rows, below the seed's.
TABLES = {"domains": ".", "mixed": "mixed", "bm25": ".", "sizes": "."}
# Table -> rows of which the first is to be ahead, as the paper has it (its tables 2 and 3).
CLAIMS = {
    "domains": (
        ("Single, own domain", "Single, worst"),
        ("MUF", "Single, own domain"),
        ("MUF", "Joint"),
        ("MUF without SQuAD", "Joint without SQuAD"),
        ("MUF", "Equal weights"),
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
    all_claims: list[Claim] = []
    for table, folder in TABLES.items():
        names = list(dict.fromkeys(name for one in seeds.values() for name in rows(one, table)))
        named = [name for claim in CLAIMS.get(table, ()) for name in claim]
        found = {name: read(seeds, folder, name) for name in dict.fromkeys([*names, *named])}
        for measure in MEASURES:
            shown = {name: found[name] for name in names}
            if shown:
                blocks.append(f"### {table}, {measure}")
                blocks.append(spread(shown, measure))
            claims = [
                Claim(f"{first} over {second}", found[first], found[second])
                for first, second in CLAIMS.get(table, ())
            ]
            if measure == MEASURES[0] and table != "mixed":
                all_claims += claims
            if any(claim.seeds for claim in claims):
                blocks.append(markdown(claims, measure))
    text = "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"
    (root / "muf.md").write_text(text, encoding="utf-8")
    write_json(all_claims, MEASURES[0], root / "claims.json", command="benchmarks/muf/run.sh")
    print(text)


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
