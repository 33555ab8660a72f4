import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import TinyEncoder, init
from tiny_models import assert_close, tiny_batch

from taser_jax.optim.multitask import MultitaskConfig, build_multitask_optimizer
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.optim.tsage import TSageConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.multitask_step import TaskGradients, make_multitask_step
from taser_jax.training.state import TrainState, init_state, named_key, named_seed, state_shardings
from taser_jax.training.step import make_train_step

# A router's noise is left to tell draws apart.
MODEL = TinyEncoder(dropout=0.0)
PLAIN = TinyEncoder(dropout=0.0, routed=False)
TASKS = ("nq", "fever", "wow")
BATCHES = {
    "nq": tiny_batch(16, seed=1),
    "fever": tiny_batch(8, length=9, seed=2),
    "wow": tiny_batch(8, negatives=2, length=3, seed=3),
}
ADAM = OptimizerConfig(learning_rate=2e-2, floor=1.0, clip_norm=1.0)
TSAGE = MultitaskConfig(tsage=TSageConfig(burn_in_share=0.25))


def shapes(model=MODEL):
    return jax.eval_shape(functools.partial(init, model), jax.random.key(0))


def build(config=TSAGE, model=MODEL, tasks=TASKS):
    return build_multitask_optimizer(config, ADAM, shapes(model), tasks=tasks, total_steps=8)


ONE_FOR_ALL = build_optimizer(ADAM, shapes(PLAIN), total_steps=8)


def fresh(optimizer, model=MODEL, **kwargs) -> TrainState:
    return init_state(functools.partial(init, model), optimizer, jax.random.key(0), **kwargs)


@functools.cache
def default_step():
    return make_multitask_step(
        MODEL, build(), tasks=TASKS, seed=3, schedule=lambda s: 0.5 / (1 + s)
    )


def entropy_of(task):
    """Routing's entropy in the first step's batch of a task."""
    loss_fn = make_loss(MODEL, seed=named_seed(3, f"task {task}"))
    loss = functools.partial(loss_fn, batch=BATCHES[task], step=jnp.int32(0), task=task)
    return float(jax.jit(loss)(fresh(build()).params)[1]["routing/entropy"])


def test_training_learns_and_reports_every_task():
    step, state = default_step(), fresh(build())
    history = []
    for _ in range(40):
        state, metrics = step(state, BATCHES)
        history.append({name: float(value) for name, value in metrics.items()})
    first, last = history[0], history[-1]
    assert last["loss"] < 0.9 * first["loss"]
    assert first["loss"] == pytest.approx(sum(first[f"loss/{task}"] for task in TASKS), rel=1e-5)
    norms = [first[f"grad_norm/{task}"] for task in TASKS]
    assert first["grad_norm"] == pytest.approx(np.linalg.norm(norms), rel=1e-5)
    for task in TASKS:
        assert {f"nll/{task}", f"accuracy/{task}", f"mrr/{task}"} <= set(first)
        assert first[f"weight/{task}"] == pytest.approx(1 / 3, rel=1e-5)
    assert sum(last[f"weight/{task}"] for task in TASKS) == pytest.approx(1, rel=1e-4)
    assert last["task_entropy"] < first["task_entropy"] == pytest.approx(np.log(3), rel=1e-5)
    assert history[3]["learning_rate"] == pytest.approx(0.125)
    shares = [first[f"routing/query/expert_{expert}_share"] for expert in (0, 1)]
    assert sum(shares) == pytest.approx(1, rel=1e-5)
    entropies = [entropy_of(task) for task in TASKS]
    assert first["routing/entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
    assert first["skipped_total"] == 0
    assert int(state.step) == 40


@pytest.mark.slow
def test_the_combiner_gets_each_tasks_gradients_with_its_loss_and_the_steps_key():
    """By a combiner that adds up gradients times losses and a draw, against the tasks' own."""

    def add_up(grads, state, params=None, *, losses, key, **extra):
        factors = losses * jax.random.uniform(key)
        return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), grads), state

    combiner = optax.GradientTransformationExtraArgs(lambda params: (), add_up)
    optimizer = optax.chain(combiner, optax.sgd(0.1))
    params = expected = fresh(optimizer).params
    rate = 0.1 * jax.random.uniform(jax.random.fold_in(named_key(3, "optimizer"), 0))
    for task in TASKS:
        loss_fn = make_loss(MODEL, seed=named_seed(3, f"task {task}"))
        objective = functools.partial(loss_fn, batch=BATCHES[task], step=jnp.int32(0), task=task)
        (loss, _), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
        expected = jax.tree.map(lambda p, g, loss=loss: p - rate * loss * g, expected, grads)
    step = make_multitask_step(MODEL, optimizer, tasks=TASKS, seed=3)
    after, _ = step(fresh(optimizer), BATCHES)
    assert_close(after.params, expected)


