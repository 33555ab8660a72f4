"""Paired tests of two systems over queries, against a loop."""

import numpy as np
import pytest

from taser_jax.commands.evaluate import write_table
from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import read_results
from taser_jax.evaluation.significance import (
    AVERAGE,
    SignificanceConfig,
    TaskQueries,
    bootstrap_over_mixes,
    bootstrap_over_tasks,
    compare_with_baselines,
    resampled_means,
)
from taser_jax.storage.errors import DataError
from taser_jax.systems.muf.tables import write_row


def evaluation(values, measure="R@1"):
    ids = tuple(f"q{number}" for number in range(len(values)))
    return Evaluation(ids, {measure: np.asarray(values, np.float64)})


def on_one_task(first, second, resamples=10_000):
    compared = bootstrap_over_tasks({"nq": first}, {"nq": second}, ["R@1"], resamples=resamples)
    return compared["nq", "R@1"]


def test_paired_bootstrap():
    rng = np.random.default_rng(0)
    first, second = (evaluation(rng.random(200) < share) for share in (0.7, 0.5))
    result = on_one_task(first, second, resamples=2000)
    difference = first.values["R@1"] - second.values["R@1"]
    # The normal approximation is the oracle: 200 bounded differences are close to it.
    half = 1.96 * difference.std() / np.sqrt(200)
    assert result.difference == pytest.approx(difference.mean())
    assert result.low == pytest.approx(difference.mean() - half, abs=0.02)
    assert result.high == pytest.approx(difference.mean() + half, abs=0.02)
    assert result.p_value < 0.01
    assert on_one_task(first, first, resamples=100).p_value == 1
    sure = on_one_task(evaluation(np.ones(30)), evaluation(np.zeros(30)))
    assert (sure.difference, sure.low, sure.high, sure.p_value) == (1.0, 1.0, 1.0, 0.0)
    assert on_one_task(first, second, resamples=2000) == result
    with pytest.raises(DataError, match=r"task 'nq'(.|\n)*different queries"):
        on_one_task(first, Evaluation(first.query_ids[::-1], first.values))


def test_resampled_means_are_those_of_drawn_rows():
    """Every sample by a loop over its rows, from the same generator; columns share samples."""
    values = np.random.default_rng(1).normal(size=(23, 3))
    means = resampled_means(values, 600, 7)
    rng = np.random.default_rng(7)
    expected = []
    for size in (256, 256, 88):
        expected += [values[rows].mean(axis=0) for rows in rng.integers(0, 23, (size, 23))]
    np.testing.assert_allclose(means, expected, rtol=1e-12)


def test_the_mean_over_tasks_counts_each_task_once():
    """Variance of a mean of independent task means: the sum of theirs, by the number squared."""
    rng = np.random.default_rng(2)
    sizes = {"large": 900, "small": 40}
    first, second = (
        {task: evaluation(rng.random(size)) for task, size in sizes.items()} for _ in range(2)
    )
    compared = bootstrap_over_tasks(first, second, ["R@1"])
    differences = {task: first[task].values["R@1"] - second[task].values["R@1"] for task in sizes}
    for task, of_task in differences.items():
        assert compared[task, "R@1"].difference == pytest.approx(of_task.mean())
    means = [values.mean() for values in differences.values()]
    variance = sum(values.var() / len(values) for values in differences.values()) / 4
    comparison = compared[AVERAGE, "R@1"]
    assert comparison.difference == pytest.approx(np.mean(means))
    assert comparison.high - comparison.low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.05)
    # What a task draws does not depend on the tasks beside it.
    alone = bootstrap_over_tasks({"small": first["small"]}, {"small": second["small"]}, ["R@1"])
    assert alone["small", "R@1"] == compared["small", "R@1"]


def test_mixes_of_the_same_queries_say_no_more_than_one_of_them():
    rng = np.random.default_rng(3)
    first, second = (evaluation(rng.random(60)) for _ in range(2))
    alone = on_one_task(first, second)
    five = ({f"mix {n}": own for n in range(5)} for own in (first, second))
    same = bootstrap_over_mixes(*five, ["R@1"])[AVERAGE, "R@1"]
    assert same.difference == pytest.approx(alone.difference)
    assert same.high - same.low == pytest.approx(alone.high - alone.low, rel=0.05)

    def halves(own):
        values = own.values["R@1"]
        return {str(n): Evaluation(own.query_ids[n::2], {"R@1": values[n::2]}) for n in range(2)}

    # Of queries that mixes do not share, the mean is over all of them.
    apart = bootstrap_over_mixes(halves(first), halves(second), ["R@1"])[AVERAGE, "R@1"]
    assert apart.difference == pytest.approx(alone.difference)
    assert apart.high - apart.low == pytest.approx(alone.high - alone.low, rel=0.05)


def test_a_task_without_a_measure_has_no_part_in_its_mean():
    pages = evaluation([1.0, 0.0], "PageRprec")
    both = Evaluation(("a",), {"R@1": np.ones(1), "PageRprec": np.zeros(1)})
    zero = Evaluation(("a",), {"R@1": np.zeros(1), "PageRprec": np.zeros(1)})
    compared = bootstrap_over_tasks(
        {"aida": pages, "nq": both}, {"aida": pages, "nq": zero}, ["R@1", "PageRprec"]
    )
    assert ("aida", "R@1") not in compared
    assert compared[AVERAGE, "R@1"].difference == 1.0
    assert compared[AVERAGE, "PageRprec"].difference == 0.0


MEASURES = ("R@1", "R@20")


