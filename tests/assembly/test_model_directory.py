"""Models opened for encoding."""

import pathlib

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.model_directory import LoadedModel, embed
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.storage.errors import ConfigError

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
