"""The same losses on any number of devices and any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_encoder import BERT
from tiny_models import assert_close, tiny_batch

from taser_jax.data.batches.stream import Layout, Padding
from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.devices.collectives import read_collectives
from taser_jax.devices.mesh import HostShare, MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models import parameters
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.routing import ExpertConfig, GateGradient, Routing
from taser_jax.models.stack import Scan
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.losses import RoutingRegularizer
from taser_jax.training.objective import ObjectiveConfig
from taser_jax.training.state import init_state
from taser_jax.training.step import make_train_step

pytestmark = pytest.mark.slow

# Dropout and routing noise are on: they must not depend on the mesh either.
NOISY = dataclasses.replace(BERT, dropout_rate=0.1, attention_dropout_rate=0.1)
EXPERTS = ExpertConfig(num_experts=2, blocks=(1,), routing=Routing.TOKEN)
MODEL = DualEncoder(DualEncoderConfig(NOISY, EXPERTS))
BATCHES = [tiny_batch(16, length=8, seed=number) for number in range(3)]


def losses(config, num_devices, model=MODEL, batches=BATCHES):
    params = parameters.abstract_params(model)
    optimizer = build_optimizer(OptimizerConfig(learning_rate=3e-3), params, total_steps=10)
    partitioner = Partitioner(make_mesh(config, devices=jax.devices()[:num_devices]))
    draw = functools.partial(parameters.init_params, model)
    shardings = partitioner.param_shardings(parameters.logical_axes(model), params)
    state = init_state(draw, optimizer, jax.random.key(0), param_shardings=shardings)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = make_train_step(model, optimizer, state_shardings=shardings)
    measured = []
    with jax.set_mesh(partitioner.mesh):
        for batch in batches:
            state, metrics = step(state, {"nq": partitioner.put_batch(batch)})
            measured.append([float(metrics[name]) for name in ("loss", "grad_norm", "tokens")])
    assert step.compilations == 1
    return np.array(measured), state


@pytest.fixture(scope="module")
def on_one_device():
    return losses(MeshConfig(), 1)[0]


@pytest.mark.parametrize(
    ("config", "num_devices"),
    [(MeshConfig(fsdp=4), 4), (MeshConfig(replica=2, data=1, fsdp=2, model=2), 8)],
    ids=str,
)
def test_losses_do_not_depend_on_the_mesh(config, num_devices, on_one_device, capfd):
    measured, state = losses(config, num_devices)
    np.testing.assert_allclose(measured, on_one_device, rtol=2e-5)
    assert len(set(on_one_device[:, 0])) == len(BATCHES)
    real = [sum(tokens.mask.sum() for tokens in batch.texts) for batch in BATCHES]
    assert on_one_device[:, 2].tolist() == real
    wi = state.params["encoder"]["layers_0"]["experts"]["wi"]["kernel"]
    assert wi.addressable_shards[0].data.size * config.fsdp * config.model == wi.size
    moments = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(state.opt_state)]
    assert moments.count((wi.shape, wi.sharding)) == 2
    # The partitioner found no array that it could only reshard by copying it to every device.
    assert "nvoluntary full rematerialization" not in capfd.readouterr().err


def test_losses_of_blocks_in_one_loop_do_not_depend_on_the_mesh():
    bert = dataclasses.replace(NOISY, num_layers=3, scan=Scan.BLOCKS)
    model = DualEncoder(DualEncoderConfig(bert, ExpertConfig(num_experts=1, blocks=())))
    expected, _ = losses(MeshConfig(), 1, model)
    np.testing.assert_allclose(losses(MeshConfig(fsdp=4), 8, model)[0], expected, rtol=2e-5)


def initial(model):
    return jax.jit(functools.partial(parameters.init_params, model))(jax.random.key(0))


def gradient(model, **options):
    """A compiled function of (params, batch, step) -> ((loss, metrics), gradients)."""
    loss = make_loss(model, **options)

    def value_and_gradient(params, batch, step):
        of_params = functools.partial(loss, batch=batch, step=step)
        return jax.value_and_grad(of_params, has_aux=True)(params)

    return jax.jit(value_and_gradient)


def on_devices(params, batch, **axes):
    mesh = make_mesh(MeshConfig(**axes))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    placed = jax.device_put(params, whole), jax.device_put(batch, split), jnp.int32(3)
    return jax.set_mesh(mesh), placed


def all_reduces(step, params, batch, **axes):
    """Those of a step's compiled program on eight devices."""
    mesh, placed = on_devices(params, batch, **axes)
    with mesh:
        text = step.lower(*placed).compile().as_text()
    return [each for each in read_collectives(text, num_devices=8) if each.kind == "all-reduce"]


