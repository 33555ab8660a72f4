"""The same losses on any number of devices and any mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_encoder import BERT, adamw, make_batch, on_mesh

from taser_jax.devices.mesh import MeshConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.stack import Scan
from taser_jax.training.step import make_train_step

pytestmark = pytest.mark.slow

# Dropout and routing noise are on: they must not depend on the mesh either.
NOISY = dataclasses.replace(BERT, dropout_rate=0.1, attention_dropout_rate=0.1)
EXPERTS = ExpertConfig(num_experts=2, blocks=(1,), routing=Routing.TOKEN)
MODEL = DualEncoder(DualEncoderConfig(NOISY, EXPERTS))
STEPS = 3


def losses(config, num_devices, model=MODEL):
    optimizer = adamw(model)
    partitioner, state, shardings = on_mesh(model, optimizer, config, num_devices)
    step = make_train_step(model, optimizer, state_shardings=shardings)
    found = []
    with jax.set_mesh(partitioner.mesh):
        for number in range(STEPS):
            state, metrics = step(state, {"nq": partitioner.put_batch(make_batch(16, seed=number))})
            found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(found), state


@pytest.fixture(scope="module")
def on_one_device():
    return losses(MeshConfig(), 1)[0]


@pytest.mark.parametrize(
    ("config", "num_devices"),
    [
        pytest.param(MeshConfig(), 2, marks=pytest.mark.release),
        (MeshConfig(fsdp=4), 4),
        pytest.param(MeshConfig(model=2), 4, marks=pytest.mark.release),
        pytest.param(MeshConfig(replica=2, data=1, fsdp=2, model=2), 8),
    ],
    ids=str,
)
def test_losses_do_not_depend_on_the_mesh(config, num_devices, on_one_device, capfd):
    found, state = losses(config, num_devices)
    np.testing.assert_allclose(found, on_one_device, rtol=2e-5)
    assert len(set(on_one_device[:, 0])) == STEPS
    wi = state.params["encoder"]["layers_0"]["experts"]["wi"]["kernel"]
    parts = max(config.fsdp, 1) * config.model
    assert wi.addressable_shards[0].data.size * parts == wi.size
    moments = [
        leaf
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.shape == wi.shape and leaf.sharding.spec == wi.sharding.spec
    ]
    assert len(moments) == 2
    assert wi.sharding.spec != PartitionSpec() or parts == 1
    # The partitioner found no array that it could only reshard by copying it to every device.
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


def test_losses_of_blocks_in_one_loop_do_not_depend_on_the_mesh():
    bert = dataclasses.replace(NOISY, num_layers=3, scan=Scan.BLOCKS)
    model = DualEncoder(DualEncoderConfig(bert, ExpertConfig(num_experts=1, blocks=())))
    found = [
        losses(config, num, model)[0]
        for config, num in ((MeshConfig(), 1), (MeshConfig(fsdp=4), 8))
    ]
    np.testing.assert_allclose(*found, rtol=2e-5)
