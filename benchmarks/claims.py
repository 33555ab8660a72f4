"""Claims of the form "this row is ahead of that one", with intervals over queries and over seeds.

The tables of kilt_mini, muf, open_qa and yardstick are made of it. An effect is the difference of
two rows' means over tasks. Its interval over queries is a paired bootstrap of every query's
difference, averaged over the seeds that both rows have; that over seeds is a paired t-test.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import per_query_path, read_per_query, read_results
from taser_jax.evaluation.significance import (
    PairedComparison,
    bootstrap_over_tasks,
    mean_over_seeds,
    paired_over_seeds,
)

Row = Mapping[int, Mapping[str, Evaluation]]
"""Seed -> task -> values by query."""
HEADER = (*("claim", "effect", "95% over queries", "p", "95% over seeds", "p over seeds", "seeds"),)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row that is said to be ahead of another.

    Attributes:
        text: the claim.
        first: the row that is said to be ahead.
        second: the other.
    """

    text: str
    first: Row
    second: Row

    @property
    def seeds(self) -> list[int]:
        """Those that both rows have."""
        return sorted(self.first.keys() & self.second.keys())


def read_row(directory: pathlib.Path, system: str, *, split: str = "test") -> dict[str, Evaluation]:
    """Task -> values by query of a row of a results folder; empty where it is not there yet."""
    if not (directory / "results").is_dir():
        return {}
    found = {result.system: result for result in read_results(directory / "results")}
    if system not in found:
        return {}
    return {
        task: read_per_query(per_query_path(directory, system, task, split))
        for task in found[system].tasks
    }


def over_queries(claim: Claim, measure: str) -> PairedComparison:
    """The effect, by a bootstrap over queries."""
    first, second = (
        mean_over_seeds([row[seed] for seed in claim.seeds]) for row in (claim.first, claim.second)
    )
    _, averages = bootstrap_over_tasks(first, second, [measure], where=claim.text)
    return averages[measure]


def over_seeds(claim: Claim, measure: str) -> PairedComparison:
    """The effect, by a t-test over two or more seeds."""
    return paired_over_seeds(
        *(
            [mean_over_tasks(row[seed], measure) for seed in claim.seeds]
            for row in (claim.first, claim.second)
        )
    )


def mean_over_tasks(tasks: Mapping[str, Evaluation], measure: str) -> float:
    """Each task counts the same."""
    return statistics.fmean(float(one.values[measure].mean()) for one in tasks.values())


def markdown(claims: Sequence[Claim], measure: str) -> str:
    """A line for each claim whose two rows share a seed, in points of the measure."""
    lines = [f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
    for claim in claims:
        if not claim.seeds:
            continue
        queries = over_queries(claim, measure)
        cells = [f"{100 * queries.difference:+.1f}", *_interval(queries)]
        cells += _interval(over_seeds(claim, measure)) if len(claim.seeds) > 1 else ["-", "-"]
        lines.append(f"| {' | '.join([claim.text, *cells, str(len(claim.seeds))])} |")
    return "\n".join(lines) + "\n"


def write_json(claims: Sequence[Claim], measure: str, path: pathlib.Path, *, command: str) -> None:
    """A file for benchmarks/opening.py: every claim whose rows share a seed, in points."""
    found = []
    for claim in claims:
        if claim.seeds:
            effect = over_queries(claim, measure)
            found.append(
                {
                    "claim": claim.text,
                    "measure": measure,
                    "effect": 100 * effect.difference,
                    "low": 100 * effect.low,
                    "high": 100 * effect.high,
                    "p": effect.p_value,
                    "seeds": len(claim.seeds),
                    "command": command,
                }
            )
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _interval(found: PairedComparison) -> list[str]:
    p_value = "< 0.001" if found.p_value < 0.001 else f"{found.p_value:.3f}"
    return [f"[{100 * found.low:+.1f}, {100 * found.high:+.1f}]", p_value]