def drawn(share, count, seed):
    rng = np.random.default_rng(seed)
    values = {name: (rng.random(count) < share).astype(np.float64) for name in MEASURES}
    return Evaluation(tuple(f"q{number}" for number in range(count)), values)


def compared(directory, baseline="BM25", **options):
    options |= {"split": "test", "config": SignificanceConfig(baseline)}
    results = read_results(directory / "results")
    return next(iter(compare_with_baselines(directory, results, **options)), None)


@pytest.fixture
def rows(tmp_path):
    """BM25 and TASER on two tasks, a model of one task on one of them; written to `tmp_path`."""
    rows = {
        "BM25": {"nq": drawn(0.5, 300, 0), "squad": drawn(0.7, 60, 1)},
        "TASER": {"nq": drawn(0.7, 300, 2), "squad": drawn(0.7, 60, 3)},
        "nq alone": {"nq": drawn(0.6, 300, 4)},
    }
    for system, tasks in rows.items():
        write_row(tmp_path, system, tasks, split="test")
    return rows


def test_every_row_is_tested_on_the_tasks_it_shares(rows, tmp_path):
    comparisons = compared(tmp_path)
    assert comparisons.baseline == "BM25"
    assert {key[:2] for key in comparisons.queries} == {
        *(("TASER", task) for task in ("nq", "squad", AVERAGE)),
        # Its average would be of other tasks than the baseline's.
        ("nq alone", "nq"),
    }
    effect = comparisons.queries["TASER", "nq", "R@1"]
    by_hand = rows["TASER"]["nq"].values["R@1"].mean() - rows["BM25"]["nq"].values["R@1"].mean()
    assert effect.difference == pytest.approx(by_hand)
    assert effect.low < by_hand < effect.high


def test_the_table_shows_difference_interval_and_p(rows, tmp_path):
    table = write_table(tmp_path)
    effect = compared(tmp_path).queries["TASER", "nq", "R@1"]
    points = [f"{100 * value:+.1f}" for value in (effect.difference, effect.low, effect.high)]
    assert effect.p_value < 0.001
    cell = f"{points[0]} [{points[1]}, {points[2]}] p < 0.001"
    markdown = (tmp_path / "table.md").read_text()
    assert "Difference from BM25, 95% interval and p over queries:" in markdown
    assert f"| TASER | {cell} |" in markdown
    assert "Difference from BM25" in table.to_text()
    # BM25 is not compared with itself, and the model of one task has no average to compare.
    average = markdown.split("Difference from BM25", 1)[1].split("###", 1)[0]
    shown = [name in average for name in ("| BM25 |", "| TASER |", "| nq alone |")]
    assert shown == [False, True, False]
    write_table(tmp_path, significance=SignificanceConfig(more_baselines=("TASER", "no row")))
    markdown = (tmp_path / "table.md").read_text()
    assert markdown.index("Difference from BM25") < markdown.index("Difference from TASER")
    points = [f"{-100 * value:+.1f}" for value in (effect.difference, effect.high, effect.low)]
    assert f"| BM25 | {points[0]} [{points[1]}, {points[2]}] p < 0.001 |" in markdown
    (tmp_path / "table.png").unlink()
    write_table(tmp_path, significance=None)
    assert "Difference" not in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "table.png").exists()


def test_the_plot_draws_differences_and_intervals_of_averages(rows, tmp_path):
    table = write_table(tmp_path, significance=SignificanceConfig(more_baselines=("TASER",)))
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    figure = table.plot()
    assert [axis.get_title() for axis in figure.axes] == list(MEASURES)
    of_bm25, of_taser = figure.axes[0].containers
    effect = compared(tmp_path).queries["TASER", AVERAGE, "R@1"]
    (segment,) = of_bm25.lines[2][0].get_segments()
    np.testing.assert_allclose(segment[:, 0], [100 * effect.low, 100 * effect.high])
    # Rows are BM25, the model of one task, TASER.
    assert of_bm25.lines[0].get_xydata().tolist() == [[100 * effect.difference, 2]]
    assert of_taser.lines[0].get_xdata() == pytest.approx([-100 * effect.difference])


def test_rows_of_other_queries_are_refused_by_name(rows, tmp_path):
    fewer = {"nq": drawn(0.7, 299, 2), "squad": rows["TASER"]["squad"]}
    write_row(tmp_path, "TASER", fewer, split="test")
    told = "rows 'TASER' and 'BM25', task 'nq'.*different queries: 1 are .* such as 'q299'"
    with pytest.raises(DataError, match=f"(?s){told}"):
        compared(tmp_path)


@pytest.mark.parametrize(
    ("queries", "bootstrap"),
    [(TaskQueries.OWN, bootstrap_over_tasks), (TaskQueries.MIXED, bootstrap_over_mixes)],
)
def test_a_table_of_mixes_has_their_intervals_and_another_its_tasks(tmp_path, queries, bootstrap):
    mixes = ("mix 1", "mix 2")
    baseline, row = (dict.fromkeys(mixes, drawn(*each)) for each in ((0.5, 100, 4), (0.7, 100, 5)))
    for system, tasks in (("BM25", baseline), ("TASER", row)):
        write_row(tmp_path, system, tasks, split="test")
    found = compared(tmp_path, queries=queries).queries["TASER", AVERAGE, "R@1"]
    assert found == bootstrap(row, baseline, MEASURES)[AVERAGE, "R@1"]


def test_a_baseline_that_is_no_row_yet(rows, tmp_path, caplog):
    assert compared(tmp_path, baseline="DPR") is None
    assert "baseline 'DPR' is not a row (BM25, nq alone, TASER)" in caplog.text
