"""Frozen blocks: the training of the same parameters frozen by a table, on tokens or states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_encoder import BERT, T5
from tiny_models import assert_close, tiny_batch

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, init_params
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.optim.optimizers import OptimizerConfig, Update, build_optimizer, trainable
from taser_jax.training.state import init_state
from taser_jax.training.step import make_train_step

TWO_BLOCKS = dataclasses.replace(BERT, num_layers=2)
BATCH = tiny_batch(8)


def bert(routing=Routing.DETERMINISTIC, **rates):
    experts = ExpertConfig(num_experts=2, blocks=(1, 2), routing=routing)
    config = dataclasses.replace(TWO_BLOCKS, **rates)
    return DualEncoderConfig(config, experts, pooling=Pooling.MEAN)


TWO_OF_T5 = T5DualEncoderConfig(dataclasses.replace(T5, num_layers=2))
# Written out beside `frozen_parameters`, which is tested by it.
FROZEN_BERT = r".*/(embeddings|layers_0)/.*"
FROZEN_T5 = r".*/(token_embedder|encoder/relpos_bias|encoder/layers_0)/.*"


def frozen_optimizer(config, params, frozen):
    rules = ((frozen, Update.FREEZE), (f"(?!{frozen}$).*", Update.TRAIN))
    optimizer = OptimizerConfig(learning_rate=1e-2, updates=rules)
    return build_optimizer(optimizer, params, total_steps=10), trainable(optimizer, params)


def train(model, params, optimizer, trains, batch):
    # An own copy: the step takes its state's memory.
    state = init_state(lambda _: jax.tree.map(jnp.array, params), optimizer, jax.random.key(0))
    step = make_train_step(model, optimizer, trainable=trains)
    for _ in range(2):
        state, metrics = step(state, {"nq": batch})
    return state, metrics


def with_states(model, params, batch):
    states = jax.jit(functools.partial(model.apply, method="states"), static_argnames="role")
    return dataclasses.replace(
        batch,
        queries=states({"params": params}, batch.queries, role=Role.QUERY),
        passages=states({"params": params}, batch.passages, role=Role.PASSAGE),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "frozen"),
    [(bert(), FROZEN_BERT), pytest.param(TWO_OF_T5, FROZEN_T5, marks=pytest.mark.release)],
    ids=["bert", "t5"],
)
def test_training_is_that_of_frozen_parameters(config, frozen):
    plain, model = DualEncoder(config), DualEncoder(config, frozen_blocks=1)
    params = jax.jit(functools.partial(init_params, plain))(jax.random.key(0))
    assert list(leaves_by_path(params)) == list(leaves_by_path(abstract_params(model)))
    expected, _ = train(plain, params, *frozen_optimizer(config, params, frozen), BATCH)
    optimizer, trains = frozen_optimizer(config, params, config.frozen_parameters(1))
    on_tokens, metrics = train(model, params, optimizer, trains, BATCH)
    on_states, same = train(model, params, optimizer, trains, with_states(model, params, BATCH))
    for state in (on_tokens, on_states):
        assert_close(state.params, expected.params, rtol=1e-5, atol=1e-5)
    assert metrics.keys() == same.keys()
    moved = jax.tree.map(lambda new, old: bool(np.any(new != old)), on_states.params, params)
    assert not any(jax.tree.leaves(jax.tree.map(lambda m, t: m and not t, moved, trains)))
    assert sum(jax.tree.leaves(moved)) > len(jax.tree.leaves(moved)) // 4
    # Two moments for each trained parameter, and none for a frozen one.
    moments = [leaf for leaf in jax.tree.leaves(on_states.opt_state) if leaf.ndim]
    assert len(moments) == 2 * sum(jax.tree.leaves(trains))


def test_frozen_blocks_run_as_at_inference_and_those_above_as_before():
    model = DualEncoder(bert(Routing.TOKEN, dropout_rate=0.5), frozen_blocks=1)
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    rngs = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}
    apply = functools.partial(model.apply, {"params": params}, role=Role.QUERY)
    encode = jax.jit(functools.partial(apply, train=True, method="encode"))
    states = jax.jit(functools.partial(apply, method="states"))(BATCH.queries)
    assert states.hidden.shape == (8, 5, 16)
    outputs = [encode(texts, rngs=rngs) for texts in (BATCH.queries, states)]
    np.testing.assert_allclose(outputs[0].embeddings, outputs[1].embeddings, rtol=1e-5, atol=1e-6)
    # Statistics of the block that trains, out of two with a router.
    assert [encoded.routing.count.shape for encoded in outputs] == [(1,), (1,)]
    other = encode(states, rngs={**rngs, "dropout": jax.random.key(3)})
    assert np.abs(other.embeddings - outputs[0].embeddings).max() > 1e-2
