"""DPR-MUF on real questions: its command, its tables, and its figures by hand."""

from __future__ import annotations

import csv
import importlib
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from script_calls import REPOSITORY, run_script

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import SystemResult
from taser_jax.systems.muf.tables import write_row

pytestmark = pytest.mark.slow


@pytest.mark.release
def test_every_seed_runs_the_recipe(tmp_path: pathlib.Path):
    (tmp_path / "out").mkdir()
    calls, _ = run_script(
        *("benchmarks/muf/run.sh", tmp_path / "shared", tmp_path / "out", "minilm"),
        "--gin.TRAIN_STEPS=7",
        folder=tmp_path,
        SEEDS="3 4",
        STEPS="20",
        DISTRACTORS="0.2",
    )
    assert [" ".join(call.split()[:2]) for call in calls] == [
        "prepare --gin_file=runs/muf_mini_prepare.gin",
        f"tokenize --gin.DATA_DIR={tmp_path}/out/data",
        *["pipeline muf"] * 2,
    ]
    assert calls[0].endswith("--gin.PrepareOptions.distractors=0.2")
    assert f"--gin.OUTPUT_DIR={tmp_path}/out/seed-3 " in calls[2]
    # The joint model sees as many queries as five specialists; a later binding wins.
    steps = "--gin.TRAIN_STEPS=20 --gin.JOINT_STEPS=100 --gin.TRAIN_STEPS=7"
    assert calls[3].endswith(f"--gin.RANDOM_SEED=4 {steps}")
    # They read the same states.
    assert all(f"--gin.STATES_DIR={tmp_path}/out/states" in call for call in calls[2:])


def write_seed(directory: pathlib.Path, rows: dict[str, float], auroc: float) -> None:
    """A table of rows whose hits are a share of two tasks' ten queries, and one specialist's w."""
    ids = tuple(f"q{number}" for number in range(10))
    for system, share in rows.items():
        hits = (np.arange(10) < 10 * share).astype(np.float64)
        measures = dict.fromkeys(("R@1", "R@20", "R@100"), hits)
        tasks = {task: Evaluation(ids, measures) for task in ("a", "b")}
        row = SystemResult(system, {}, parameters=1000)
        write_row(directory, system, tasks, split="test", evaluated=row)
    with (directory / "domains.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["system"], *([name] for name in rows)])
    lines = ["specialist,task,own,auroc_of_errors,auroc_of_own_queries", f"A,a,True,,{auroc}"]
    (directory / "uncertainty.csv").write_text("\n".join([*lines, "A,b,False,0.9,0.1"]) + "\n")


def test_rows_have_their_spread_and_claims_their_intervals(tmp_path: pathlib.Path):
    unseen = "Joint without the domain"
    rows = {"MUF": 0.8, "Joint": 0.5, "Equal weights": 0.6, unseen: 0.3}
    write_seed(tmp_path / "seed-0", rows, auroc=0.5)
    write_seed(tmp_path / "seed-1", {**rows, "MUF": 0.6}, auroc=0.7)
    (tmp_path / "seed-2").mkdir()
    command = [sys.executable, REPOSITORY / "benchmarks/muf/table.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "muf.md").read_text()
    assert text.startswith("2 seeds.")
    # Mean of 80 and 60, standard deviation of two values 20 apart.
    assert "| MUF | 70.0 ± 14.1 | 70.0 ± 14.1 | 70.0 ± 14.1 |" in text
    assert "| Joint | 50.0 ± 0.0 |" in text
    assert "| MUF over Joint | +20.0 |" in text
    # Of its own task's line alone, where the AUROC of errors is undefined.
    assert "| A | 0.60 ± 0.14 | - |" in text
    assert "| MUF | 1,000 |" in text
    claims = json.loads((tmp_path / "claims.json").read_text())
    found = [
        (one["number"], one["rows"], one["measure"], round(one["effect"], 6), one["headline"])
        for one in claims
        if one["measure"] == "R@20"
    ]
    assert found == [
        (5, f"MUF over {unseen}", "R@20", 40.0, True),
        (6, "MUF over Equal weights", "R@20", 10.0, False),
        (None, "MUF over Joint", "R@20", 20.0, False),
    ]
    assert {one["seeds"] for one in claims} == {2}
    assert "Oracle" not in text


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    """Makes the benchmark's scripts modules."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks/muf"))
    names = ("figures", "finished_run", "uncertainty")
    yield [importlib.import_module(name) for name in ("figures", "uncertainty")]
    for name in names:
        sys.modules.pop(name, None)


def test_risk_by_coverage_and_shared_queries_by_hand(scripts):
    figures, _ = scripts
    risk = figures.risk_coverage(np.array([0.2, 0.9, 0.5]), np.array([False, True, False]))
    np.testing.assert_allclose(risk, [0, 1 / 2, 2 / 3])
    rng = np.random.default_rng(0)
    confidence, correct = rng.integers(0, 8, 60) / 8, rng.random(60) < 0.5
    order = sorted(range(60), key=lambda place: (-confidence[place], place))
    expected = [1 - correct[order[: n + 1]].mean() for n in range(60)]
    np.testing.assert_allclose(figures.risk_coverage(confidence, correct), expected)
    weights = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    np.testing.assert_allclose(figures.effective_specialists(weights), [2, 1, 3])


def test_areas_by_hand_and_by_loops_over_pairs(scripts):
    _, uncertainty = scripts
    specialist = uncertainty.SpecialistUncertainty(
        "A",
        ("x",),
        {"x": np.array([0.9, 0.5, 0.7]), "y": np.array([0.6, 0.2])},
        {"x": np.array([True, False, True]), "y": np.array([False, False])},
    )
    assert specialist.error_auroc("x") == 1.0
    assert specialist.error_auroc("y") is None
    # Of six pairs of an own and a foreign query one is the wrong way round: .5 against .6.
    assert specialist.domain_auroc() == pytest.approx(5 / 6)
    first, second = csv.DictReader(uncertainty.uncertainty_csv([specialist]).splitlines())
    assert (first["mean_w"], first["accuracy"], first["own"]) == ("0.7000", "0.6667", "True")
    assert (first["auroc_of_errors"], second["auroc_of_errors"]) == ("1.0000", "")
    assert second["auroc_of_own_queries"] == "0.8333"
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
        assert uncertainty.auroc(confidence, correct) == pytest.approx(np.mean(pairs))
