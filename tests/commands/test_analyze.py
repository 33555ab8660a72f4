"""`taser analyze` on checkpoints of tiny models: what it measures and leaves, and errors."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.data import training_queries
from taser_jax.assembly.model_directory import write_run_record
from taser_jax.commands.analyze import AnalysisConfig, _task_losses, analyze
from taser_jax.data.batches.every_task import TaskBatchingConfig, TaskBatchStream
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import MeshConfig
from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.evaluation.specialty import Specialty
from taser_jax.models.batch import Normalization
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, init_params
from taser_jax.optim.median import MedianOver
from taser_jax.optim.multitask import Combiner, MultitaskConfig, build_multitask_optimizer
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints
from taser_jax.training.objective import ObjectiveConfig
from taser_jax.training.state import init_state

pytestmark = pytest.mark.slow

TASKS = ("first", "second")
STEPS = (4, 8)
BATCHING = TaskBatchingConfig(total=16, num_negatives=1)
CONFIG = AnalysisConfig(num_batches=2, median_over=MedianOver.NONZERO)


def write_model(model_dir, combiner=Combiner.NAIVE, *, steps=STEPS, correction="none"):
    """What a multi-task training leaves: parameters and optimiser states of some steps."""
    config = tiny_training.model_config()
    facts = {"data_fingerprint": "another"}
    if combiner is Combiner.TSAGE:
        facts["tsage_beta"] = 0.9
        name = "training.multitask.combiner.tsage.bias_correction"
        facts["settings"] = {name: correction}
    write_run_record(
        model_dir,
        model_config=config,
        facts=facts,
        parameter_table="",
        config_text="",
        vocabulary=None,
    )
    model = DualEncoder(config)
    settings = (MultitaskConfig(combiner), OptimizerConfig(), abstract_params(model))
    optimizer = build_multitask_optimizer(*settings, tasks=TASKS, total_steps=8)
    checkpoints = Checkpoints(model_dir, CheckpointConfig(keep_latest=len(steps)))
    for step in steps:
        state = init_state(functools.partial(init_params, model), optimizer, jax.random.key(step))
        if combiner is Combiner.TSAGE:
            state = with_average(state, np.random.default_rng(0))
        checkpoints.save(state, step=step, about={})
        checkpoints.wait()
    checkpoints.close()


def with_average(state, rng):
    """A state whose T-SAGE average is drawn."""

    def draw(path, leaf):
        if ".average" not in jax.tree_util.keystr(path):
            return leaf
        return jnp.asarray(np.exp(2 * rng.normal(size=leaf.shape)), leaf.dtype)

    opt_state = jax.tree_util.tree_map_with_path(draw, state.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("analyzed")
    write_model(root / "tsage", Combiner.TSAGE)
    write_model(root / "naive", steps=STEPS[1:])
    return root


def start(model_dirs, store_dir, output_dir, **options):
    settings = {"batching": BATCHING, "config": CONFIG, "mesh": MeshConfig(data=2, fsdp=4)}
    return analyze(
        model_dirs=model_dirs,
        token_store=str(store_dir),
        output_dir=str(output_dir),
        **(settings | options),
    )


@pytest.fixture(scope="module")
def analyzed(models, tiny_store_dir, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("analysis") / "out"
    model_dirs = {name: str(models / name) for name in ("tsage", "naive")}
    return start(model_dirs, tiny_store_dir, output_dir), output_dir


def test_the_loss_is_that_of_training_on_the_models_normalisation(tiny_store_dir):
    config = dataclasses.replace(tiny_training.model_config(), normalization=Normalization.L2)
    model, store = DualEncoder(config), TokenStore.open(tiny_store_dir)
    params = tiny_training.draw_params(model, jax.random.key(0))
    batch = TaskBatchStream(store, training_queries(store), BATCHING).batches(0)["first"]
    objective = ObjectiveConfig(temperature=0.1, matryoshka_dims=(2,))
    [loss] = _task_losses(model, ["first"], objective=objective, num_chunks=1).values()
    of_training = objective.for_model(dim=config.embedding_dim, normalization=Normalization.L2)
    expected = make_loss(model, objective=of_training, train=False)
    assert loss(params, batch) == expected(params, batch, step=jnp.int32(0), task="first")[0]


def test_counts_are_those_of_the_checkpoints_parameters_alone(analyzed):
    """Parameters are drawn by the step; tests/evaluation/test_specialty.py has the oracle."""
    totals = {(s.model, s.step): s.total for s in analyzed[0].specialties}
    assert list(totals) == [("tsage", 4), ("tsage", 8), ("naive", 8)]
    np.testing.assert_array_equal(totals["naive", 8].specialty, totals["tsage", 8].specialty)
    assert (totals["tsage", 4].specialty != totals["tsage", 8].specialty).any()
    assert min(totals["naive", 8].share(kind) for kind in Specialty) > 0.01


def test_it_leaves_tables_and_figures_with_their_data(analyzed):
    findings, directory = analyzed
    # Both steps were saved with the same average: every task-specific parameter stays.
    ((model, (row,)),) = findings.commitments.items()
    assert (model, row.earlier_step, row.step, row.rate) == ("tsage", *STEPS, 1)
    assert row.specific > 100
    figures = {"sensitivity.png", "entropy.png"}
    names = {path.name for path in directory.iterdir()}
    assert names == {"analysis.md", "analysis.json", "checksums.txt", *figures}
    for name in figures:
        assert (directory / name).read_bytes().startswith(b"\x89PNG")
    whole = json.loads((directory / "analysis.json").read_text())["specialties"][-1]
    assert (whole["model"], whole["step"]) == ("naive", 8)
    total = findings.specialties[-1].total
    assert whole["parameters"].pop("all")["specialty"] == total.specialty.tolist()
    shapes = abstract_params(DualEncoder(tiny_training.model_config()))
    assert whole["parameters"].keys() == set(leaves_by_path(shapes))
    assert sum(np.sum(leaf["specialty"]) for leaf in whole["parameters"].values()) == total.size
    text = (directory / "analysis.md").read_text()
    assert "Queries per batch: first 8, second 8." in text
    assert "| steps | tsage | noise |\n| --- | ---: | ---: |\n| 4 to 8 | 100.0 | " in text
    first, second = (f"{100 * share:.1f}" for share in total.specific_by_task())
    assert f"| naive | 8 | {first} | {second} |" in text


def test_averages_are_corrected_as_in_training(analyzed, tiny_store_dir, tmp_path):
    """After 4 steps they are a third of what the weights were taken from: fewer are specific."""
    write_model(tmp_path / "model", Combiner.TSAGE, correction="adam")
    findings = start(str(tmp_path / "model"), tiny_store_dir, tmp_path / "out")
    (corrected,), (plain,) = findings.commitments["model"], analyzed[0].commitments["tsage"]
    assert corrected.specific > 1.2 * plain.specific


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": [4, 5]}, "no checkpoint of step 5(.|\n)*some of 4, 8(.|\n)*keep_latest"),
        ({"tasks": ["first"]}, "1 of two tasks or more: first"),
        ({"tasks": ["first", "third"]}, "no task 'third'"),
        ({"batching": TaskBatchingConfig(total=20, num_negatives=1)}, "a multiple of 8"),
    ],
)
def test_what_cannot_be_analysed_is_refused_first(models, tiny_store_dir, tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        start(str(models / "tsage"), tiny_store_dir, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
