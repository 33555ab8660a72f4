"""Paired tests of two systems over queries, against a loop."""

import numpy as np
import pytest

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.significance import (
    bootstrap_over_tasks,
    resampled_means,
)
from taser_jax.storage.errors import DataError


def on_one_task(first, second, resamples=10_000):
    tasks, _ = bootstrap_over_tasks({"nq": first}, {"nq": second}, ["R@1"], resamples=resamples)
    return tasks["nq"]["R@1"]


def test_paired_bootstrap():
    rng = np.random.default_rng(0)
    ids = tuple(map(str, range(200)))
    first = Evaluation(ids, {"R@1": (rng.random(200) < 0.7).astype(float)})
    second = Evaluation(ids, {"R@1": (rng.random(200) < 0.5).astype(float)})
    result = on_one_task(first, second, resamples=2000)
    difference = first.values["R@1"] - second.values["R@1"]
    # The normal approximation is the oracle: 200 bounded differences are close to it.
    half = 1.96 * difference.std() / np.sqrt(200)
    assert result.difference == pytest.approx(difference.mean())
    assert result.low == pytest.approx(difference.mean() - half, abs=0.02)
    assert result.high == pytest.approx(difference.mean() + half, abs=0.02)
    assert result.p_value < 0.01
    assert on_one_task(first, first, resamples=100).p_value == 1
    assert on_one_task(first, second, resamples=2000) == result
    with pytest.raises(DataError, match="different queries"):
        on_one_task(first, Evaluation(ids[::-1], first.values))


def test_resampled_means_are_those_of_drawn_rows():
    """Every sample by a loop over its rows, from the same generator; columns share samples."""
    values = np.random.default_rng(1).normal(size=(23, 3))
    found = resampled_means(values, 600, 7)
    rng = np.random.default_rng(7)
    expected = []
    for size in (256, 256, 88):
        expected += [values[rows].mean(axis=0) for rows in rng.integers(0, 23, (size, 23))]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def evaluation(values, measure="R@1", prefix="q"):
    ids = tuple(f"{prefix}{number}" for number in range(len(values)))
    return Evaluation(ids, {measure: np.asarray(values, np.float64)})


def test_the_mean_over_tasks_counts_each_task_once():
    """Variance of a mean of independent task means: the sum of theirs, by the number squared."""
    rng = np.random.default_rng(2)
    sizes = {"large": 900, "small": 40}
    first, second = (
        {task: evaluation(rng.random(size)) for task, size in sizes.items()} for _ in range(2)
    )
    tasks, averages = bootstrap_over_tasks(first, second, ["R@1"])
    differences = {task: first[task].values["R@1"] - second[task].values["R@1"] for task in sizes}
    for task, comparisons in tasks.items():
        assert comparisons["R@1"].difference == pytest.approx(differences[task].mean())
    means = [values.mean() for values in differences.values()]
    variance = sum(values.var() / len(values) for values in differences.values()) / 4
    found = averages["R@1"]
    assert found.difference == pytest.approx(np.mean(means))
    assert found.high - found.low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.05)
    # What a task draws does not depend on the tasks beside it.
    alone, _ = bootstrap_over_tasks({"small": first["small"]}, {"small": second["small"]}, ["R@1"])
    assert alone["small"] == tasks["small"]


def test_a_task_without_a_measure_has_no_part_in_its_mean():
    pages = evaluation([1.0, 0.0], "PageRprec")
    both = Evaluation(("a",), {"R@1": np.ones(1), "PageRprec": np.zeros(1)})
    zero = Evaluation(("a",), {"R@1": np.zeros(1), "PageRprec": np.zeros(1)})
    tasks, averages = bootstrap_over_tasks(
        {"aida": pages, "nq": both}, {"aida": pages, "nq": zero}, ["R@1", "PageRprec"]
    )
    assert set(tasks["aida"]) == {"PageRprec"}
    assert averages["R@1"].difference == 1.0
    assert averages["PageRprec"].difference == 0.0


def test_no_difference_is_not_significant_and_a_sure_one_is():
    ones, zeros = evaluation(np.ones(30)), evaluation(np.zeros(30))
    assert on_one_task(ones, ones).p_value == 1.0
    sure = on_one_task(ones, zeros)
    assert (sure.difference, sure.low, sure.high, sure.p_value) == (1.0, 1.0, 1.0, 0.0)


def test_bad_input():
    with pytest.raises(DataError, match=r"task 'nq'"):
        bootstrap_over_tasks(
            {"nq": evaluation([1.0])}, {"nq": evaluation([1.0], prefix="x")}, ["R@1"]
        )
