"""TASER's claims: what their command runs, and their intervals from values by query."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from bert_checkpoints import write_with_vocabulary
from scipy import stats
from script_calls import REPOSITORY, load_script, run_script
from small_world import figures, gin, succeed

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import SystemResult
from taser_jax.systems.muf.tables import write_row

pytestmark = pytest.mark.slow

MEASURES = ("R@1", "R@5", "R@20", "R@100")
QUESTION = '{"question": "?", "positive_ctxs": [{"title": "t", "text": "x"}]}\n'
# Row -> probability that a query has a hit.
ROWS = {
    "BM25": 0.6,
    "DPR (BM25 negatives)": 0.5,
    "DPR (mined negatives)": 0.6,
    "TASER Det-R (BM25 negatives)": 0.55,
    "TASER Det-R (mined negatives)": 0.7,
    "TASER Det-R + BM25": 0.85,
}


def write(directory: pathlib.Path, rows: dict[str, float], seed: int) -> dict[str, float]:
    """Values by query and results of a seed; row -> mean over both sets."""
    means = {}
    for number, (system, share) in enumerate(rows.items()):
        rng = np.random.default_rng([seed, number])
        tasks = {}
        for task, count in (("nq", 120), ("squad", 60)):
            hits = (rng.random(count) < share).astype(np.float64)
            ids = tuple(f"{task}{query}" for query in range(count))
            tasks[task] = Evaluation(ids, dict.fromkeys(MEASURES, hits))
        parameters = {"DPR": 1000, "TAS": 600}.get(system[:3])
        row = SystemResult(system, {}, parameters)
        write_row(directory, system, tasks, split="test", evaluated=row)
        means[system] = float(
            np.mean([evaluation.values["R@20"].mean() for evaluation in tasks.values()])
        )
    return means


def run(folder: pathlib.Path, *, seeds: str) -> tuple[list[str], str]:
    """Runs the benchmark with a stand-in for `taser`; the commands it gave and claims.md."""
    for name in ("squad/squad_split_train", "nq_qed/nq_qed_train"):
        path = folder / "source" / f"{name}.dpr.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(QUESTION.encode()))
    calls, printed = run_script(
        *("benchmarks/open_qa/claims.sh", folder / "source", folder / "out", "minilm"),
        folder=folder,
        SEEDS=seeds,
    )
    text = (folder / "out" / "claims.md").read_text()
    assert text.strip() in printed
    return calls, text


def claims_of(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """claims.md of the values that are there."""
    monkeypatch.setattr(sys, "argv", ["claims.py", str(folder / "out")])
    load_script("open_qa/claims.py").main()
    return (folder / "out" / "claims.md").read_text()


def cells(text: str, block: str, claim: str) -> list[str]:
    part = text.split(f"### {block}\n")[1].split("###")[0]
    [line] = [line for line in part.splitlines() if line.startswith(f"| {claim} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_claim_has_its_effect_and_intervals(tmp_path):
    means = [write(tmp_path / "out" / f"seed-{seed}", ROWS, seed) for seed in range(3)]
    calls, text = run(tmp_path, seeds="0 2")
    assert all("'passage': 128" in call for call in calls if call.startswith("tokenize"))
    pipelines = [call for call in calls if call.startswith("pipeline taser ")]
    assert [f"/seed-{seed} " in call for call, seed in zip(pipelines, (0, 2), strict=True)] == [
        True,
        True,
    ]
    for call, seed in zip(pipelines, (0, 2), strict=True):
        assert "--gin_file=runs/open_qa_pretrained.gin --gin.PRETRAINED=minilm" in call
        assert "--gin_file=runs/taser_claims.gin" in call
        assert call.endswith(f"--gin.PRETRAINED_LAYERS=3 --gin.RANDOM_SEED={seed}")
    assert text.startswith("TASER Det-R has 600 parameters, 0.60 of DPR's 1,000.")
    first, second = "TASER Det-R (mined negatives)", "DPR (mined negatives)"
    expected = stats.ttest_rel(
        *([seed_means[row] for seed_means in means] for row in (first, second))
    )
    interval = expected.confidence_interval(0.95)
    printed = cells(text, "R@20, average", "(a) TASER Det-R over DPR")
    effect = 100 * np.mean([seed_means[first] - seed_means[second] for seed_means in means])
    assert printed[0] == f"{effect:+.1f}"
    assert printed[3] == f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
    assert printed[4] == f"{expected.pvalue:.3f}"
    assert printed[5] == "3"
    low, high = (float(end) for end in printed[1].strip("[]").split(", "))
    assert low < effect < high
    # 120 and 60 queries; the variance of a query's difference is 0.7 * 0.3 + 0.6 * 0.4, by 3 seeds.
    error = (sum((0.21 + 0.24) / 3 / count for count in (120, 60)) / 4) ** 0.5
    assert high - low == pytest.approx(2 * 196 * error, rel=0.15)
    assert cells(text, "R@20, nq", "(c) TASER Det-R + BM25 over BM25")[5] == "3"
    assert "(b) DPR: mined negatives over BM25's" in text
    # The four numbered claims of which the rows are there; the smaller hybrid is that over Det-R.
    findings = json.loads((tmp_path / "out" / "claims.json").read_text())
    headlines = {finding["number"]: finding for finding in findings if finding["headline"]}
    assert headlines.keys() == {1, 3}
    assert headlines[1]["effect"] == pytest.approx(effect)
    assert (headlines[1]["seeds"], headlines[1]["smallest"]) == (3, 1)
    assert headlines[1]["tasks"].keys() == {"nq", "squad"}
    assert headlines[3]["rows"] == "TASER Det-R + BM25 over TASER Det-R"
    assert {finding["measure"] for finding in findings if finding["number"] == 1} == set(MEASURES)
    # Rows that are not there make no claim.
    assert "Seq-R" not in text
    assert "(c) DPR + BM25" not in text


def test_one_seed_has_no_interval_over_seeds(tmp_path, monkeypatch):
    write(tmp_path / "out" / "seed-0", ROWS, 0)
    printed = cells(claims_of(tmp_path, monkeypatch), "R@20, average", "(a) TASER Det-R over DPR")
    assert printed[3:] == ["-", "-", "1"]


def test_from_pretrained_weights_level_with_dpr_is_enough(tmp_path, monkeypatch):
    rows = {**ROWS, "Pretrained, untrained": 0.4, "Shared (BM25 negatives)": 0.5}
    rows |= {"Shared (mined negatives)": 0.6}
    for seed in range(2):
        write(tmp_path / "out" / f"seed-{seed}", rows, seed)
    text = claims_of(tmp_path, monkeypatch)
    assert cells(text, "R@20, average", "TASER Det-R over DPR, non-inferiority")[5] == "2"
    findings = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert {finding["number"] for finding in findings} == {None}
    assert findings[0]["smallest"] == -1
    assert findings[0]["command"].endswith("claims.sh SOURCE_DIR OUTPUT_DIR PRETRAINED")


@pytest.mark.release
def test_its_recipe_trains_every_router(small_world, tmp_path):
    vocabulary = small_world.root / "vocabulary"
    checkpoint = write_with_vocabulary(tmp_path / "minilm", vocabulary, num_layers=3)
    output = tmp_path / "out" / "seed-0"
    succeed(
        *("pipeline", "taser", "--gin_file=runs/open_qa_pretrained.gin"),
        "--gin_file=runs/taser_claims.gin",
        *gin(DATA_DIR=small_world.data_dir, TOKEN_STORE=small_world.token_store, TASKS=["code"]),
        *gin(OUTPUT_DIR=output, PRETRAINED=checkpoint, TRAIN_STEPS=1, WARMUP_STEPS=0),
        *gin(BATCH_SIZE=16, EVAL_PERIOD=0, CHECKPOINT_PERIOD=100),
        *gin("EvaluationConfig", judge="qrels"),
        "--gin.pipeline_taser.rounds=1",
    )
    rows = [row["system"] for row in figures(output) if row["task"] == "average"]
    systems = ("DPR", "Shared", "TASER Det-R")
    systems += ("TASER Seq-R", "TASER Seq-R, token mean", "TASER Tok-R")
    assert rows[2:8] == [f"{system} (BM25 negatives)" for system in systems]
    ran = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks/open_qa/claims.py", output.parent],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "(c) TASER Det-R + BM25 over BM25" in ran.stdout
