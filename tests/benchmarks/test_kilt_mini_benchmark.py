"""The command behind the tables of seven tasks: what it runs, and what it makes of it."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import recipes
from bert_checkpoints import write_checkpoint
from small_world import SmallWorld, gin, succeed

from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.evaluation import results
from taser_jax.optim.multitask import Combiner, NaiveConfig
from taser_jax.retrieval.mining_options import AnswerContaining, Excluded

pytestmark = pytest.mark.slow

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TASKS = ("squad", "nq_qed", "selqa", "fm2", "climate_fever", "fewrel", "cmu_dog")
# In place of `taser`: notes its arguments; a pipeline leaves results that its name and seed decide.
TASER = """#!{python} -S
import json, os, re, sys
with open({calls!r}, "a") as file:
    print(*sys.argv[1:], file=file)
flags = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
if sys.argv[1:3] == ["pipeline", "ance"]:
    out, name, seed = (flags["--gin." + key] for key in ("OUTPUT_DIR", "NAME", "RANDOM_SEED"))
    tasks = re.findall(r"'(\\w+)'", flags.get("--gin.TASKS", str({tasks!r})))
    systems = ["BM25", name + " (warm-up)"] if name == "warm-up" else [name + " (episode-1)"]
    if name == "taco-dr" and seed != "2":
        systems.append(name + " (episode-2)")
    os.makedirs(out + "/results")
    for place, system in enumerate(systems):
        value = (1 + int(seed)) / 10 + place / 100
        task = {{"metrics": {{"PageRprec": value, "Rprec": value / 2}}, "num_queries": 10}}
        result = {{"system": system, "tasks": dict.fromkeys(tasks, task), "parameters": None}}
        result |= {{"fingerprint": "", "details": {{}}, "format_version": {version}}}
        with open(out + "/results/" + str(place) + ".json", "w") as file:
            json.dump(result, file)
        if "episode" in system:
            os.makedirs(out + "/" + system.split("(")[1][:-1] + "/model")
