"""Training steps of models with a query tower for each task: BERTs, one or several tasks a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_encoder import BERT, adamw, make_batch, on_mesh

from taser_jax.devices.mesh import MeshConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import init_params
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.multitask_step import TaskGradients, make_multitask_step
from taser_jax.training.state import init_state
from taser_jax.training.step import make_train_step

TASKS = ("nq", "fever", "wow")
MODEL = DualEncoder(DualEncoderConfig(bert=BERT, towers=Towers.SEPARATE, query_tasks=TASKS))
BATCH = make_batch(16)


def fresh(optimizer):
    return init_state(functools.partial(init_params, MODEL), optimizer, jax.random.key(0))


def moved_towers(before, after):
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), before, after)
    return {tower for tower, tree in moved.items() if any(jax.tree.leaves(tree))}


def numpy(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.slow
def test_one_tasks_step_trains_its_query_tower_and_the_passages():
    optimizer = adamw(MODEL, floor=1.0, weight_decay=0.0)
    before = numpy(fresh(optimizer).params)
    step = make_train_step(MODEL, optimizer)
    after, _ = step(fresh(optimizer), {"fever": BATCH})
    assert moved_towers(before, after.params) == {"query_encoder_fever", "passage_encoder"}
    with pytest.raises(ConfigError, match="a query of task 'hotpot'"):
        step(fresh(optimizer), {"hotpot": BATCH})


def test_evaluation_goes_through_the_tasks_tower():
    draw = jax.jit(functools.partial(init_params, MODEL))
    params = draw(jax.random.key(0))
    params["query_encoder_nq"] = draw(jax.random.key(1))["query_encoder_nq"]
    loss = jax.jit(make_loss(MODEL, train=False), static_argnames="task")
    losses = {task: float(loss(params, BATCH, step=jnp.int32(0), task=task)[0]) for task in TASKS}
    assert losses["fever"] == pytest.approx(losses["wow"], rel=1e-6)
    assert losses["nq"] != pytest.approx(losses["wow"], rel=1e-3)


@pytest.mark.slow
def test_a_sharded_multitask_step_is_the_unsharded_one():
    """Of two tasks out of three: the third's tower stays; on 8 devices and on one."""
    tasks = TASKS[:2]
    batches = {"nq": BATCH, "fever": make_batch(8, length=9, seed=2)}
    # No Adam: its first step is the gradient's sign, also where that is rounding noise.
    optimizer = optax.sgd(0.1)
    make_step = functools.partial(
        make_multitask_step, MODEL, optimizer, tasks=tasks, gradients=TaskGradients.SUMMED
    )
    before = numpy(fresh(optimizer).params)
    alone, metrics = make_step()(fresh(optimizer), batches)
    towers = {"query_encoder_nq", "query_encoder_fever", "passage_encoder"}
    assert moved_towers(before, alone.params) == towers

    partitioner, state, shardings = on_mesh(MODEL, optimizer, MeshConfig(data=2, fsdp=2, model=2))
    step = make_step(state_shardings=shardings)
    placed = {task: jax.device_put(b, partitioner.batch_sharding) for task, b in batches.items()}
    sharded, sharded_metrics = step(state, placed)
    for name in ("loss", "grad_norm/nq", "grad_norm/fever"):
        assert float(sharded_metrics[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    assert moved_towers(before, sharded.params) == towers
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        numpy(sharded.params),
        numpy(alone.params),
    )
