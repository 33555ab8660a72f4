"""The yardstick's table: R@20 by task and on average, beside what it is to reach.

    python benchmarks/yardstick/table.py RESULTS_DIR TABLE_MD [FLAGS OF run.sh]

reads a comparison's results/ and, where they are, the values by test query beside it; writes
TABLE_MD and prints it, and with values by query writes claims.json beside it.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from taser_jax.evaluation.results import SystemResult, read_results

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from claims import Claim, Combined, Pair, find, markdown, registered, write_json
from seed_rows import on_tasks, read_row

TASKS = ("squad", "nq_qed", "fm2", "selqa", "climate_fever", "fewrel", "cmu_dog")
MEASURE = "R@20"
COMMAND = "benchmarks/yardstick/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED"
NEGATIVES = "(negatives of BM25 and MiniLM, untrained)"
ROWS = (
    "BM25",
    "MiniLM, untrained",
    f"Shared {NEGATIVES}",
    f"TASER {NEGATIVES}",
    "Shared + BM25",
    "TASER + BM25",
)
DENSE = f"TASER {NEGATIVES}"
# The first of each pair is said to be ahead of the second.
CLAIMS = (
    (f"TASER {NEGATIVES}", "MiniLM, untrained"),
    (f"TASER {NEGATIVES}", "BM25"),
    (f"TASER {NEGATIVES}", f"Shared {NEGATIVES}"),
    ("TASER + BM25", f"TASER {NEGATIVES}"),
    ("TASER + BM25", "BM25"),
    ("Shared + BM25", f"Shared {NEGATIVES}"),
)
# What a good recipe for MiniLM is expected to come to: by task, and the mean as rounded.
TARGETS = {
    "to reach: dense": (96, 98.5, 96, 92, 84, 99, 62, 90),
    "to reach: with BM25": (98.5, 99, 96, 98, 87, 99, 68, 93),
}


def main() -> None:
    """Writes and prints the table."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    by_system = {result.system: result for result in read_results(sys.argv[1])}
    text = rows(by_system)
    table = pathlib.Path(sys.argv[2])
    comparison = pathlib.Path(sys.argv[1]).parent
    if any(comparison.glob("per_query/*.test.csv")):
        command = " ".join([COMMAND, *sys.argv[3:]])
        findings = find(all_claims(comparison), MEASURE, command=command)
        text += f"\n{markdown(findings)}"
        write_json(findings, table.with_name("claims.json"))
    table.write_text(text, encoding="utf-8")
    print(text)


def all_claims(comparison: pathlib.Path) -> list[Claim]:
    """Claim 11 of docs/claims.md, and the pairs of rows that are there, of one seed."""
    seeds = {name: {0: read_row(comparison, name)} for name in ROWS}
    rows = {name: row if row[0] else {} for name, row in seeds.items()}
    dense, bm25 = rows[DENSE], rows["BM25"]
    by_task = [
        Pair(f"{_short(DENSE)} over BM25, {task}", on_tasks(dense, [task]), on_tasks(bm25, [task]))
        for task in TASKS
    ]
    claims = [registered(11, by_task, Combined.SMALLEST)]
    for first, second in CLAIMS:
        text = f"{_short(first)} over {_short(second)}"
        claims.append(Claim(text, [Pair(text, rows[first], rows[second])]))
    return claims


def rows(by_system: Mapping[str, SystemResult]) -> str:
    """One line per row: parameters, tasks, mean, in per cent."""
    lines = [
        f"| {MEASURE} | parameters | {' | '.join(TASKS)} | mean |",
        f"|---|{'---:|' * (len(TASKS) + 2)}",
    ]
    for row in ROWS:
        if row in by_system:
            values = [100 * by_system[row].tasks[task].metrics[MEASURE] for task in TASKS]
            count = by_system[row].parameters
            parameters = "-" if count is None else f"{count:,}"
            lines.append(_line(row, parameters, [*values, statistics.fmean(values)]))
    lines += [_line(row, "-", values) for row, values in TARGETS.items()]
    return "\n".join(lines) + "\n"


def _short(row: str) -> str:
    return row.replace(f" {NEGATIVES}", "")


def _line(row: str, parameters: str, values: Sequence[float]) -> str:
    cells = [f"{value:.1f}" for value in values]
    return f"| {row} | {parameters} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
