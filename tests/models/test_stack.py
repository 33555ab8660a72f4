"""Blocks in one loop: the same function of the same parameters, compiled in less time."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from jax.sharding import PartitionSpec

from taser_jax.devices.collectives import read_collectives
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.models.stack import (
    BlockCall,
    Remat,
    Scan,
    longest_repetition,
    run_blocks,
    split_over_batch,
)
from taser_jax.models.t5 import PositionBias

RNGS = {"dropout": jax.random.key(0), "routing": jax.random.key(1)}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ("SSSS", (0, 1, 4)),
        ("SSESSESSESSF", (0, 3, 3)),
        ("FSSS", (1, 1, 3)),
        ("SESESF", (0, 2, 2)),
        ("SEF", (3, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_what_repeats(blocks, expected):
    assert longest_repetition([BlockCall(name, ()) for name in blocks]) == expected


def test_calls_with_other_arguments_do_not_repeat():
    local, everywhere = np.zeros(2), np.zeros(2)
    calls = [BlockCall("S", (bias,)) for bias in (everywhere, local, local)]
    assert longest_repetition(calls) == (1, 1, 2)


class Multiply(nn.Module):
    """hidden·factor, the factor, and a draw."""

    adds: bool = False

    @nn.compact
    def __call__(self, hidden, offset):
        factor = self.param("factor", nn.initializers.ones, ())
        draw = jax.random.uniform(self.make_rng("dropout"))
        return hidden * factor + (offset if self.adds else 0), (factor, draw)


class Stack(nn.Module):
    """Multiply, multiply and add, three times, and multiply once more."""

    scanned: bool

    @nn.compact
    def __call__(self, hidden):
        offset = jnp.ones(())
        blocks = [Multiply(adds=i % 2 == 1, parent=None) for i in range(7)]
        calls = [BlockCall(block, (offset,)) for block in blocks]
        return run_blocks(self, 0, calls, hidden, frozen=0, scanned=self.scanned)


@pytest.mark.parametrize("scanned", [False, True])
def test_blocks_run_in_order_with_their_own_parameters_and_draws(scanned):
    factors = [2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0]
    params = {f"layers_{i}": {"factor": jnp.float32(factor)} for i, factor in enumerate(factors)}
    stack = Stack(scanned)
    initial = stack.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.ones(1))
    assert jax.tree.structure(initial["params"]) == jax.tree.structure(params)
    apply = functools.partial(stack.apply, {"params": params}, jnp.ones(1), rngs=RNGS)
    hidden, statistics = apply()
    # (((1·2·3 + 1)·5·7 + 1)·11·13 + 1)·17
    assert hidden.tolist() == [598_043]
    assert [factor for factor, _ in statistics] == factors
    assert len({float(draw) for _, draw in statistics}) == len(factors)
    assert apply()[1] == statistics
    assert str(jax.make_jaxpr(apply)()).count("scan[") == scanned


def bert_of(num_layers, *, num_experts=2, blocks=(2, 4), pooling=Pooling.MEAN, **fixed):
    def build(**option):
        bert = tiny_models.tiny_bert(num_layers=num_layers, **fixed, **option)
        experts = {"num_experts": num_experts, "blocks": blocks}
        return tiny_models.tiny_model(bert=bert, experts=experts, pooling=pooling)

    return build


def t5_of(num_layers, **fixed):
    def build(**option):
        sizes = {"num_layers": num_layers, "num_decoder_layers": num_layers}
        t5 = tiny_models.tiny_t5(**{"dropout_rate": 0.0} | sizes | fixed | option)
        return tiny_models.tiny_t5_model(t5=t5)

    return build


SLOW, RELEASE = pytest.mark.slow, pytest.mark.release
DROPOUT = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1}
DRAWN = {"num_experts": 4, "blocks": (1,), "pooling": Pooling.CLS, **DROPOUT}
PER_LAYER = {"remat": Remat.BLOCK, "position_bias": PositionBias.PER_LAYER}


@pytest.mark.parametrize(
    ("build", "option", "values"),
    [
        pytest.param(bert_of(4), "scan", Scan, id="all tokens"),
        pytest.param(
            bert_of(6, pooling=Pooling.CLS, remat=Remat.BLOCK), "scan", Scan, marks=SLOW, id="[CLS]"
        ),
        pytest.param(t5_of(3), "scan", Scan, marks=SLOW, id="t5"),
        pytest.param(t5_of(3, **PER_LAYER), "scan", Scan, marks=RELEASE, id="umt5"),
        pytest.param(bert_of(1, **DRAWN), "remat", Remat, marks=SLOW, id="remat"),
        pytest.param(t5_of(1, dropout_rate=0.1), "remat", Remat, marks=SLOW, id="t5, remat"),
    ],
)
def test_neither_a_loop_nor_rematerialisation_changes_outputs_or_gradients(build, option, values):
    models = [build(**{option: value}) for value in values]
    params, tokens = tiny_models.random_params(models[0]), tiny_models.tiny_tokens()

    def outputs_and_gradients(model):
        def total(params):
            encoded = tiny_models.encode(model, params, tokens, Role.QUERY, train=True, rngs=RNGS)
            return encoded.embeddings[:, 0].sum(), encoded

        return jax.jit(jax.grad(total, has_aux=True))(params)

    tiny_models.assert_close(*map(outputs_and_gradients, models), atol=2e-5)


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
        outputs = compiled(hidden, kernels)
    assert outputs.sharding.is_equivalent_to(Partitioner(mesh).batch_sharding, 3)
    np.testing.assert_allclose(outputs, blocks(jnp.asarray(INPUTS), KERNELS), rtol=1e-5, atol=1e-6)
    collectives = read_collectives(compiled.as_text(), num_devices=8)
    assert {each.kind for each in collectives} == {"all-gather"}
    assert max(each.num_bytes for each in collectives) <= KERNELS[0].nbytes


def test_without_a_mesh_or_a_batch_that_divides_nothing_is_done():
    hidden = jnp.ones((6, 4))
    assert split_over_batch(hidden) is hidden
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=8))):
        assert split_over_batch(hidden) is hidden
