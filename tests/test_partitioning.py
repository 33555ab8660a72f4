import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from taser_jax.batch import Batch, Tokens
from taser_jax.errors import ConfigError
from taser_jax.partitioning import (
    DEFAULT_RULES,
    HostShare,
    LogicalRules,
    MeshConfig,
    Partitioner,
    _host_share,
    make_mesh,
)

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
        (MeshConfig(data=8), (1, 8, 1, 1)),
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
        (MeshConfig(model=3), r"3 devices or a multiple.*model 3\)\n.*8 devices"),
        (MeshConfig(data=4), r"a mesh of 4 devices \(replica 1, data 4"),
        (MeshConfig(data=16), "a mesh of 16 devices"),
        (MeshConfig(fsdp=-1), "-1 for data and fsdp"),
        (MeshConfig(model=0), "0 devices along model"),
        (MeshConfig(model=-2), "-2 devices along model"),
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
    rules = LogicalRules((("batch", "data"), ("expert", "model"), ("mlp", "model")))
    assert rules.spec(P("mlp", "expert"), (8, 8), mesh, name="w") == P(None, "model")
    assert rules.spec(P("mlp", "expert"), (8, 2), mesh, name="w") == P("model", None)
    assert rules.spec(P("mlp", "mlp"), (8, 8), mesh, name="w") == P("model", None)
    assert rules.spec(P(None, "mlp"), (8, 8), mesh, name="w") == P(None, "model")


def test_uncovered_parameters_are_named():
    partitioner = Partitioner(make_mesh())
    shapes = {"encoder": abstract({"wi": (4, 8)})}
    with pytest.raises(
        ConfigError, match=r"parameter encoder/wi: no rule for .*'embde'\n(.*\n)*.*'embed'"
    ):
        partitioner.param_shardings({"encoder": {"wi": P("embde", "mlp")}}, shapes)
    with pytest.raises(ConfigError, match=r"parameter encoder/wi: 1 logical axes"):
        partitioner.param_shardings({"encoder": {"wi": P("embed")}}, shapes)
    with pytest.raises(ConfigError, match=r"parameter encoder/wi: no logical axes"):
        partitioner.param_shardings({"encoder": {}}, shapes)


def test_bad_tables():
    with pytest.raises(ConfigError, match="2 rules for 'mlp'"):
        LogicalRules((*DEFAULT_RULES, ("mlp", None)))
    with pytest.raises(ConfigError, match="mesh axis 'modle' for 'mlp'"):
        LogicalRules((("mlp", "modle"),))
    with pytest.raises(ConfigError, match="no mesh axis for 'batch'"):
        Partitioner(make_mesh(), LogicalRules((("mlp", "model"),)))


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
    assert partitioner.host_share == HostShare(0, 1)


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
    with pytest.raises(ConfigError, match=r"20 queries.* 8 devices\n(.*\n)*.*nearest are 16 or 24"):
        partitioner.check_batch_size(20)
    with pytest.raises(ConfigError, match=r"4 queries.* 8 devices\n(.*\n)*.*nearest are 8$"):
        partitioner.check_batch_size(4)
    Partitioner(make_mesh(MeshConfig(model=4))).check_batch_size(6)
    with pytest.raises(ConfigError, match="12 rows of queries/ids on this host"):
        partitioner.put_batch(make_batch(12))


@pytest.mark.parametrize(
    ("parts", "process", "share"),
    [
        ([[0], [0], [1], [1]], 1, HostShare(1, 2)),
        ([[1], [1], [0], [0]], 0, HostShare(1, 2)),
        # The model axis spans two hosts: both hold the same part.
        ([[0, 1], [2, 3]], 3, HostShare(1, 2)),
        ([[0, 1, 2, 3]], 2, HostShare(0, 1)),
        ([[0, 1], [1, 0]], 1, HostShare(0, 1)),
    ],
)
def test_host_shares(parts, process, share):
    assert _host_share(np.array(parts), process) == share


@pytest.mark.parametrize("parts", [[[0], [1], [0], [1]], [[0], [0], [0], [1]]])
def test_hosts_without_a_part_of_their_own(parts):
    with pytest.raises(ConfigError, match="contiguous"):
        _host_share(np.array(parts), 0)
