"""Rows put together from others, mixes of queries, and what confidences are worth: by hand."""

import csv

import numpy as np
import pytest

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import read_results
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.tables import (
    MixedConfig,
    SpecialistUncertainty,
    auroc,
    draw_mixes,
    mix,
    pick,
    read_row,
    uncertainty_csv,
    worst_of,
    write_row,
)


def evaluation(task, values):
    ids = tuple(f"{task}{i}" for i in range(len(values)))
    return Evaluation(ids, {"R@1": np.array(values, float)})


ROWS = {
    "A": {"x": evaluation("x", [1, 1, 0, 1]), "y": evaluation("y", [0, 0])},
    "B": {"x": evaluation("x", [0, 0, 1, 0]), "y": evaluation("y", [0, 1])},
}


def test_the_worst_row_of_each_task():
    assert worst_of(ROWS, "R@1") == {"x": "B", "y": "A"}
    chosen = pick(ROWS, {"x": "A", "y": "B"})
    assert [chosen[task].averages()["R@1"] for task in ("x", "y")] == [0.75, 0.5]


def test_rows_are_written_as_if_they_had_been_evaluated(tmp_path):
    write_row(tmp_path, "Own", pick(ROWS, {"x": "A", "y": "B"}), split="test")
    [result] = read_results(tmp_path / "results")
    assert {task: found.metrics["R@1"] for task, found in result.tasks.items()} == {
        "x": 0.75,
        "y": 0.5,
    }
    again = read_row(tmp_path, "Own", ["x", "y"], split="test")
    assert again["x"].values["R@1"].tolist() == [1, 1, 0, 1]


def test_mixes_have_equal_shares_without_repetition():
    config = MixedConfig(sets=3, queries=4)
    draws = draw_mixes({"x": 4, "y": 2}, config)
    assert len(draws) == 3
    for draw in draws:
        assert [len(set(lines.tolist())) for lines in draw.values()] == [2, 2]
    assert draw_mixes({"x": 4, "y": 2}, config)[2]["x"].tolist() == draws[2]["x"].tolist()
    mixed = mix(ROWS["A"], draws)
    assert list(mixed) == ["mix 1", "mix 2", "mix 3"]
    first = draws[0]
    expected = [ROWS["A"][task].values["R@1"][line] for task in first for line in first[task]]
    assert mixed["mix 1"].values["R@1"].tolist() == expected
    assert mixed["mix 1"].query_ids[0] == f"x:x{first['x'][0]}"


@pytest.mark.parametrize(
    "config",
    [
        MixedConfig(queries=6),
        MixedConfig(queries=3),
        MixedConfig(queries=4, tasks=("x", "z")),
        MixedConfig(queries=4, sets=0),
        MixedConfig(queries=0),
    ],
)
def test_mixes_that_cannot_be_drawn(config):
    with pytest.raises(ConfigError, match="take equal shares of known tasks"):
        draw_mixes({"x": 4, "y": 2}, config)


ONE = SpecialistUncertainty(
    "A",
    ("x",),
    {"x": np.array([0.9, 0.5, 0.7]), "y": np.array([0.6, 0.2])},
    {"x": np.array([True, False, True]), "y": np.array([False, False])},
)


def test_areas_by_hand():
    assert ONE.error_auroc("x") == 1.0
    assert ONE.error_auroc("y") is None
    # Of six pairs of an own and a foreign query one is the wrong way round: .5 against .6.
    assert ONE.domain_auroc() == pytest.approx(5 / 6)
    correct = np.array([True, False, True, False])
    assert auroc(np.full(4, 0.3), correct) == 0.5


def test_areas_equal_loops_over_pairs():
    rng = np.random.default_rng(0)
    for size in (5, 60):
        confidence = rng.integers(0, 8, size) / 8
        correct = rng.random(size) < 0.5
        correct[:2] = True, False
        pairs = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a in confidence[correct]
            for b in confidence[~correct]
        ]
        assert auroc(confidence, correct) == pytest.approx(np.mean(pairs))


def test_a_line_per_specialist_and_task():
    first, second = csv.DictReader(uncertainty_csv([ONE]).splitlines())
    assert first["mean_w"] == "0.7000"
    assert first["accuracy"] == "0.6667"
    assert first["own"] == "True"
    assert (first["auroc_of_errors"], second["auroc_of_errors"]) == ("1.0000", "")
    assert second["auroc_of_own_queries"] == "0.8333"
