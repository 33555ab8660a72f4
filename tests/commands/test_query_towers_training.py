"""`taser train` of models with a query tower for each task, from a tied model's checkpoint."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny_training
from tiny_models import one_block

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.train import train
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError

TASKS = ("first", "second")
T5 = one_block(vocab_size=tiny_training.VOCABULARY_SIZE, dropout_rate=0.0)
TIED = {
    "bert": dataclasses.replace(tiny_training.model_config(), experts=ExpertConfig()),
    "t5": T5DualEncoderConfig(t5=T5),
}


def q_spec(config, tasks=TASKS):
    return dataclasses.replace(config, towers=Towers.SEPARATE, query_tasks=tasks)


def start(model_dir, store, model, *, rate=3e-3, **options):
    training = tiny_training.training_config(train_steps=2, learning_rate=rate)
    return train(
        model_dir=str(model_dir),
        data=TrainingData(str(store)),
        model=model,
        training=training,
        **options,
    )


@pytest.fixture(scope="module")
def tied_dirs(tiny_store_dir, tmp_path_factory):
    """Kind of model -> directory of a tied one after two steps."""

    @functools.cache
    def make(kind):
        model_dir = tmp_path_factory.mktemp(kind) / "tied"
        start(model_dir, tiny_store_dir, TIED[kind])
        return model_dir

    return make


def towers(model_dir):
    return jax.tree.map(np.asarray, load_model(model_dir).params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", pytest.param("t5", marks=pytest.mark.release)])
def test_it_starts_as_the_tied_model_and_validates_every_task(
    tied_dirs, tiny_store_dir, tmp_path, kind
):
    tied_dir = tied_dirs(kind)
    summary = start(
        tmp_path / "q_spec",
        tiny_store_dir,
        q_spec(TIED[kind]),
        rate=1e-12,
        initial_checkpoint=str(tied_dir / "checkpoint_2"),
    )
    encoder = towers(tied_dir)["encoder"]
    for tower in towers(tmp_path / "q_spec").values():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), tower, encoder)
    lines = (tied_dir / "metrics.jsonl").read_text().splitlines()
    validated = json.loads(lines[-1])
    # Validation takes each task's tower: as copies they are judged as the tied one was.
    for name, value in summary.validation.items():
        assert value == pytest.approx(validated[f"validation/{name}"], rel=1e-4), name
    tied, several = load_model(tied_dir), load_model(tmp_path / "q_spec")
    tokens = tiny_training.TokenStore.open(tiny_store_dir).passages.tokens(np.arange(8))
    for role, task in ((Role.QUERY, "first"), (Role.QUERY, "second"), (Role.PASSAGE, None)):
        np.testing.assert_allclose(
            several.encode_fn(role, task=task)(tokens), tied.encode_fn(role)(tokens), atol=1e-5
        )


def test_a_task_without_a_tower_is_reported_before_anything_is_computed(tiny_store_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)no query tower for second.*query_tasks: first"):
        start(tmp_path / "model", tiny_store_dir, q_spec(TIED["bert"], ("first",)))
    assert not (tmp_path / "model").exists()
