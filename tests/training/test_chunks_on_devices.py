"""Chunks where every device holds all parameters: its own rows, and one exchange of gradients."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_encoder import BERT, T5, make_batch

from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.losses import RoutingRegularizer
from taser_jax.training.objective import ObjectiveConfig

pytestmark = pytest.mark.slow

NOISY = dataclasses.replace(BERT, dropout_rate=0.3, attention_dropout_rate=0.2)
MODELS = {
    "seq-r": DualEncoderConfig(
        NOISY, ExpertConfig(num_experts=2, blocks=(1,), routing=Routing.SEQUENCE)
    ),
    "det-r with a drawn expert": DualEncoderConfig(NOISY, ExpertConfig(num_experts=4, blocks=(1,))),
    "t5": T5DualEncoderConfig(t5=dataclasses.replace(T5, dropout_rate=0.3), towers=Towers.TIED),
}
BATCH = make_batch(16)


def gradient(config, *, regularizer=None):
    model = DualEncoder(config)
    loss = make_loss(model, objective=ObjectiveConfig(regularizer=regularizer), num_chunks=2)
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))

    def value_and_gradient(params, batch, step):
        return jax.value_and_grad(lambda params: loss(params, batch, step=step)[0])(params)

    return jax.jit(value_and_gradient), params


def on_mesh(step, params, **axes):
    mesh = make_mesh(MeshConfig(**axes))
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    placed = jax.device_put(params, whole), jax.device_put(BATCH, split), jnp.int32(3)
    stack = contextlib.ExitStack()
    stack.enter_context(jax.set_mesh(mesh))
    return stack, placed


@pytest.mark.parametrize(
    "system",
    ["seq-r"]
    + [pytest.param(name, marks=pytest.mark.release) for name in MODELS if name != "seq-r"],
)
def test_dropout_and_routing_noise_are_those_of_one_device(system):
    regularizer = RoutingRegularizer(weight=0.5) if system == "seq-r" else None
    step, params = gradient(MODELS[system], regularizer=regularizer)
    expected = step(params, BATCH, jnp.int32(3))
    mesh, placed = on_mesh(step, params, data=8)
    with mesh:
        found = step(*placed)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-4), found, expected
    )
    # Another step's masks are others: the comparison above is not one of masks that drop nothing.
    assert float(step(params, BATCH, jnp.int32(4))[0]) != float(expected[0])


def exchanged_in_loops(compiled):
    """Names of the computations with an all-reduce, other than the program's entry."""
    computation, found = "", []
    for line in compiled.as_text().splitlines():
        if line and not line[0].isspace():
            computation = line.split()[0]
        if re.search(r" all-reduce(-start)?\(", line):
            found.append(computation)
    return [name for name in found if name != "ENTRY"]


def test_gradients_are_exchanged_once_per_step():
    step, params = gradient(DualEncoderConfig(BERT))
    mesh, placed = on_mesh(step, params, data=8)
    with mesh:
        assert exchanged_in_loops(step.lower(*placed).compile()) == []
    # Where devices hold parts of the parameters, each chunk's gradients are shared out at once.
    mesh, placed = on_mesh(step, params, data=4, fsdp=2)
    with mesh:
        assert exchanged_in_loops(step.lower(*placed).compile())
