"""`taser pipeline ance`: its episodes, and what each starts from."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest
from small_world import TASKS, SmallWorld, figures, gin, refused, succeed
from stage_calls import check_every_argument, without_work
from tiny_training import training_config

from taser_jax.assembly.model_directory import load_model
from taser_jax.assembly.plans import MultitaskTraining, TrainingConfig
from taser_jax.commands.pipelines import ance
from taser_jax.commands.pipelines.ance import Episodes, number_episodes
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.optim.multitask import MultitaskConfig
from taser_jax.optim.tsage import TemperatureSchedule, TSageConfig, temperature_of

pytestmark = pytest.mark.slow

ROWS = ("BM25", "ANCE (warm-up)", "ANCE (episode-1)")


TWO = gin("Episodes", count=2)


def arguments(world: SmallWorld, output_dir: pathlib.Path, *bindings: str) -> list[str]:
    """Three steps of a tiny model in the warm-up and in an episode, T-SAGE in both."""
    return [
        *("pipeline", "ance", "--gin_file=runs/pipeline_ance.gin"),
        "--gin_file=optim/tsage.gin",
        *gin(DATA_DIR=world.data_dir, TOKEN_STORE=world.token_store, OUTPUT_DIR=output_dir),
        *gin("BertConfig", embed_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32),
        *gin("BertConfig", dropout_rate=0.0, attention_dropout_rate=0.0),
        *gin(WARM_UP_STEPS=3, TRAIN_STEPS=3, WARMUP_STEPS=1),
        *gin("Episodes", count=1),
        *gin("TaskBatchingConfig", total=16, num_negatives=1),
        *gin("ValidationConfig", num_batches=1, pool=None, batch_size=8),
        *gin("IndexConfig", kind="exact"),
        *gin("second/MiningConfig", choice="sample", count=20),
        *gin("MiningConfig", count=20),
        *gin("TSageConfig", median_over="nonzero"),
        *bindings,
    ]


@pytest.fixture(scope="module")
def finished(small_world, tmp_path_factory) -> pathlib.Path:
    """A finished run; tests read it, or work on a copy."""
    directory = tmp_path_factory.mktemp("ance") / "out"
    succeed(*arguments(small_world, directory))
    return directory


def test_taco_dr_is_six_uniform_episodes_and_one_of_t_sage():
    uniform, specialised = training_config(train_steps=5), training_config(train_steps=7)
    trainings = number_episodes([Episodes(uniform, count=6), Episodes(specialised)])
    steps = {number: training.loop.train_steps for number, training in trainings.items()}
    assert steps == dict.fromkeys(range(1, 7), 5) | {7: 7}


def test_the_annealed_schedule_gets_the_episode():
    """τ = 64·0.5^(a − 4) from the fourth episode on: infinite, 64, 32, 16, 8 for 3 to 7."""
    tsage = TSageConfig(temperature_schedule=TemperatureSchedule.ANNEALED)
    multitask = MultitaskTraining(TaskBatchingConfig(), MultitaskConfig(tsage=tsage))
    training = dataclasses.replace(training_config(train_steps=5), multitask=multitask)
    temperatures = [
        temperature_of(each.multitask.combiner.tsage)
        for each in number_episodes([Episodes(training, count=7)]).values()
    ]
    assert temperatures == [np.inf, np.inf, np.inf, 64, 32, 16, 8]


def _seeds(training: TrainingConfig) -> tuple[int, int, int]:
    """Of weights and dropout, and of both kinds of batches."""
    return training.seed, training.batching.seed, training.multitask.batching.seed


def _seeded(seed: int) -> TrainingConfig:
    """As `RANDOM_SEED` sets it."""
    training = training_config(train_steps=5)
    batching = dataclasses.replace(training.batching, seed=seed)
    multitask = MultitaskTraining(batching=TaskBatchingConfig(seed=seed))
    return dataclasses.replace(training, seed=seed, batching=batching, multitask=multitask)


def test_no_episode_trains_on_the_batches_of_another():
    """Batches are a function of seed and step, and steps start from 0 in every episode."""
    seeds = []
    for seed in (0, 1):
        groups = [Episodes(_seeded(seed), count=2), Episodes(_seeded(seed))]
        seeds.append(_seeds(_seeded(seed)))
        seeds += map(_seeds, number_episodes(groups).values())
    for of_kind in zip(*seeds, strict=True):
        assert len(set(of_kind)) == 8
    # A branch's episode is that of the run it branched from.
    branched = number_episodes([Episodes(_seeded(1))], after=2)
    assert {number: _seeds(training) for number, training in branched.items()} == {3: seeds[-1]}


def test_every_model_is_a_row(finished):
    assert [(line["system"], line["task"]) for line in figures(finished)] == [
        (row, task) for row in ROWS for task in (*sorted(TASKS), "average")
    ]


def test_an_episode_starts_from_the_model_before_and_its_negatives(finished):
    records = Stages(finished)
    encoded = records.record("warm-up-encode").outputs["model"]
    inputs = records.record("episode-1-train").inputs
    assert inputs["initial_checkpoint"] == "warm-up/model/checkpoint_3"
    assert inputs["data.negatives_dirs.0"] == "warm-up/negatives"
    assert load_model(finished / "warm-up" / "model").fingerprint == encoded
    facts = json.loads((finished / "episode-1" / "model" / "run.json").read_text())
    assert facts["combiner"] == "tsage"
    assert facts["batch_sizes"] == {"code": 8, "summary": 8}
    assert not (finished / "episode-1" / "negatives").exists(), "no episode follows it"


@pytest.mark.release
def test_embeddings_that_nothing_needs_go(finished, small_world, tmp_path):
    output = tmp_path / "out"
    options = gin("pipeline_ance", warm_up_dir=finished, keep_embeddings=False)
    succeed(*arguments(small_world, output, *gin(TRAIN_STEPS=2), *options, *TWO))
    assert (finished / "warm-up" / "embeddings").exists(), "another run's files stay"
    assert not (output / "episode-1" / "embeddings").exists()
    assert (output / "episode-2" / "embeddings").exists()
    models = (load_model(output / label / "model") for label in ("episode-1", "episode-2"))
    first, second = (jax.tree.leaves(model.params) for model in models)
    assert any(np.any(a != b) for a, b in zip(first, second, strict=True))


def test_embeddings_go_in_one_step(tmp_path, monkeypatch):
    """Stages that a kill leaves half of an artefact would refuse to go on with it."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "embeddings" / "queries").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(ance, "shutil", types.SimpleNamespace(rmtree=killed))
        with pytest.raises(KeyboardInterrupt):
            ance._forget_embeddings(tmp_path)
    assert not (tmp_path / "embeddings").exists()
    ance._forget_embeddings(tmp_path)


