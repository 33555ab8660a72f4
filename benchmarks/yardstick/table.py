"""The yardstick's table: R@20 by task and on average, beside what it is to reach.

    python benchmarks/yardstick/table.py RESULTS_DIR TABLE_MD

reads the results/ of a comparison, writes TABLE_MD and prints it.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from taser_jax.evaluation.results import SystemResult, read_results

TASKS = ("squad", "nq_qed", "fm2", "selqa", "climate_fever", "fewrel", "cmu_dog")
MEASURE = "R@20"
NEGATIVES = "(negatives of BM25 and MiniLM, untrained)"
ROWS = (
    "BM25",
    "MiniLM, untrained",
    f"Shared {NEGATIVES}",
    f"TASER {NEGATIVES}",
    "Shared + BM25",
    "TASER + BM25",
)
# What a good recipe for MiniLM is expected to come to: by task, and the mean as rounded.
TARGETS = {
    "to reach: dense": (96, 98.5, 96, 92, 84, 99, 62, 90),
    "to reach: with BM25": (98.5, 99, 96, 98, 87, 99, 68, 93),
}


def main() -> None:
    """Writes and prints the table."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    found = {result.system: result for result in read_results(sys.argv[1])}
    text = markdown(found)
    pathlib.Path(sys.argv[2]).write_text(text, encoding="utf-8")
    print(text)


def markdown(found: Mapping[str, SystemResult]) -> str:
    """One line per row: parameters, tasks, mean, in per cent."""
    lines = [
        f"| {MEASURE} | parameters | {' | '.join(TASKS)} | mean |",
        f"|---|{'---:|' * (len(TASKS) + 2)}",
    ]
    for row in ROWS:
        if row in found:
            values = [100 * found[row].tasks[task].metrics[MEASURE] for task in TASKS]
            count = found[row].parameters
            parameters = "-" if count is None else f"{count:,}"
            lines.append(_line(row, parameters, [*values, statistics.fmean(values)]))
    lines += [_line(row, "-", values) for row, values in TARGETS.items()]
    return "\n".join(lines) + "\n"


def _line(row: str, parameters: str, values: Sequence[float]) -> str:
    cells = [f"{value:.1f}" for value in values]
    return f"| {row} | {parameters} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