"""


def run(folder: pathlib.Path, **environment: str) -> list[str]:
    """Runs the benchmark with a stand-in for `taser`; the commands it gave."""
    calls = folder / "calls"
    calls.touch()
    (folder / "bin").mkdir()
    taser = folder / "bin" / "taser"
    taser.write_text(
        TASER.format(
            python=sys.executable, calls=str(calls), tasks=TASKS, version=results.FORMAT_VERSION
        )
    )
    taser.chmod(0o755)
    python = pathlib.Path(sys.executable).parent
    path = os.pathsep.join([str(taser.parent), str(python), os.environ["PATH"]])
    ran = subprocess.run(
        [REPOSITORY / "benchmarks/kilt_mini/run.sh", "source", folder / "out", "minilm"],
        env=os.environ | environment | {"PATH": path, "PYTHONPATH": str(REPOSITORY)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return calls.read_text().splitlines()


def table(folder: pathlib.Path, name: str) -> dict[tuple[str, str], list[str]]:
    """(system, seed) -> the row."""
    with open(folder / "out" / f"{name}.csv") as file:
        return {(line[0], line[1]): line[2:] for line in csv.reader(file)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    folder = tmp_path_factory.mktemp("kilt_mini")
    return folder, run(folder, SEEDS="0 2", ROWS="prompts taco-dr per-task")


def test_which_commands_it_gives(ran: tuple[pathlib.Path, list[str]]):
    folder, calls = ran
    names = [call.split()[0] for call in calls]
    assert names[:4] == ["prepare", "tokenize", "tokenize", "tokenize"]
    pipelines = [call for call in calls if call.startswith("pipeline ance")]
    # Two warm-ups; two rows and seven per-task models, and the two rows of the other seed.
    assert len(pipelines) == 2 + 9 + 2
    for call in pipelines:
        assert "--gin_file=runs/kilt_mini_ance.gin" in call
        if "--gin.NAME=warm-up" not in call:
            seed = call.split("--gin.RANDOM_SEED=")[1].split()[0]
            assert f"--gin.WARM_UP_DIR={folder}/out/seed-{seed}/warm-up" in call
    [taco_dr] = [call for call in pipelines if "seed-0/taco-dr " in call]
    assert "--gin_file=runs/kilt_mini_taco_dr.gin" in taco_dr
    assert "tokens/kilt_mini_name" in taco_dr
    assert calls[-1].startswith("analyze")
    assert "taco-dr/episode-2/model" in calls[-1]


def test_the_tables_have_every_finished_row_and_its_seed(ran: tuple[pathlib.Path, list[str]]):
    folder, _ = ran
    rows = table(folder, "pages")
    assert rows.pop(("system", "seed")) == [*TASKS, "average"]
    assert {key: row[-1] for key, row in rows.items()} == {
        ("BM25", "0"): "0.100000",
        ("BM25", "2"): "0.300000",
        ("Warm-up (BM25 negatives)", "0"): "0.110000",
        ("Warm-up (BM25 negatives)", "2"): "0.310000",
        ("Per-task models", "0"): "0.100000",
        ("Naive, with prompts", "0"): "0.100000",
        ("Naive, with prompts", "2"): "0.300000",
        # Of the other seed there is no second episode yet.
        ("TACO-DR (prompts; equal weights, then T-SAGE)", "0"): "0.110000",
    }
    text = (folder / "out" / "pages.md").read_text()
    # Of 0.1 and 0.3: mean 0.2, standard deviation 0.1414.
    assert "| 20.0 ± 14.1 | 2 |" in text
    assert table(folder, "passages")["BM25", "0"][-1] == "0.050000"
    assert (folder / "out" / "passages.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_row_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(AssertionError, match="error: no row taco"):
        run(tmp_path, SEEDS="0", ROWS="taco")


def test_its_warm_up_starts_from_the_pretrained_weights(
    small_world: SmallWorld, tmp_path: pathlib.Path
):
    vocabulary = small_world.root / "vocabulary"
    # The recipe takes two of its blocks.
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 32}
    sizes["vocab_size"] = load_vocabulary(vocabulary).size
    checkpoint, _ = write_checkpoint(tmp_path / "minilm", **sizes)
    shutil.copy(vocabulary / "vocab.txt", checkpoint)
    succeed(
        *("pipeline", "ance", "--gin_file=runs/kilt_mini_ance.gin"),
        *gin(DATA_DIR=small_world.data_dir, TOKEN_STORE=small_world.token_store),
        *gin(OUTPUT_DIR=tmp_path / "out", PRETRAINED=checkpoint, JUDGE="qrels", MEASURES=["R@1"]),
        *gin(WARM_UP_STEPS=1, TRAIN_STEPS=1, WARMUP_STEPS=0, TOTAL_BATCH_SIZE=16, EVAL_STEPS=0),
        # Episodes start from the warm-up's checkpoint.
        *gin(EPISODES=[]),
    )
    record = tmp_path / "out" / "warm-up" / "model" / "run.json"
    assert json.loads(record.read_text())["pretrained"] == str(checkpoint)


TSAGE = ("runs/kilt_mini_ance.gin", "optim/tsage.gin", "runs/kilt_mini_tsage.gin")


@pytest.mark.parametrize(
    "recipe",
    [
        TSAGE,
        (*TSAGE, "runs/kilt_mini_taco_dr.gin"),
        ("runs/kilt_mini_ance.gin", "optim/pcgrad.gin"),
        ("runs/taco_dr_kilt.gin",),
    ],
)
def test_every_warm_up_is_the_plain_sum_on_negatives_without_an_answer(recipe: tuple[str, ...]):
    """A run without WARM_UP_DIR warms up as TACO-DR does, not with its episodes' optimiser."""
    setting = recipes.value("pipeline ance", "setting", *recipe)
    # "BM25 negatives (Karpukhin et al.)": no answer in them. Episodes leave out positives alone.
    assert setting.first_mining.answer_containing is AnswerContaining.DROP
    assert setting.second_mining.answer_containing is AnswerContaining.KEEP
    assert setting.second_mining.excluded is Excluded.POSITIVES
    assert setting.second_mining.count == setting.first_mining.count
    warm_up = setting.training
    assert warm_up.multitask.combiner.combiner is Combiner.NAIVE
    assert warm_up.multitask.combiner.naive == NaiveConfig()
    episodes = recipes.value("pipeline ance", "episodes", *recipe)
    assert episodes[-1].training.multitask.combiner.combiner is not Combiner.NAIVE
