"""Claims of the form "this row is ahead of that one": effects, intervals, verdicts, claims.json.

The tables of kilt_mini, moma_mini, muf, open_qa and yardstick are made of it. Each writes
OUTPUT_DIR/claims.json, which benchmarks/opening.py reads; docs/claims.md has the claims that are
numbered here, and the rule of the verdicts.

An effect is the difference of two rows' means over tasks. Its interval over queries takes queries
as nested in seeds: a query's difference is first averaged over the seeds that both rows have, then
queries are resampled within each task, or all together where tasks are mixes of them. That over
seeds is a paired t-test of the seeds' effects.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from registered_claims import REGISTERED
from scipy import stats
from seed_rows import Row, mean_over_seeds, mean_over_tasks

from taser_jax.evaluation.significance import (
    AVERAGE,
    PairedComparison,
    TaskQueries,
    bootstrap_over_mixes,
    bootstrap_over_tasks,
)

HEADER = ("claim", "effect", "95% over queries", "p", "95% over seeds", "p over seeds", "seeds")


class Combined(enum.StrEnum):
    """What a claim about several pairs of rows reports."""

    MEAN = "mean"
    """The mean of the pairs: values of the same query are averaged over them."""
    SMALLEST = "smallest"
    """The pair with the smallest effect."""


class Verdict(enum.StrEnum):
    """What an effect and its intervals say of a claim."""

    SHOWN = "shown"
    REFUTED = "refuted"
    UNDECIDED = "undecided"
    GATE_CLOSED = "gate closed"
    """A cheap trial, which the claim names, gave less than it asks: the claim itself is not run."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A row that is said to be ahead of another.

    Attributes:
        text: what is compared, such as "TASER Det-R over DPR".
        first: the row that is said to be ahead.
        second: the other.
    """

    text: str
    first: Row
    second: Row

    @property
    def seeds(self) -> frozenset[int]:
        """Those under which both rows have every task."""
        rows = (self.first, self.second)
        tasks = {task for row in rows for values in row.values() for task in values}
        finished = [
            {seed for seed, values in row.items() if tasks <= values.keys()} for row in rows
        ]
        return frozenset(finished[0] & finished[1])


@dataclasses.dataclass(frozen=True)
class Claim:
    """One or more pairs of rows, of which the first is said to be ahead.

    Attributes:
        text: the claim.
        pairs: the rows.
        combined: what several pairs come to.
        smallest: the smallest effect that matters, in points; a negative one is a margin.
        planned_seeds: 1 where the claim is about one training.
        number: in docs/claims.md; None for what stands beside those.
        headline: measures that decide it.
        queries: whether the rows' tasks have queries of their own.
    """

    text: str
    pairs: Sequence[Pair]
    combined: Combined = Combined.MEAN
    smallest: float = 0.0
    planned_seeds: int = 2
    number: int | None = None
    headline: tuple[str, ...] = ()
    queries: TaskQueries = TaskQueries.OWN

    @property
    def seeds(self) -> list[int]:
        """Those of all pairs."""
        return sorted(frozenset.intersection(*(pair.seeds for pair in self.pairs)))


@dataclasses.dataclass(frozen=True)
class Interval:
    """A 95% interval in points, and the two-sided p-value of no effect."""

    low: float
    high: float
    p_value: float

    @classmethod
    def of(cls, comparison: PairedComparison) -> Interval:
        """A comparison's, in points."""
        return cls(100 * comparison.low, 100 * comparison.high, comparison.p_value)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a claim comes to on one measure: an entry of claims.json.

    Attributes:
        number: in docs/claims.md; None for what stands beside those.
        text: the claim.
        rows: what was compared; of several pairs the one with the smallest effect, or their mean.
        measure: such as "R@20".
        headline: whether this measure decides a numbered claim.
        effect: in points, mean over tasks.
        over_queries: bootstrap of the queries' differences, averaged over seeds.
        over_seeds: paired t-test; None with one seed.
        seeds: how many.
        smallest: the smallest effect that matters, in points.
        verdict: of `verdict`.
        command: the benchmark.
        tasks: task -> effect in points.
    """

    number: int | None
    text: str
    rows: str
    measure: str
    headline: bool
    effect: float
    over_queries: Interval
    over_seeds: Interval | None
    seeds: int
    smallest: float
    verdict: Verdict
    command: str
    tasks: Mapping[str, float]


def pair(name: str, other: str, rows: Mapping[str, Row]) -> Pair:
    """Two rows by name, whether or not they are there."""
    return Pair(f"{name} over {other}", rows.get(name, {}), rows.get(other, {}))


def over(
    name: str, other: str, rows: Mapping[str, Row], queries: TaskQueries = TaskQueries.OWN
) -> Claim:
    """A claim beside those of docs/claims.md, of two rows by name."""
    compared = pair(name, other, rows)
    return Claim(compared.text, [compared], queries=queries)


def registered(number: int, pairs: Sequence[Pair], combined: Combined = Combined.MEAN) -> Claim:
    """A claim of docs/claims.md, with the rows that it is about."""
    line = REGISTERED[number]
    return Claim(line.text, pairs, combined, line.smallest, line.seeds, number, line.measures)


def find(claims: Sequence[Claim], measure: str, *, command: str) -> list[Finding]:
    """What every claim comes to whose rows share a seed."""
    return [_finding(claim, measure, command) for claim in claims if claim.seeds]


def verdict(
    effect: float,
    over_queries: Interval,
    over_seeds: Interval | None,
    *,
    smallest: float,
    seeds: int,
    planned_seeds: int,
) -> Verdict:
    """The rule of docs/claims.md.

    Shown: both intervals lie above zero (above minus the margin, where `smallest` is one) and the
    effect reaches the smallest that matters. Refuted: the interval over queries lies below the
    smallest effect that matters. Nothing is shown before all planned seeds have run, and a claim of
    one planned seed needs no interval over seeds.

    Example:
        +2.0 with [+1.0, +3.0] over queries and [+0.5, +3.5] over seeds is shown if +1 matters,
        undecided if +2.5 does, and refuted if +4 does.
    """
    if over_queries.high < smallest:
        return Verdict.REFUTED
    bound = min(smallest, 0.0)
    lows = [over_queries.low]
    if over_seeds is not None:
        lows.append(over_seeds.low)
    if seeds >= planned_seeds and effect >= smallest and min(lows) > bound:
        return Verdict.SHOWN
    return Verdict.UNDECIDED


def gate(number: int, pair: Pair, measure: str, *, opens_at: float, command: str) -> Finding:
    """The trial before a claim's runs: closed below so many points, else the claim is undecided."""
    line = REGISTERED[number]
    claim = Claim(line.text, [pair], smallest=opens_at, number=number, headline=line.measures)
    finding = _finding(claim, measure, command)
    closed = finding.effect < opens_at
    return dataclasses.replace(
        finding, verdict=Verdict.GATE_CLOSED if closed else Verdict.UNDECIDED
    )


