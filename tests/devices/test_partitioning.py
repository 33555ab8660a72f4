from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_models import tiny_batch

from taser_jax.devices.mesh import MESH_AXES, MeshConfig, device_grid, make_mesh
from taser_jax.devices.partitioning import (
    Partitioner,
    assign,
    copied_axes,
    leaves_by_path,
    mesh_spec,
)
from taser_jax.storage.errors import ConfigError

SHAPES = {
    "table": (30522, 768),
    "wi": (768, 3072),
    "experts": (2, 768, 3072),
    "query": (768, 12, 64),
    "out": (12, 64, 768),
    "scale": (768,),
}
AXES = {
    "table": P("vocab", "embed"),
    "wi": P("embed", "mlp"),
    "experts": P("expert", "embed", "mlp"),
    "query": P("embed", "heads", "kv"),
    "out": P("heads", "kv", "embed"),
    "scale": P("embed"),
}


PARAMETERS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (1, 8, 1, 1)),
        (MeshConfig(fsdp=2, model=2), (1, 2, 2, 2)),
        (MeshConfig(replica=2, data=1, fsdp=-1), (2, 1, 4, 1)),
    ],
)
def test_mesh_shapes(config, shape):
    mesh = make_mesh(config)
    assert mesh.axis_names == ("replica", "data", "fsdp", "model")
    assert mesh.devices.shape == shape
    assert len(set(mesh.devices.flat)) == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(model=3), r"(?s)model 3\); there are 8 devices.*multiply to 8"),
        (MeshConfig(fsdp=16), "a mesh of 16 devices or a multiple"),
        (MeshConfig(data=4), r"a mesh of 4 devices \(replica 1, data 4"),
        (MeshConfig(fsdp=-1), "data -1, fsdp -1.*\\n.*-1 to one at most"),
        (MeshConfig(model=0), "model 0"),
    ],
)
def test_bad_meshes(config, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(config)


def test_rules_by_hand():
    partitioner = Partitioner(make_mesh(MeshConfig(data=1, fsdp=2, model=4)))
    shardings = partitioner.param_shardings(AXES, PARAMETERS)
    assert {name: sharding.spec for name, sharding in shardings.items()} == {
        # 30522 = 2 * 15261 does not divide by 4: the vocabulary is copied.
        "table": P(None, "fsdp"),
        "wi": P("fsdp", "model"),
        "experts": P(None, "fsdp", "model"),
        "query": P("fsdp", "model", None),
        "out": P("model", None, "fsdp"),
        "scale": P("fsdp"),
    }


def test_a_mesh_axis_serves_one_axis_of_an_array():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, model=4))
    assert mesh_spec(P("mlp", "heads"), (8, 8), mesh) == P("model", None)
    assert mesh_spec(P("mlp", "heads"), (2, 8), mesh) == P(None, "model")
    assert mesh_spec(P(None, "mlp"), (8, 8), mesh) == P(None, "model")


@pytest.mark.parametrize(
    "config", [MeshConfig(), MeshConfig(fsdp=4), MeshConfig(model=4), MeshConfig(2, 1, 2, 2)]
)
def test_batches_are_whole_and_split(config):
    partitioner = Partitioner(make_mesh(config))
    batch = tiny_batch(8)
    placed = partitioner.put_batch(batch)
    for local, array in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
        np.testing.assert_array_equal(np.asarray(array), local)
        parts = len(local) // partitioner.batch_devices
        assert {shard.data.shape for shard in array.addressable_shards} == {
            (parts, *local.shape[1:])
        }
    assert partitioner.host_share.rows(8).tolist() == list(range(8))


