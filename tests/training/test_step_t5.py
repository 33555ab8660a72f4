"""Step, chunking, sharding and optimiser with T5 and a query encoder for each task."""

import jax
import numpy as np
import pytest
from tiny_encoder import T5, adamw, make_batch, on_mesh

from taser_jax.devices.mesh import MeshConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.training.step import make_train_step

pytestmark = pytest.mark.slow

MODEL = DualEncoder(T5DualEncoderConfig(t5=T5, towers=Towers.SEPARATE, query_tasks=("nq", "fever")))
# One position attends to itself alone; key and query of its self-attention say nothing.
UNUSED = ("self_attention/query/kernel", "self_attention/key/kernel", "decoder/relpos_bias")


def test_sharded_chunked_steps_train_one_tasks_towers():
    optimizer = adamw(MODEL)
    mesh = MeshConfig(data=2, fsdp=2, model=2)
    partitioner, state, shardings = on_mesh(MODEL, optimizer, mesh)
    before = jax.tree.map(np.asarray, state.params)
    step = make_train_step(MODEL, optimizer, num_chunks=2, state_shardings=shardings)
    batch = jax.device_put(make_batch(16), partitioner.batch_sharding)
    losses = []
    for _ in range(3):
        state, metrics = step(state, {"nq": batch})
        losses.append(float(metrics["nll"]))
    assert not metrics["skipped_total"]
    assert losses[2] < losses[0]
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), before, state.params)
    assert not any(jax.tree.leaves(moved["query_encoder_fever"]))
    for tower in ("query_encoder_nq", "passage_encoder"):
        leaves = jax.tree_util.tree_leaves_with_path(moved[tower])
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        still = [name for name, (_, moves) in zip(names, leaves, strict=True) if not moves]
        assert all(any(part in name for part in UNUSED) for name in still), still
        assert len(still) == 3
    with pytest.raises(ConfigError, match="a query of task 'wow'"):
        step(state, {"wow": batch})
