import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from taser_jax.devices.mesh import MESH_AXES, MeshConfig, device_grid, make_mesh
from taser_jax.devices.partitioning import Partitioner, mesh_spec
from taser_jax.models.batch import Batch, Tokens
from taser_jax.storage.errors import ConfigError

SHAPES = {
    "table": (30522, 768),
    "wi": (768, 3072),
    "experts": (2, 768, 3072),
    "query": (768, 12, 64),
    "scale": (768,),
}
AXES = {
    "table": P("vocab", "embed"),
    "wi": P("embed", "mlp"),
    "experts": P("expert", "embed", "mlp"),
    "query": P("embed", "heads", "kv"),
    "scale": P("embed"),
}


def abstract(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


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
        (
            MeshConfig(model=3),
            r"3 devices or a multiple.*data -1, .*model 3\); there are 8 devices\n"
            r".*let the axes multiply to 8; one of -1",
        ),
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
    shardings = partitioner.param_shardings(AXES, abstract(SHAPES))
    assert {name: sharding.spec for name, sharding in shardings.items()} == {
        # 30522 = 2 * 15261 does not divide by 4: the vocabulary is copied.
        "table": P(None, "fsdp"),
        "wi": P("fsdp", "model"),
        "experts": P(None, "fsdp", "model"),
        "query": P("fsdp", "model", None),
        "scale": P("fsdp"),
    }


def test_a_mesh_axis_serves_one_axis_of_an_array():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, model=4))
    assert mesh_spec(P("mlp", "heads"), (8, 8), mesh) == P("model", None)
    assert mesh_spec(P("mlp", "heads"), (2, 8), mesh) == P(None, "model")
    assert mesh_spec(P(None, "mlp"), (8, 8), mesh) == P(None, "model")


def make_batch(queries=8, negatives=1):
    rng = np.random.default_rng(0)
    passages = queries * (1 + negatives)

    def tokens(rows, length):
        ids = rng.integers(1, 50, (rows, length)).astype(np.int32)
        return Tokens(ids=ids, mask=rng.random((rows, length)) < 0.8)

    return Batch(
        queries=tokens(queries, 4),
        passages=tokens(passages, 6),
        positive_index=np.arange(queries, dtype=np.int32) * (1 + negatives),
        ignore=rng.random((queries, passages)) < 0.1,
        query_rows=np.arange(queries, dtype=np.int32),
        passage_rows=np.arange(passages, dtype=np.int32),
    )


@pytest.mark.parametrize(
    "config", [MeshConfig(), MeshConfig(fsdp=4), MeshConfig(model=4), MeshConfig(2, 1, 2, 2)]
)
def test_batches_are_whole_and_split(config):
    partitioner = Partitioner(make_mesh(config))
    batch = make_batch()
    placed = partitioner.put_batch(batch)
    for local, array in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
        np.testing.assert_array_equal(np.asarray(array), local)
        parts = len(local) // partitioner.batch_devices
        assert {shard.data.shape for shard in array.addressable_shards} == {
            (parts, *local.shape[1:])
        }
    assert partitioner.host_share.rows(8).tolist() == list(range(8))


def test_sharded_equals_unsharded():
    rng = np.random.default_rng(1)
    shapes = {"table": (48, 16), "wi": (16, 32), "wo": (32, 16)}
    axes = {"table": P("vocab", "embed"), "wi": P("embed", "mlp"), "wo": P("mlp", "embed")}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    params["table"] = np.repeat(params["table"], 2, axis=0)
    batch = make_batch()

    def loss(params, batch):
        def encode(tokens):
            x = (params["table"][tokens.ids] * tokens.mask[..., None]).sum(1)
            return jnp.tanh(x @ params["wi"]) @ params["wo"]

        scores = encode(batch.queries) @ encode(batch.passages).T
        scores = jnp.where(batch.ignore, -jnp.inf, scores / 100)
        picked = jnp.take_along_axis(scores, batch.positive_index[:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(scores, axis=1) - picked).mean()

    batch = dataclasses.replace(batch, ignore=np.zeros_like(batch.ignore))
    expected, expected_grads = jax.value_and_grad(loss)(params, batch)
    for config in (MeshConfig(), MeshConfig(data=2, fsdp=2, model=2), MeshConfig(model=8)):
        partitioner = Partitioner(make_mesh(config))
        shardings = partitioner.param_shardings(axes, params)
        step = jax.jit(
            jax.value_and_grad(loss),
            in_shardings=(shardings, partitioner.batch_sharding),
            out_shardings=(partitioner.replicated, shardings),
        )
        with jax.set_mesh(partitioner.mesh):
            found, grads = step(jax.device_put(params, shardings), partitioner.put_batch(batch))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for name in params:
            np.testing.assert_allclose(grads[name], expected_grads[name], rtol=1e-4, atol=1e-6)
            assert grads[name].sharding.is_equivalent_to(shardings[name], grads[name].ndim)


def test_batches_that_do_not_divide():
    partitioner = Partitioner(make_mesh(MeshConfig(fsdp=2)))
    partitioner.check_batch_size(16)
    begin, fits = (
        r" queries.* 8 devices\n.*",
        "; or let replica · data · fsdp be 4 and model",
    )
    with pytest.raises(ConfigError, match=f"20{begin}such as 16 or 24{fits}"):
        partitioner.check_batch_size(20)
    with pytest.raises(ConfigError, match=f"4{begin}such as 8{fits}"):
        partitioner.check_batch_size(4)
    Partitioner(make_mesh(MeshConfig(model=4))).check_batch_size(6)
    with pytest.raises(ConfigError, match="12 rows of queries/ids on this host"):
        partitioner.put_batch(make_batch(12))


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
    found = []
    for slice_index in range(slices):
        for x in range(width):
            for y in range(length):
                host = (slice_index * (width // 2) + x // 2) * (length // 2) + y // 2
                found.append(Chip(len(found), host, (x, y, 0), slice_index))
    return found


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