def test_batches_that_do_not_divide():
    partitioner = Partitioner(make_mesh(MeshConfig(fsdp=2)))
    partitioner.check_batch_size(16)
    for size, others in ((20, "16 or 24"), (4, "8")):
        with pytest.raises(ConfigError, match=rf"(?s){size} queries.* 8 devices.*such as {others}"):
            partitioner.check_batch_size(size)
    Partitioner(make_mesh(MeshConfig(model=4))).check_batch_size(6)
    with pytest.raises(ConfigError, match="12 rows of queries/ids on this host"):
        partitioner.put_batch(tiny_batch(12))


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX's mesh makers and we ask of a TPU."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def pod(width=4, length=4, slices=1):
    """Slices of v5e; a host has a square of two by two chips, as real ones have."""
    chips = []
    for slice_index in range(slices):
        for x in range(width):
            for y in range(length):
                host = (slice_index * (width // 2) + x // 2) * (length // 2) + y // 2
                chips.append(Chip(len(chips), host, (x, y, 0), slice_index))
    return chips


def chips_partitioner(config, devices):
    partitioner = Partitioner(make_mesh())
    partitioner.mesh = types.SimpleNamespace(
        devices=device_grid(config, devices),
        shape=dict(zip(MESH_AXES, config.shape(len(devices)), strict=True)),
    )
    return partitioner


@pytest.mark.parametrize(
    ("config", "by_slice"),
    [
        (MeshConfig(replica=2), [(0, 0), (1, 1)]),
        (MeshConfig(replica=4, fsdp=4), [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (MeshConfig(replica=2, fsdp=4, model=2), [(0, 0), (1, 1)]),
    ],
)
def test_replicas_are_slices(config, by_slice):
    grid = device_grid(config, pod(slices=2))
    assert grid.shape == config.shape(32)
    assert len(set(grid.flat)) == 32
    for replica, slice_index in by_slice:
        assert {chip.slice_index for chip in grid[replica].flat} == {slice_index}


def test_slices_that_the_axis_cannot_span():
    message = r"1 devices along replica, which must span 2 slices\n.*a multiple of 2"
    with pytest.raises(ConfigError, match=message):
        device_grid(MeshConfig(), pod(slices=2))


def test_other_devices_slices_are_no_slices():
    """JAX numbers a GPU machine's hosts as slices."""
    hosts = [dataclasses.replace(chip, platform="gpu") for chip in pod(slices=2)]
    hosts = [dataclasses.replace(chip, device_kind="H100") for chip in hosts]
    assert device_grid(MeshConfig(), hosts).shape == (1, 32, 1, 1)


@pytest.mark.parametrize(
    "config",
    [MeshConfig(), MeshConfig(fsdp=-1, data=1), MeshConfig(fsdp=4), MeshConfig(model=4),
     MeshConfig(data=2, fsdp=2, model=4), MeshConfig(model=2), MeshConfig(model=8)],
)  # fmt: skip
def test_hosts_of_a_pod_hold_the_whole_batch(config):
    """A host's chips are neighbours on the torus, and seldom neighbours in the mesh."""
    partitioner = chips_partitioner(config, pod())
    shares = [partitioner.share_of(host) for host in range(4)]
    assert {share.count for share in shares} == {partitioner.batch_devices}
    held = np.concatenate([share.rows(32) for share in shares])
    assert set(held.tolist()) == set(range(32))
    # Twice only where a part's devices belong to two hosts.
    chips = {part: set() for part in range(partitioner.batch_devices)}
    grid = partitioner.mesh.devices.reshape(partitioner.batch_devices, -1)
    for part, devices in enumerate(grid):
        chips[part] = {chip.process_index for chip in devices}
    for host, share in enumerate(shares):
        assert share.parts == tuple(part for part, hosts in chips.items() if host in hosts)


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (MeshConfig(model=8), {"heads of 12": "copies of 2", "vocab of 30,522": "copies of 1"}),
        (MeshConfig(model=4), {"vocab of 30,522": "copies of 1"}),
        (MeshConfig(model=2, fsdp=4), {}),
        (MeshConfig(), {}),
    ],
)
def test_axes_that_a_mesh_cannot_divide_are_told(config, axes):
    messages = copied_axes(make_mesh(config), AXES, PARAMETERS)
    for message, (axis, copies) in zip(messages, axes.items(), strict=True):
        assert message.startswith(f"{axis} cannot be split over model = {config.model}")
        assert copies in message


PARAMS = {"encoder": {"layers_0": {"kernel": np.ones(2), "bias": np.ones(1)}, "scale": np.ones(1)}}


def test_paths_are_written_as_t5x_writes_them():
    assert list(leaves_by_path(PARAMS)) == [
        "encoder/layers_0/bias",
        "encoder/layers_0/kernel",
        "encoder/scale",
    ]


def test_each_parameter_gets_its_rules_value():
    rules = ((".*/kernel", 1), (".*/(bias|scale)", 2))
    assert assign(rules, PARAMS, table="t") == {
        "encoder": {"layers_0": {"kernel": 1, "bias": 2}, "scale": 2}
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((("encoder/.*/.*", 1),), "t: parameter encoder/scale matches 0 rules"),
        (((".*", 1), (".*/bias", 2)), "encoder/layers_0/bias matches 2 rules: '\\.\\*', '"),
        (((".*", 1), ("decoder/.*", 2)), "rule 'decoder/\\.\\*' matches no parameter"),
        ((("kernel", 1), (".*", 1)), "rule 'kernel' matches no parameter"),
        ((("(", 1),), "'\\(' is no regular expression of"),
    ],
)
def test_tables_must_cover_every_parameter_exactly_once(rules, message):
    with pytest.raises(ConfigError, match=message):
        assign(rules, PARAMS, table="t")
