"""The yardstick: what its command runs, what its table says, and its recipe on a small world."""

import json

import pytest
import recipes
from bert_checkpoints import write_checkpoint
from script_calls import load_script, run_script, write_hits
from written_files import beir, write

from taser_jax.commands.pipelines.retrieval_stages import row_name
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, parameter_count

pytestmark = pytest.mark.slow

TASKS = ("squad", "nq_qed", "fm2", "selqa", "climate_fever", "fewrel", "cmu_dog")
TASER = "TASER (negatives of BM25 and MiniLM, untrained)"


def run(folder, *options, script="run.sh", **environment):
    """Runs a script with a stand-in for `taser`: the commands it gave, and what it printed."""
    words = (f"benchmarks/yardstick/{script}", folder / "source", folder / "out", "minilm")
    return run_script(*words, *options, folder=folder, **environment)


def hits(folder, system, *counts, parameters=None):
    """A row of so many of ten queries by task."""
    of_tasks = dict(zip(TASKS, counts, strict=True))
    write_hits(folder, system, of_tasks, measures=["R@20"], parameters=parameters)


def test_it_runs_the_recipe_and_prints_the_table(tmp_path):
    hits(tmp_path / "out/comparison", "BM25", 9, 8, 7, 6, 5, 4, 3)
    hits(tmp_path / "out/comparison", TASER, 10, 10, 10, 10, 10, 10, 3, parameters=1000)
    calls, printed = run(tmp_path, "--gin.TRAIN_STEPS=20")
    assert [call.split()[0] for call in calls] == ["prepare", "tokenize", "pipeline"]
    assert f"--gin.SOURCE_DIR={tmp_path}/source/kilt_mini" in calls[0]
    assert "'passage': 256" in calls[1]
    assert "--gin_file=runs/yardstick.gin" in calls[2]
    assert "--gin.PRETRAINED=minilm " in calls[2]
    assert calls[2].endswith("/out/states' --gin.TRAIN_STEPS=20")
    lines = (tmp_path / "out/yardstick.md").read_text().splitlines()
    assert lines[2] == "| BM25 | - | 90.0 | 80.0 | 70.0 | 60.0 | 50.0 | 40.0 | 30.0 | 60.0 |"
    assert lines[3].startswith(f"| {TASER} | 1,000 | 100.0 |")
    assert lines[3].endswith("| 30.0 | 90.0 |")
    assert lines[4].endswith("| 62.0 | 90.0 |")
    assert "\n".join(lines) in printed
    assert f"{tmp_path}/out/comparison/taser-1/model" in printed


def test_beir_sets_are_parted_and_scored_as_the_models_are_and_trained(tmp_path):
    judged = [f"q{number}\tp{number}\t1" for number in range(40)]
    source = tmp_path / "source/beir/scifact"
    files = {"train": judged, "test": ["t0 p0 1"], "ending": ".gz"}
    beir(source, corpus={"p0": "x"}, queries={"q0": "?"}, **files)
    comparison = tmp_path / "out/beir/scifact/comparison"
    write(comparison / "table.md", "the table\n")
    calls, printed = run(tmp_path, script="beir.sh", SETS="scifact")
    parted = tmp_path / "out/beir/scifact/source"
    # sha256("qN"), first 8 bytes, divisible by 10; found with hashlib alone.
    held_out = [judged[number] for number in (9, 14, 24, 25)]
    kept = [line for line in judged if line not in held_out]
    for split, lines in {"dev": held_out, "train": kept, "test": ["t0\tp0\t1"]}.items():
        expected = ["query-id\tcorpus-id\tscore", *lines]
        assert (parted / "qrels" / f"{split}.tsv").read_text().splitlines() == expected
    assert (parted / "corpus.jsonl.gz").samefile(source / "corpus.jsonl.gz")
    assert [call.split()[0] for call in calls] == [
        *("prepare", "tokenize", "pipeline", *["encode", "search", "evaluate"] * 2)
    ]
    assert f"--gin.OUTPUT_DIR={comparison} " in calls[2]
    assert f"--gin.MODEL_DIR={tmp_path}/out/comparison/shared-1/model" in calls[3]
    assert calls[-1].endswith(f"--gin.SYSTEM=TASER, zero-shot --gin.EVAL_OUTPUT_DIR={comparison}")
    assert "the table" in printed


def test_claim_11_is_about_the_worst_task(tmp_path):
    hits(tmp_path / "out/comparison", "BM25", *[5] * 7)
    hits(tmp_path / "out/comparison", TASER, 9, 8, 7, 6, 9, 8, 7)
    run(tmp_path)
    findings = json.loads((tmp_path / "out" / "claims.json").read_text())
    [worst] = [finding for finding in findings if finding["headline"]]
    assert (worst["number"], worst["rows"]) == (11, "TASER over BM25, selqa")
    assert (worst["effect"], worst["tasks"]) == (pytest.approx(10.0), {"selqa": worst["effect"]})
    [other] = [finding for finding in findings if not finding["headline"]]
    assert (other["text"], other["effect"]) == ("TASER over BM25", pytest.approx(190 / 7))
    table = (tmp_path / "out" / "yardstick.md").read_text()
    assert "| 11. One fine-tuned retriever reaches BM25 on every task | +10.0 |" in table


def test_its_recipe_has_the_rows_of_the_table(tmp_path):
    checkpoint, _ = write_checkpoint(tmp_path, num_hidden_layers=6)

    def value(parameter):
        files = ("runs/yardstick.gin",)
        return recipes.value("pipeline taser", parameter, *files, PRETRAINED=str(checkpoint))

    systems, untrained = value("systems"), value("untrained_systems")
    dense = {row_name(name, value("rounds"), value("first_negatives")) for name in systems}
    hybrid = {f"{name} + BM25" for name in value("hybrid_systems")}
    assert {"BM25", *untrained, *dense, *hybrid} == set(load_script("yardstick/table.py").ROWS)
    sizes = {
        name: parameter_count(abstract_params(DualEncoder(system.model)))
        for name, system in systems.items()
    }
    assert sizes["TASER"] > sizes["Shared"]