def test_dropout_and_routing_noise_are_those_of_one_device():
    experts = ExpertConfig(num_experts=2, blocks=(1,), routing=Routing.SEQUENCE)
    model, batch = DualEncoder(DualEncoderConfig(NOISY, experts)), BATCHES[0]
    objective = ObjectiveConfig(regularizer=RoutingRegularizer(weight=0.5))
    step, params = gradient(model, objective=objective, num_chunks=2), initial(model)
    expected = step(params, batch, jnp.int32(3))
    mesh, placed = on_devices(params, batch, data=8)
    with mesh:
        assert_close(step(*placed), expected, atol=2e-6, rtol=2e-4)
    # Another step's masks are others: the comparison above is not one of masks that drop nothing.
    assert step(params, batch, jnp.int32(4))[0][0] != expected[0][0]


def test_gradients_are_exchanged_once_per_step():
    model = DualEncoder(DualEncoderConfig(BERT))
    step, params = gradient(model, num_chunks=2), initial(model)
    assert {each.times for each in all_reduces(step, params, BATCHES[0], data=8)} == {1}
    # Where devices hold parts of the parameters, each chunk's gradients are shared out at once.
    assert 2 in {each.times for each in all_reduces(step, params, BATCHES[0], data=4, fsdp=2)}


def grouped(batches, *, multiple):
    """The batches in groups that hold all of them, as a stream makes them."""

    def group(name):
        sides = [getattr(batch, name) for batch in batches]
        texts = [TokenArray(side.ids, side.mask.sum(axis=1)) for side in sides]
        padding = Padding((5,), multiple=multiple)
        layout = Layout.of(np.stack([each.lengths for each in texts]), padding, longest=8)
        assert len(layout.sizes) > 1
        return [layout.group(each, np.arange(len(each)), HostShare()) for each in texts]

    sides = zip(batches, group("queries"), group("passages"), strict=True)
    return [dataclasses.replace(batch, queries=q, passages=p) for batch, q, p in sides]


def test_loss_and_gradients_are_those_of_full_padding():
    # Inference skips an expert that no token of a group chose: a gate that is not chosen would then
    # get another gradient in a small group than in the whole batch.
    experts = ExpertConfig(
        num_experts=2, blocks=(1,), routing=Routing.TOKEN, gate_gradient=GateGradient.CHOSEN_EXPERT
    )
    model = DualEncoder(DualEncoderConfig(BERT, experts, pooling=Pooling.MEAN))
    params = initial(model)
    padded = gradient(model, train=False)(params, BATCHES[0], jnp.int32(0))
    (batch,) = grouped(BATCHES[:1], multiple=2)
    in_groups = gradient(model, train=False, num_chunks=2)(params, batch, jnp.int32(0))
    assert "routing/entropy" in in_groups[0][1]
    np.testing.assert_allclose(in_groups[0][0], padded[0][0], rtol=1e-6)
    # Sums of other orders: up to the rounding of gradients of 8.
    assert_close(in_groups, padded, rtol=1e-5, atol=5e-5)


def test_a_sharded_step_in_groups_is_the_unsharded_one_of_full_padding():
    model = DualEncoder(DualEncoderConfig(BERT, ExpertConfig(num_experts=2, blocks=(1,))))
    expected, _ = losses(MeshConfig(), 1, model)
    groups = grouped(BATCHES, multiple=4)
    measured, _ = losses(MeshConfig(data=2, fsdp=2), 4, model, groups)
    np.testing.assert_allclose(measured, expected, rtol=2e-5)


def test_devices_exchange_the_gradients_of_all_groups_once():
    model = DualEncoder(DualEncoderConfig(dataclasses.replace(BERT, dtype="bfloat16")))
    params, batch = initial(model), tiny_batch(32, length=8)
    (groups,) = grouped([batch], multiple=8)
    assert len(groups.passages.groups) > 1
    embeddings = sum(len(tokens.ids) for tokens in batch.texts) * BERT.embed_dim

    def exchanged(batch):
        """Numbers that each of eight devices gives to all-reduces, in a step of this batch."""
        reduced = all_reduces(gradient(model), params, batch, data=8)
        return sum(each.num_bytes for each in reduced) // 4

    once = exchanged(batch)
    assert parameters.parameter_count(params) < once
    # Embeddings in the order of the groups are put into that of the texts.
    assert exchanged(groups) < 1.05 * (once + embeddings)
