"""DPR-MUF's rows and claims, from the finished seeds of benchmarks/muf/run.sh.

    python benchmarks/muf/table.py OUTPUT_DIR

reads OUTPUT_DIR/seed-*, writes OUTPUT_DIR/{muf.md,claims.json} and prints muf.md: each table's rows
by task, the mean over seeds with their standard deviation, claims 5 and 6 of docs/claims.md and the
paper's with intervals over queries and over seeds, and how well a specialist's w tells its errors
and its own domain's queries.
"""

from __future__ import annotations

import csv
import pathlib
import sys
from collections.abc import Iterable, Mapping

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Finding, find, markdown, over, pair, registered, write_json
from seed_rows import Row, read_row, seed_folders, spread_table, spread_text

from taser_jax.evaluation.results import read_results
from taser_jax.evaluation.significance import TaskQueries

MEASURES = ("R@1", "R@20", "R@100")
COMMAND = "benchmarks/muf/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED"
# Table -> the folder of its rows, below the seed's.
TABLES = {"domains": ".", "mixed": "mixed", "bm25": ".", "sizes": "."}
# Table -> rows of which the first is to be ahead, as the paper has it (its tables 2 and 3).
CLAIMS = {
    "domains": (
        ("Single, own domain", "Single, worst"),
        ("MUF", "Single, own domain"),
        ("MUF", "Single, best other"),
        ("MUF", "Joint"),
        ("MUF without the domain", "Joint without the domain"),
        ("MUF without the domain", "Single, best other"),
        ("MUF without the domain", "Single, worst"),
        # Of other_weights.py.
        ("Weights by margin", "Equal weights"),
        ("Weights by classifier", "Equal weights"),
    ),
    "mixed": (
        ("MUF", "Joint"),
        ("MUF", "Equal weights"),
        ("MUF", "Oracle indicator"),
        ("MUF", "Oracle Bayesian"),
    ),
    "bm25": (
        ("MUF + BM25", "MUF"),
        ("MUF + BM25", "Joint + BM25"),
        ("MUF + BM25", "Joint without the domain + BM25"),
        ("MUF + BM25", "Single, own domain + BM25"),
    ),
}
# Number in docs/claims.md -> the row that is said to be ahead, and the other.
REGISTERED_ROWS = {5: ("MUF", "Joint without the domain"), 6: ("MUF", "Equal weights")}
# Columns of uncertainty.csv -> what w tells apart.
AUROCS = {
    "auroc_of_own_queries": "own and others' queries",
    "auroc_of_errors": "right and wrong first passages of own queries",
}


def main() -> None:
    """Writes and prints the tables."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(sys.argv[1])
    folders = seed_folders(root)
    seeds = {seed: path for seed, path in folders.items() if (path / "domains.csv").exists()}
    blocks = [f"{len(seeds)} seeds."]
    all_findings: list[Finding] = []
    for table, folder in TABLES.items():
        names = list(
            dict.fromkeys(name for seed_dir in seeds.values() for name in rows(seed_dir, table))
        )
        named = [name for claim in CLAIMS.get(table, ()) for name in claim]
        if table == "domains":
            named += [name for rows_of in REGISTERED_ROWS.values() for name in rows_of]
        named_rows = {name: read(seeds, folder, name) for name in dict.fromkeys([*names, *named])}
        queries = TaskQueries.MIXED if table == "mixed" else TaskQueries.OWN
        claims = [
            over(first, second, named_rows, queries) for first, second in CLAIMS.get(table, ())
        ]
        if table == "domains":
            claims = [*registered_claims(named_rows), *claims]
        for measure in MEASURES:
            shown = {name: row for name, row in named_rows.items() if row}
            if shown:
                blocks.append(f"### {table}, {measure}")
                blocks.append(spread_table(shown, measure))
            findings = find(claims, measure, command=COMMAND)
            if table != "mixed":
                all_findings += findings
            if findings:
                blocks.append(markdown(findings))
    if seeds:
        blocks += ["### AUROC of a specialist's w", aurocs(seeds.values())]
        blocks += ["### parameters, with ensembles", parameters(next(iter(seeds.values())))]
    text = "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"
    (root / "muf.md").write_text(text, encoding="utf-8")
    write_json(all_findings, root / "claims.json")
    print(text)


def registered_claims(rows: Mapping[str, Row]) -> list[Claim]:
    """Claims 5 and 6 of docs/claims.md."""
    return [
        registered(number, [pair(first, second, rows)])
        for number, (first, second) in REGISTERED_ROWS.items()
    ]


def rows(directory: pathlib.Path, table: str) -> list[str]:
    """The rows of a seed's table, in order; none where it is not written."""
    path = directory / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(dict.fromkeys(line["system"] for line in csv.DictReader(file)))


def read(seeds: Mapping[int, pathlib.Path], folder: str, name: str) -> Row:
    """A row's values by query, of the seeds that have it."""
    by_seed = {seed: read_row(directory / folder, name) for seed, directory in seeds.items()}
    return {seed: tasks for seed, tasks in by_seed.items() if tasks}


def aurocs(directories: Iterable[pathlib.Path]) -> str:
    """A line per specialist: mean ± standard deviation over seeds; 0.50 is chance."""
    values: dict[str, dict[str, list[float]]] = {}
    for directory in directories:
        with (directory / "uncertainty.csv").open(newline="") as file:
            for line in csv.DictReader(file):
                if line["own"] == "True":
                    of_specialist = values.setdefault(line["specialist"], {})
                    for column in AUROCS:
                        if line[column]:
                            of_specialist.setdefault(column, []).append(float(line[column]))
    lines = [f"| specialist | {' | '.join(AUROCS.values())} |", f"|---|{'---:|' * len(AUROCS)}"]
    for name, of_specialist in values.items():
        cells = [spread_text(of_specialist.get(column, []), digits=2) for column in AUROCS]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def parameters(directory: pathlib.Path) -> str:
    """A line per row of `domains` that has parameters: of models, and of the ensembles' members."""
    lines = ["| system | parameters |", "|---|---:|"]
    for result in read_results(directory / "results", rows(directory, "domains")):
        if result.parameters is not None:
            lines.append(f"| {result.system} | {result.parameters:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
