"""Activations stay with the devices that have their part of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from taser_jax.devices.collectives import read_collectives
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.layers import split_over_batch

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(64, 16, 32)).astype(np.float32)
KERNELS = [RNG.normal(size=(32, 32)).astype(np.float32) / 6 for _ in range(3)]


def blocks(hidden, kernels):
    hidden = split_over_batch(hidden)
    for kernel in kernels:
        hidden = split_over_batch(jnp.tanh(hidden @ kernel))
    return hidden


@pytest.mark.parametrize("config", [MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=4)])
def test_kernels_are_gathered_and_activations_are_not_exchanged(config):
    mesh = make_mesh(config)
    hidden = jax.device_put(INPUTS, Partitioner(mesh).batch_sharding)
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("fsdp"))
    kernels = [jax.device_put(kernel, rows) for kernel in KERNELS]
    with jax.set_mesh(mesh):
        compiled = jax.jit(blocks).lower(hidden, kernels).compile()
        found = compiled(hidden, kernels)
    assert found.sharding.is_equivalent_to(Partitioner(mesh).batch_sharding, 3)
    np.testing.assert_allclose(found, blocks(jnp.asarray(INPUTS), KERNELS), rtol=1e-5, atol=1e-6)
    collectives = read_collectives(compiled.as_text(), num_devices=8)
    assert {each.kind for each in collectives} == {"all-gather"}
    assert max(each.num_bytes for each in collectives) <= KERNELS[0].nbytes


def test_without_a_mesh_or_a_batch_that_divides_nothing_is_done():
    hidden = jnp.ones((6, 4))
    assert split_over_batch(hidden) is hidden
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=8))):
        assert split_over_batch(hidden) is hidden