def test_every_seed_and_task_has_draws_of_its_own():
    assert len({named_seed(seed, f"task {task}") for seed in (0, 1) for task in TASKS}) == 6


def adam(state):
    return optax.tree_utils.tree_get(state.opt_state, "ScaleByAdamState")


def test_summed_gradients_and_chunks_give_the_naive_step():
    add_up = optax.stateless(lambda grads, _: jax.tree.map(lambda leaf: leaf.sum(0), grads))
    optimizer = optax.chain(add_up, ONE_FOR_ALL)
    step = make_multitask_step(PLAIN, optimizer, tasks=TASKS)
    stacked, metrics = step(fresh(optimizer, PLAIN), BATCHES)
    options = {"gradients": TaskGradients.SUMMED, "num_chunks": 2}
    step = make_multitask_step(PLAIN, ONE_FOR_ALL, tasks=TASKS, **options)
    summed, other = step(fresh(ONE_FOR_ALL, PLAIN), BATCHES)
    assert_close(adam(summed).mu, adam(stacked).mu)
    assert float(other["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
    assert "weight/nq" not in other


@pytest.mark.slow
@pytest.mark.parametrize("gradients", TaskGradients)
def test_eight_devices_do_not_change_a_step(gradients):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    is_tsage = gradients is TaskGradients.STACKED
    optimizer = build(TSAGE, PLAIN) if is_tsage else ONE_FOR_ALL
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes(PLAIN))
    shardings["wi"]["kernel"] = NamedSharding(mesh, PartitionSpec(None, "model"))
    shardings["wo"]["kernel"] = NamedSharding(mesh, PartitionSpec("model", None))
    state = fresh(optimizer, PLAIN, param_shardings=shardings)
    options = {"tasks": TASKS, "gradients": gradients}
    make_step = functools.partial(make_multitask_step, PLAIN, optimizer, **options)
    step, plain_step = make_step(state_shardings=state_shardings(state, shardings)), make_step()
    batches = jax.device_put(BATCHES, NamedSharding(mesh, PartitionSpec("data")))
    plain = fresh(optimizer, PLAIN)
    for _ in range(3):
        state, metrics = step(state, batches)
        plain, plain_metrics = plain_step(plain, BATCHES)
    # Gradients differ by rounding, so the search for their median may take other paths.
    for name in set(plain_metrics) - {"median_passes"}:
        value = plain_metrics[name]
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), name
    if is_tsage:
        average = state.opt_state[0].average[TASKS[0]]["wi"]["kernel"]
        assert average.sharding.spec == PartitionSpec(None, "model")
        assert average.addressable_shards[0].data.shape == (8, 8)
    # Adam's first steps are signs of gradients, so compare moments, not parameters.
    assert_close(adam(state).mu, adam(plain).mu, rtol=1e-2, atol=1e-4)


def compiled(num_tasks, optimizer=None, gradients=TaskGradients.SUMMED):
    """A step of equal tasks whose activations are far larger than the parameters."""
    tasks = tuple("abc"[:num_tasks])
    optimizer = optimizer or optax.sgd(0.1)
    step = make_multitask_step(PLAIN, optimizer, tasks=tasks, gradients=gradients)
    state = jax.eval_shape(lambda: fresh(optimizer, PLAIN))
    batch = tiny_batch(32, length=32)
    return step.lower(state, dict.fromkeys(tasks, batch)).compile()


@pytest.mark.slow
def test_activations_are_one_tasks_at_a_time_and_flops_the_sum_of_the_tasks():
    one_task, three_tasks = compiled(1), compiled(3)
    single = one_task.memory_analysis().temp_size_in_bytes
    params = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes(PLAIN)))
    assert single > 50 * params
    assert three_tasks.memory_analysis().temp_size_in_bytes < 1.1 * single
    flops = one_task.cost_analysis()["flops"]
    assert three_tasks.cost_analysis()["flops"] == pytest.approx(3 * flops, rel=0.02)
    plain = make_train_step(PLAIN, optax.sgd(0.1))
    state = jax.eval_shape(lambda: fresh(optax.sgd(0.1), PLAIN))
    plain = plain.lower(state, {"a": tiny_batch(32, length=32)}).compile()
    assert flops == pytest.approx(plain.cost_analysis()["flops"], rel=0.01)
    # T-SAGE's own arithmetic is small beside the model's.
    tsage = compiled(3, build(model=PLAIN, tasks=tuple("abc")), TaskGradients.STACKED)
    assert tsage.cost_analysis()["flops"] == pytest.approx(3 * flops, rel=0.05)
    assert tsage.memory_analysis().temp_size_in_bytes < 1.1 * single + 3 * 3 * params


def test_batches_of_other_tasks_are_refused():
    with pytest.raises(ConfigError, match="one batch of each of nq, fever, wow"):
        default_step()(fresh(build()), {"nq": BATCHES["nq"]})
