"""Every multi-task combiner over the parameters of both families of encoders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_encoder import BERT, T5, make_batch

from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.optim.multitask import Combiner, MultitaskConfig, build_combiner
from taser_jax.training.batch_loss import make_loss

TASKS = ("first", "second")
MODELS = {
    "bert": DualEncoderConfig(BERT, ExpertConfig(num_experts=2, blocks=(1,))),
    "t5": T5DualEncoderConfig(T5),
}
# Of two tasks that are alike: their sum, or their mean. CGD's is a multiple of its own.
MULTIPLES = {
    Combiner.PCGRAD: 2.0,
    Combiner.GRADNORM: 2.0,
    Combiner.TSAGE: 1.0,
    Combiner.CGD: None,
}


@functools.cache
def loss_and_gradient(name):
    model = DualEncoder(MODELS[name])
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    loss_fn = make_loss(model, train=True)
    batch = make_batch(4, length=6)
    (loss, _), gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
        params, batch=batch, step=jnp.int32(0)
    )
    return params, loss, gradient


@pytest.mark.slow
@pytest.mark.parametrize("combiner", MULTIPLES)
@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.release)])
def test_two_tasks_that_are_alike_are_as_one(name, combiner):
    params, loss, gradient = loss_and_gradient(name)
    built = build_combiner(MultitaskConfig(combiner=combiner), tasks=TASKS, total_steps=1)
    combined, _ = jax.jit(built.update)(
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), gradient),
        built.init(params),
        params,
        losses=jnp.stack([loss, loss]),
        key=jax.random.key(1),
    )
    found, wanted = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (combined, gradient)
    )
    multiple = found @ wanted / (wanted @ wanted)
    assert multiple > 0
    if MULTIPLES[combiner] is not None:
        assert multiple == pytest.approx(MULTIPLES[combiner], rel=1e-4)
    np.testing.assert_allclose(found, multiple * wanted, rtol=1e-3, atol=1e-7)
