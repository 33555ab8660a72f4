"""Whether two rows of a table differ: a paired bootstrap over queries, a paired t-test over seeds.

A bootstrap says what another draw of queries would change for these trained models; only several
seeds say what another training would.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float64
from scipy import special

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.storage.errors import DataError

# Number of resamples whose weights are held in memory at a time.
_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class SignificanceConfig:
    """What the rows of a table are tested against.

    Attributes:
        baseline: the row; None means the table's first.
        more_baselines: further rows, each with differences of its own.
        seed_dirs: output directories of the same comparison under other seeds, for the test over
            seeds.
    """

    baseline: str | None = None
    more_baselines: tuple[str, ...] = ()
    seed_dirs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """Difference of two systems on the same queries, or under the same seeds.

    Attributes:
        difference: mean of the first minus mean of the second.
        low: lower end of the 95% interval.
        high: its upper end.
        p_value: two-sided.
    """

    difference: float
    low: float
    high: float
    p_value: float


def bootstrap_over_tasks(
    first: Mapping[str, Evaluation],
    second: Mapping[str, Evaluation],
    measures: Sequence[str],
    *,
    resamples: int = 10_000,
    where: str = "paired bootstrap",
) -> tuple[dict[str, dict[str, PairedComparison]], dict[str, PairedComparison]]:
    """Tests the differences of two systems on each task, and that of their means over tasks.

    For the mean, the queries of each task are resampled apart: tasks count the same, as in the
    table, and are not drawn themselves.

    Source: Sakai, SIGIR 2006, "Evaluating evaluation metrics based on the bootstrap"; here the
    percentile interval of the mean difference, and as p-value twice the share of resamples on the
    other side of zero.

    Args:
        first: task -> one system's evaluation.
        second: the other's; the same tasks, and in each the same queries in the same order.
        measures: those to compare; a task without one has no part in its mean.
        resamples: samples of the bootstrap.
        where: what is compared, for messages.

    Returns:
        Task -> measure -> comparison; and measure -> comparison of the means.

    Raises:
        DataError: the tasks or a task's queries differ.
    """
    if first.keys() != second.keys():
        problem = f"different tasks, {', '.join(first)} and {', '.join(second)}"
        raise DataError(problem, where=where, fix="evaluate both on the same tasks")
    tasks: dict[str, dict[str, PairedComparison]] = {}
    drawn: dict[str, list[tuple[float, Float64[np.ndarray, " resamples"]]]] = {}
    for task in first:
        shared = [
            name for name in measures if name in first[task].values and name in second[task].values
        ]
        if not shared:
            continue
        columns = [
            _differences(first[task], second[task], name, where=f"{where}, task {task!r}")
            for name in shared
        ]
        differences = np.stack(columns, axis=1)
        # Each task draws apart from the others, whatever else the table holds.
        task_seed = [0, zlib.crc32(task.encode("utf-8"))]
        means = resampled_means(differences, resamples, task_seed)
        tasks[task] = {}
        for column, name in enumerate(shared):
            effect = float(differences[:, column].mean())
            tasks[task][name] = _comparison(effect, means[:, column])
            drawn.setdefault(name, []).append((effect, means[:, column]))
    averages = {
        name: _comparison(
            np.mean([effect for effect, _ in found]), np.mean([means for _, means in found], axis=0)
        )
        for name, found in drawn.items()
    }
    return tasks, averages


def mean_over_seeds(seeds: Sequence[Mapping[str, Evaluation]]) -> dict[str, Evaluation]:
    """One system's values by query, averaged over its seeds: what a bootstrap over queries takes.

    Args:
        seeds: task -> evaluation of each seed; tasks that a seed lacks are left out.

    Returns:
        Task -> evaluation with the measures that all seeds have.

    Raises:
        DataError: no seed, or seeds with different queries.
    """
    if not seeds:
        raise DataError("no seed", where="mean over seeds", fix="give one or more")
    means = {}
    for task, first in seeds[0].items():
        found = [one[task] for one in seeds if task in one]
        if len(found) < len(seeds):
            continue
        for other in found:
            _check_same_queries(first, other, where=f"mean over seeds, task {task!r}")
        shared = [name for name in first.values if all(name in one.values for one in found)]
        values = {name: np.mean([one.values[name] for one in found], axis=0) for name in shared}
        means[task] = Evaluation(first.query_ids, values)
    return means


def paired_over_seeds(first: Sequence[float], second: Sequence[float]) -> PairedComparison:
    """Student's paired t-test: the differences under each seed, and their 95% interval.

    Example:
        0.5, 0.7 against 0.4, 0.5 differ by 0.15 on average, with a standard error of 0.05; at one
        degree of freedom the interval is 0.15 ± 12.71 * 0.05.

    Args:
        first: one system's figure under each seed.
        second: the other's, under the same seeds.

    Raises:
        DataError: fewer than two seeds, or not the same number of both.
    """
    if len(first) != len(second) or len(first) < 2:
        problem = f"{len(first)} and {len(second)} seeds"
        fix = "train both under the same seeds, two or more"
        raise DataError(problem, where="test over seeds", fix=fix)
    differences = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    mean, count = float(differences.mean()), len(differences)
    error = float(differences.std(ddof=1)) / count**0.5
    if error == 0.0:
        return PairedComparison(mean, mean, mean, float(mean == 0.0))
    half = float(special.stdtrit(count - 1, 0.975)) * error
    p_value = 2.0 * float(special.stdtr(count - 1, -abs(mean) / error))
    return PairedComparison(mean, mean - half, mean + half, p_value)


def resampled_means(
    values: Float64[np.ndarray, "queries columns"], resamples: int, seed: int | Sequence[int]
) -> Float64[np.ndarray, "resamples columns"]:
    """Means of every column over bootstrap samples of the rows; columns share the samples."""
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [weights @ values / len(values) for weights in _weights(len(values), resamples, rng)]
    )


def _weights(count: int, resamples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each of `count` rows is in each sample, in blocks of samples."""
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        drawn = rng.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        weights = np.bincount(drawn.reshape(-1), minlength=size * count)
        yield weights.reshape(size, count).astype(np.float64)


def _differences(
    first: Evaluation, second: Evaluation, measure: str, *, where: str
) -> Float64[np.ndarray, " queries"]:
    _check_same_queries(first, second, where=where)
    return first.values[measure] - second.values[measure]


def _check_same_queries(first: Evaluation, second: Evaluation, *, where: str) -> None:
    if first.query_ids != second.query_ids:
        problem = f"the two were evaluated on different queries: {_unequal(first, second)}"
        fix = "evaluate both on the same split of the same collection"
        raise DataError(problem, where=where, fix=fix)


def _unequal(first: Evaluation, second: Evaluation) -> str:
    """Queries that only one of two evaluations has, with an example from each."""
    sides = []
    for name, one, other in (("first", first, second), ("second", second, first)):
        known = set(other.query_ids)
        if only := [id for id in one.query_ids if id not in known]:
            sides.append(f"{len(only):,} of the {name} alone, such as {only[0]!r}")
    return "; ".join(sides) or "the same ids in another order"


def _comparison(
    difference: float | np.floating, means: Float64[np.ndarray, " resamples"]
) -> PairedComparison:
    low, high = np.quantile(means, [0.025, 0.975])
    other_side = min((means <= 0).mean(), (means >= 0).mean())
    return PairedComparison(
        float(difference), float(low), float(high), float(min(1.0, 2 * other_side))
    )