def test_refused_before_anything_is_done(finished, small_world, tmp_path, capsys):
    branch = gin("pipeline_ance", warm_up_dir=finished)
    other_mining = gin("MiningConfig", count=7) + gin("second/MiningConfig", count=7)
    for bindings, words in (
        (gin("pipeline_ance", warm_up_dir=tmp_path), "stage warm-up-encode, warm-up-mine"),
        (branch + other_mining, "mining.count 20 made its negatives"),
        (branch + gin("pipeline_ance", branch_after=1), "no finished stage episode-1-mine"),
        (gin("pipeline_ance", branch_after=1), "branch_after 1, warm_up_dir None"),
        (gin(TOP_K=50), "mining considers the first 100"),
    ):
        assert words in refused(capsys, *arguments(small_world, tmp_path / "out", *bindings))


def test_every_argument_of_every_stage_counts_and_a_branch_has_the_next_episode(
    small_world, tmp_path, monkeypatch
):
    """The stages of `pipeline ance` without their work; each argument is changed in turn."""
    monkeypatch.setattr(ance, "selected_checkpoint", "{}/checkpoint_3".format)
    monkeypatch.setattr(ance, "print_table", lambda *_, **__: None)
    whole, branch = tmp_path / "out", tmp_path / "branch"
    with monkeypatch.context() as patched:
        calls = without_work(patched)
        succeed(*arguments(small_world, whole, *TWO))
        after = gin("pipeline_ance", warm_up_dir=whole, branch_after=1)
        succeed(*arguments(small_world, branch, *after))
    assert {"train", "mine", "encode", "evaluate"} < calls.keys()
    stages = Stages(whole)
    # Each episode draws its own sample.
    labels = ("warm-up", "episode-1")
    assert [stages.record(f"{label}-mine").inputs["config.seed"] for label in labels] == [0, 1]
    check_every_argument(whole, calls)
    # Same checkpoint, negatives, batches and seeds.
    theirs, ours = (Stages(output).record("episode-2-train").inputs for output in (whole, branch))
    for name in ("initial_checkpoint", "data.negatives_dirs.0"):
        assert ours.pop(name) == f"{whole}/{theirs.pop(name)}"
    assert ours == theirs
    assert Stages(branch).finished() == {
        *(f"episode-2-{stage}" for stage in ("train", "encode", "index", "search-test")),
        "ance-episode-2-evaluate",
    }
