"""Models opened for encoding."""

import pathlib

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.model_directory import LoadedModel, embed, selected_checkpoint
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.storage.errors import ConfigError
from taser_jax.training.checkpoints import Checkpoints
from taser_jax.training.state import TrainState

TOKENS = Tokens(np.full((8, 4), 7, np.int32), np.ones((8, 4), bool))


def loaded(**changes) -> LoadedModel:
    model = DualEncoder(DualEncoderConfig(bert=tiny_training.model_config().bert, **changes))
    return LoadedModel(
        model=model,
        params=tiny_training.draw_params(model, jax.random.key(0)),
        fingerprint="",
        vocabulary_dir=pathlib.Path(),
        step=0,
        partitioner=Partitioner(make_mesh(MeshConfig())),
    )


def test_one_encoder_for_all_tasks_is_compiled_once():
    model = loaded()
    first = model.encode_fn(Role.QUERY, task="nq")(TOKENS)
    compiled = embed._cache_size()
    second = model.encode_fn(Role.QUERY, task="fever")(TOKENS)
    assert embed._cache_size() == compiled
    np.testing.assert_array_equal(first, second)


def test_an_encoder_for_each_task_is_asked_for_by_name():
    model = loaded(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))
    model.params["query_encoder_fever"] = jax.tree.map(
        lambda leaf: leaf + 1, model.params["query_encoder_fever"]
    )
    by_task = [model.encode_fn(Role.QUERY, task=task)(TOKENS) for task in ("nq", "fever")]
    assert np.abs(np.subtract(*by_task)).max() > 1e-3
    with pytest.raises(ConfigError, match="without a task"):
        model.encode_fn(Role.QUERY)(TOKENS)


def test_reading_leaves_the_save_of_a_running_training_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    state = TrainState(step=jax.numpy.int32(1), params={"w": jax.numpy.ones(2)}, opt_state=())
    checkpoints.save(state, step=1, about={})
    checkpoints.wait()
    unfinished = tmp_path / "checkpoint_2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert selected_checkpoint(tmp_path).name == "checkpoint_1"
    assert unfinished.is_dir()
    checkpoints.close()
