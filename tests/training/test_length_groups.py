"""A step over texts in groups of similar length is the step over texts padded to one length."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_encoder import BERT, adamw, make_batch, on_mesh

from taser_jax.data.batches.stream import Layout, Padding
from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.devices.mesh import HostShare, MeshConfig, make_mesh
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params, parameter_count
from taser_jax.models.routing import ExpertConfig, GateGradient, Routing
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.step import make_train_step

pytestmark = pytest.mark.slow

LENGTH = 8


def grouped(batches, *, multiple):
    """The batches in groups that hold all of them, as a stream makes them."""

    def group(name):
        sides = [getattr(batch, name) for batch in batches]
        texts = [TokenArray(side.ids, side.mask.sum(axis=1)) for side in sides]
        padding = Padding((5,), multiple=multiple)
        layout = Layout.of(np.stack([each.lengths for each in texts]), padding, longest=LENGTH)
        assert len(layout.sizes) > 1
        return [layout.group(each, np.arange(len(each)), HostShare()) for each in texts]

    return [
        dataclasses.replace(batch, queries=queries, passages=passages)
        for batch, queries, passages in zip(
            batches, group("queries"), group("passages"), strict=True
        )
    ]


def initial(model):
    return jax.jit(functools.partial(init_params, model))(jax.random.key(0))


def loss_and_gradients(model, params, batch, **options):
    loss = make_loss(model, train=False, **options)
    return jax.jit(
        jax.value_and_grad(lambda params: loss(params, batch, step=jnp.int32(0)), has_aux=True)
    )(params)  # fmt: skip


@pytest.mark.parametrize("num_chunks", [pytest.param(1, marks=pytest.mark.release), 2])
def test_loss_and_gradients_are_those_of_full_padding(num_chunks):
    # Inference skips an expert that no token of a group chose: a gate that is not chosen would then
    # get another gradient in a small group than in the whole batch.
    experts = ExpertConfig(
        num_experts=2,
        blocks=(1,),
        routing=Routing.TOKEN,
        gate_gradient=GateGradient.CHOSEN_EXPERT,
    )
    model = DualEncoder(DualEncoderConfig(BERT, experts, pooling=Pooling.MEAN))
    params = initial(model)
    batch = make_batch(16, length=LENGTH)
    padded = loss_and_gradients(model, params, batch)
    (batch,) = grouped([batch], multiple=num_chunks)
    found = loss_and_gradients(model, params, batch, num_chunks=num_chunks)
    assert "routing/entropy" in found[0][1]
    np.testing.assert_allclose(found[0][0], padded[0][0], rtol=1e-6)
    # Sums of other orders: up to the rounding of gradients of 8.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5), found, padded)


def test_gradients_in_bfloat16_are_those_of_full_padding_up_to_its_rounding():
    bert = dataclasses.replace(BERT, dtype="bfloat16")
    model = DualEncoder(DualEncoderConfig(bert, pooling=Pooling.MEAN))
    params = initial(model)
    batch = make_batch(16, length=LENGTH)
    (groups,) = grouped([batch], multiple=1)
    _, padded = loss_and_gradients(model, params, batch)
    _, gradients = loss_and_gradients(model, params, groups)
    difference = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), gradients, padded)
    size = jax.tree.map(lambda leaf: jnp.sum(leaf**2), padded)
    assert sum(jax.tree.leaves(difference)) < 1e-3 * sum(jax.tree.leaves(size))


def test_a_sharded_step_is_the_unsharded_one_and_compiles_once():
    model = DualEncoder(DualEncoderConfig(BERT, ExpertConfig(num_experts=2, blocks=(1,))))
    optimizer = adamw(model)

    def run(config, num_devices, batches):
        partitioner, state, shardings = on_mesh(model, optimizer, config, num_devices)
        step = make_train_step(model, optimizer, state_shardings=shardings)
        found = []
        with jax.set_mesh(partitioner.mesh):
            for batch in batches:
                state, metrics = step(state, {"nq": partitioner.put_batch(batch)})
                found.append([float(metrics[n]) for n in ("loss", "grad_norm", "tokens")])
        assert step.compilations == 1
        return found

    plain = [make_batch(16, length=LENGTH, seed=seed) for seed in range(2)]
    expected = run(MeshConfig(), 1, plain)
    found = run(MeshConfig(data=2, fsdp=2), 4, grouped(plain, multiple=4))
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    assert expected[0][2] == sum(tokens.mask.sum() for tokens in plain[0].texts)


def exchanged(model, params, batch):
    """Numbers that each of eight devices gives to all-reduces, in a step of this batch."""
    mesh = make_mesh(MeshConfig(data=8))
    loss = make_loss(model)
    step = jax.jit(jax.grad(lambda *given: loss(*given, step=jnp.int32(0))[0]))
    split = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        text = step.lower(whole, jax.device_put(batch, split)).compile().as_text()
    results = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
    shapes = re.findall(r"[a-z]+\d+\[([\d,]*)\]", " ".join(results))
    return sum(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)


def test_devices_exchange_the_gradients_of_all_groups_once():
    model = DualEncoder(DualEncoderConfig(dataclasses.replace(BERT, dtype="bfloat16")))
    params = initial(model)
    batch = make_batch(32, length=LENGTH)
    (groups,) = grouped([batch], multiple=8)
    assert len(groups.passages.groups) > 1
    embeddings = sum(len(tokens.ids) for tokens in batch.texts) * BERT.embed_dim
    once = exchanged(model, params, batch)
    assert parameter_count(params) < once
    # Embeddings in the order of the groups are put into that of the texts.
    assert exchanged(model, params, groups) < 1.05 * (once + embeddings)