def markdown(findings: Sequence[Finding]) -> str:
    """A line for each, in points."""
    lines = [f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
    for finding in findings:
        number = "" if finding.number is None else f"{finding.number}. "
        cells = [f"{number}{finding.text}", f"{finding.effect:+.1f}"]
        for interval in (finding.over_queries, finding.over_seeds):
            cells += [interval_text(interval), "-" if interval is None else _p_text(interval)]
        lines.append(f"| {' | '.join([*cells, str(finding.seeds)])} |")
    return "\n".join(lines) + "\n"


def interval_text(interval: Interval | None) -> str:
    """[+0.5, +2.1], or "-" without one."""
    return "-" if interval is None else f"[{interval.low:+.1f}, {interval.high:+.1f}]"


def write_json(findings: Sequence[Finding], path: pathlib.Path) -> None:
    """claims.json, a list of findings."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(findings), indent=1) + b"\n")


def read_json(path: pathlib.Path) -> list[Finding]:
    """What `write_json` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=list[Finding])


def _finding(claim: Claim, measure: str, command: str) -> Finding:
    pairs = claim.pairs
    if claim.combined is Combined.MEAN and len(pairs) > 1:
        pairs = [_mean(pairs, claim.seeds)]
    effects = [_effect(pair, claim.seeds, measure, claim.queries) for pair in pairs]
    smallest = min(effects, key=lambda effect: effect.over_queries.difference)
    difference = 100 * smallest.over_queries.difference
    over_queries = Interval.of(smallest.over_queries)
    over_seeds = None if smallest.over_seeds is None else Interval.of(smallest.over_seeds)
    return Finding(
        number=claim.number,
        text=claim.text,
        rows=smallest.text,
        measure=measure,
        headline=measure in claim.headline,
        effect=difference,
        over_queries=over_queries,
        over_seeds=over_seeds,
        seeds=len(claim.seeds),
        smallest=claim.smallest,
        verdict=verdict(
            difference,
            over_queries,
            over_seeds,
            smallest=claim.smallest,
            seeds=len(claim.seeds),
            planned_seeds=claim.planned_seeds,
        ),
        command=command,
        tasks=smallest.tasks,
    )


@dataclasses.dataclass(frozen=True)
class _Effect:
    """A pair's; shares, but points in `tasks`."""

    text: str
    over_queries: PairedComparison
    over_seeds: PairedComparison | None
    tasks: Mapping[str, float]


def _effect(pair: Pair, seeds: Sequence[int], measure: str, queries: TaskQueries) -> _Effect:
    rows = [[row[seed] for seed in seeds] for row in (pair.first, pair.second)]
    first, second = map(mean_over_seeds, rows)
    compared = bootstrap_over_tasks(first, second, [measure], where=pair.text)
    if queries is TaskQueries.MIXED:
        compared |= bootstrap_over_mixes(first, second, [measure])
    over_seeds = None
    if len(seeds) > 1:
        means = [[mean_over_tasks(tasks, measure) for tasks in row] for row in rows]
        over_seeds = paired_over_seeds(*means)
    average = compared.pop((AVERAGE, measure))
    by_task = {task: 100 * of_task.difference for (task, _), of_task in compared.items()}
    return _Effect(pair.text, average, over_seeds, by_task)


def paired_over_seeds(first: Sequence[float], second: Sequence[float]) -> PairedComparison:
    """Student's paired t-test: the differences under each seed, and their 95% interval.

    Args:
        first: one system's figure under each seed, two or more.
        second: the other's, under the same seeds.
    """
    differences = np.subtract(first, second)
    mean = float(differences.mean())
    if np.ptp(differences) == 0:
        return PairedComparison(mean, mean, mean, float(mean == 0))
    tested = stats.ttest_rel(first, second)
    interval = tested.confidence_interval(0.95)
    return PairedComparison(mean, float(interval.low), float(interval.high), float(tested.pvalue))


def _mean(pairs: Sequence[Pair], seeds: Sequence[int]) -> Pair:
    """Rows whose values are the mean over the pairs' rows, query by query."""
    first, second = (
        {seed: mean_over_seeds([row[seed] for row in rows]) for seed in seeds}
        for rows in ([pair.first for pair in pairs], [pair.second for pair in pairs])
    )
    return Pair(f"mean of {', '.join(pair.text for pair in pairs)}", first, second)


def _p_text(interval: Interval) -> str:
    return "< 0.001" if interval.p_value < 0.001 else f"{interval.p_value:.3f}"
