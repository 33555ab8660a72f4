"""DPR-MUF on real questions: its command, its tables, and all of it on a few passages."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from bert_checkpoints import write_with_vocabulary
from script_calls import REPOSITORY, run_script

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.results import (
    SystemResult,
    TaskResult,
    per_query_path,
    write_per_query,
    write_result,
)

pytestmark = pytest.mark.slow

TASKS = ("squad", "nq_qed", "medquad", "selqa", "scifact")
WORDS = ("river", "capital", "doctor", "planet", "music", "bridge", "winter", "engine")


def test_every_seed_runs_the_recipe(tmp_path: pathlib.Path):
    (tmp_path / "out").mkdir()
    calls, _ = run_script(
        *("benchmarks/muf/run.sh", tmp_path / "shared", tmp_path / "out", "minilm"),
        "--gin.TRAIN_STEPS=7",
        folder=tmp_path,
        SEEDS="3 4",
        DISTRACTORS="0.2",
    )
    assert [" ".join(call.split()[:2]) for call in calls] == [
        "prepare merged",
        f"tokenize --gin.DATA_DIR={tmp_path}/out/data",
        *["pipeline muf"] * 2,
    ]
    assert calls[0].endswith("--gin.MergeOptions.distractors=0.2")
    assert f"--gin.OUTPUT_DIR={tmp_path}/out/seed-3 " in calls[2]
    assert calls[3].endswith("--gin.RANDOM_SEED=4 --gin.TRAIN_STEPS=7")
    # They read the same states.
    assert all(f"--gin.STATES_DIR={tmp_path}/out/states" in call for call in calls[2:])


def write_seed(
    directory: pathlib.Path, rows: dict[str, float], names: tuple[str, ...] = ("a", "b")
) -> None:
    """A table of rows whose hits are a share of each task's ten queries."""
    ids = tuple(f"q{number}" for number in range(10))
    for system, share in rows.items():
        hits = (np.arange(10) < 10 * share).astype(np.float64)
        tasks = {
            task: Evaluation(ids, dict.fromkeys(("R@1", "R@20", "R@100"), hits)) for task in names
        }
        for task, one in tasks.items():
            write_per_query(per_query_path(directory, system, task, "test"), one)
        results = {task: TaskResult.of(one) for task, one in tasks.items()}
        write_result(directory / "results", SystemResult(system, results))
    with (directory / "domains.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["system"], *([name] for name in rows)])


def test_rows_have_their_spread_and_claims_their_intervals(tmp_path: pathlib.Path):
    write_seed(tmp_path / "seed-0", {"MUF": 0.8, "Joint": 0.5, "Equal weights": 0.6})
    write_seed(tmp_path / "seed-1", {"MUF": 0.6, "Joint": 0.5, "Equal weights": 0.6})
    (tmp_path / "seed-2").mkdir()
    command = [sys.executable, REPOSITORY / "benchmarks/muf/table.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "muf.md").read_text()
    assert text.startswith("2 seeds.")
    # Mean of 80 and 60, standard deviation of two values 20 apart.
    assert "| MUF | 70.0 ± 14.1 | 70.0 ± 14.1 | 70.0 ± 14.1 |" in text
    assert "| Joint | 50.0 ± 0.0 |" in text
    assert "| MUF over Joint | +20.0 |" in text
    equal = "Weights by uncertainty are better than equal weights"
    assert f"| 6. {equal} | +10.0 |" in text
    assert "Oracle" not in text
    findings = json.loads((tmp_path / "claims.json").read_text())
    effects = {(one["text"], one["measure"]): round(one["effect"], 6) for one in findings}
    assert effects == {
        (text, measure): effect
        for measure in ("R@1", "R@20", "R@100")
        for text, effect in (("MUF over Joint", 20.0), (equal, 10.0))
    }
    assert [(one["number"], one["measure"]) for one in findings if one["headline"]] == [(6, "R@1")]
    # No joint model without each domain is there.
    assert not any(one["number"] == 5 for one in findings)


def test_claim_5_compares_each_domain_with_the_joint_model_that_has_not_seen_it(
    tmp_path: pathlib.Path,
):
    domains = {
        "squad": ("SQuAD", 0.1),
        "nq_qed": ("NQ", 0.2),
        "medquad": ("MedQuAD", 0.3),
        "fewrel": ("FewRel", 0.4),
        "cmu_dog": ("CMU DoG", 0.5),
    }
    joints = {f"Joint without {name}": share for name, share in domains.values()}
    write_seed(tmp_path / "seed-0", {"MUF": 0.9, **joints}, (*domains, "selqa"))
    command = [sys.executable, REPOSITORY / "benchmarks/muf/table.py", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    findings = json.loads((tmp_path / "claims.json").read_text())
    headlines = [one for one in findings if one["headline"]]
    assert [(one["number"], one["measure"]) for one in headlines] == [(5, "R@1"), (5, "R@20")]
    for one in headlines:
        assert one["effect"] == pytest.approx(60.0)
        assert one["tasks"] == pytest.approx(
            {task: 100 * (0.9 - share) for task, (_, share) in domains.items()}
        )


@pytest.mark.release
def test_all_of_it_on_a_few_questions(tmp_path: pathlib.Path):
    shared = tmp_path / "shared"
    write_shared(shared)
    (tmp_path / "vocabulary").mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    numbers = [*map(str, range(100)), "about", "?"]
    (tmp_path / "vocabulary" / "vocab.txt").write_text("\n".join([*special, *WORDS, *numbers]))
    checkpoint = write_with_vocabulary(tmp_path / "minilm", tmp_path / "vocabulary", num_layers=6)
    steps = [f"--gin.{name}/System.train_steps=2" for name in (*TASKS, "less")]
    command = [
        *(REPOSITORY / "benchmarks/muf/run.sh", shared, tmp_path / "out", checkpoint, *steps),
        *("--gin.TRAIN_STEPS=2", "--gin.WARMUP_STEPS=1", "--gin.BATCH_SIZE=8"),
        *("--gin.EnsembleTraining.epochs=1", "--gin.EnsembleConfig.members=3"),
        *("--gin.Fusion.sizes=(2,)", "--gin.MixedConfig.queries=16"),
        *("--gin.TrainingConfig.length_buckets=(8,)", "--gin.first/MiningConfig.depth=20"),
        *("--gin.FusionConfig.depth=50", "--gin.ConfidenceConfig.k=50"),
        *("--gin.BayesianConfig.evaluations=4", "--gin.BayesianConfig.initial=2"),
    ]
    environment = {"SEEDS": "0", "PASSAGE_LENGTH": "8"}
    binaries = pathlib.Path(sys.executable).parent
    for _ in range(2):
        ran = subprocess.run(
            command,
            env={**os.environ, **environment, "PATH": f"{binaries}:{os.environ['PATH']}"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
    # The second time nothing was left to do.
    assert "squad-train: reused" in ran.stderr
    text = (tmp_path / "out" / "muf.md").read_text()
    assert "| MUF over Joint |" in text
    assert "| MUF over Oracle Bayesian |" in text
    assert (tmp_path / "out" / "seed-0" / "costs.md").exists()
    judged = (tmp_path / "out" / "seed-0" / "domains.csv").read_text()
    assert all(f",{task}," in judged for task in TASKS)


def write_shared(root: pathlib.Path) -> None:
    """kilt_mini's files and two BEIR folders, of a word and a number for each passage."""
    texts = [f"{word} {number}" for word in WORDS[:5] for number in range(60)]
    rows = [f"{i}\t{text} about {text}\t{text}\t{i}\t1" for i, text in enumerate(texts)]
    header = "id\ttext\ttitle\twikipedia_id\tparagraph_id"
    write(root / "kilt_mini/passages.tsv.gz", [header, *rows])
    for place, name in enumerate(
        ("squad-train", "squad-dev", "nq_qed-train", "nq_qed-dev", "selqa-dev")
    ):
        lines = [
            {
                "id": f"{name}-{i}",
                "input": f"{texts[i]} ?",
                "output": [
                    {
                        "answer": texts[i],
                        "provenance": [{"wikipedia_id": str(i), "passage_id": str(i)}],
                    }
                ],
            }
            for i in range(60 * place, 60 * place + 60)
        ]
        write(root / f"kilt_mini/{name}.jsonl.gz", map(json.dumps, lines))
    for place, name in enumerate(("medquad", "scifact")):
        word = WORDS[5 + place]
        ids = [f"{name}{i}" for i in range(60)]
        corpus = [{"_id": id, "title": "", "text": f"{word} {i} about"} for i, id in enumerate(ids)]
        queries = [{"_id": id, "text": f"{word} {i} ?"} for i, id in enumerate(ids)]
        write(root / f"beir/{name}/corpus.jsonl.gz", map(json.dumps, corpus))
        write(root / f"beir/{name}/queries.jsonl.gz", map(json.dumps, queries))
        for split, some in (("train", ids[:50]), ("test", ids[50:])):
            judged = [f"{id}\t{id}\t1" for id in some]
            path = root / f"beir/{name}/qrels/{split}.tsv.gz"
            write(path, ["query-id\tcorpus-id\tscore", *judged])


def write(path: pathlib.Path, lines) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
