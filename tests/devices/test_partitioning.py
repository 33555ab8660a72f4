import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny_models import tiny_batch

from taser_jax.devices import partitioning
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner, assign, mesh_spec
from taser_jax.storage.errors import ConfigError

KINDS = {
    "table": ((30522, 768), P("vocab", "embed")),
    "wi": ((768, 3072), P("embed", "mlp")),
    "experts": ((2, 768, 3072), P("expert", "embed", "mlp")),
    "query": ((768, 12, 64), P("embed", "heads", "kv")),
    "out": ((12, 64, 768), P("heads", "kv", "embed")),
    "scale": ((768,), P("embed")),
}
AXES = {name: axes for name, (_, axes) in KINDS.items()}
PARAMETERS = {name: jax.ShapeDtypeStruct(shape, "float32") for name, (shape, _) in KINDS.items()}


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
        shape = (len(local) // partitioner.batch_devices, *local.shape[1:])
        assert {shard.data.shape for shard in array.addressable_shards} == {shape}
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
    messages = partitioning.copied_axes(make_mesh(config), AXES, PARAMETERS)
    for message, (axis, copies) in zip(messages, axes.items(), strict=True):
        assert message.startswith(f"{axis} cannot be split over model = {config.model}")
        assert copies in message


PARAMS = {"encoder": {"layers_0": {"kernel": np.ones(2), "bias": np.ones(1)}, "scale": np.ones(1)}}


def test_paths_are_written_as_t5x_writes_them():
    paths = ["encoder/layers_0/bias", "encoder/layers_0/kernel", "encoder/scale"]
    assert list(partitioning.leaves_by_path(PARAMS)) == paths


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
