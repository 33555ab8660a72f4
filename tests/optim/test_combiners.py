"""PCGrad, CGD and GradNorm by their papers' formulas in float64, and what all combiners share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from task_problem import (
    COMBINERS,
    OPTIMIZER,
    TASKS,
    TRAINABLE,
    flatten,
    on_eight_devices,
    permuted,
    run,
    steps,
    tree,
)
from tiny_models import assert_close

from taser_jax.optim.multitask import (
    Combiner,
    MultitaskConfig,
    build_combiner,
    build_multitask_optimizer,
    cgd,
    gradnorm,
    pcgrad,
    visiting_orders,
)
from taser_jax.optim.optimizers import build_optimizer
from taser_jax.optim.task_gradients import Reduction

PARAMS = tree(np.random.default_rng(9))


def conflicting(number, tasks=3):
    """Steps with gradients that partly point against each other."""
    problem = steps(number, tasks=tasks)
    for gradients, _ in problem:
        for leaf in gradients["encoder"].values():
            leaf[1:] -= 0.5 * leaf[:1]
    return problem


def surgery(g, orders):
    """PCGrad's Algorithm 1 with whole vectors, in float64. [tasks, n] -> [n]."""
    total = np.zeros(g.shape[1])
    for task, order in enumerate(orders):
        mine = g[task].copy()
        for other in order:
            product = mine @ g[other]
            if other != task and product < 0:
                mine -= product / (g[other] @ g[other]) * g[other]
        total += mine
    return total


def cgd_oracle(problem, loss_exponent, temperature):
    """Piratla et al.'s Algorithm 1: each step's weights."""
    w = np.full(len(TASKS), 1 / len(TASKS))
    for gradients, losses in problem:
        g = flatten(gradients)
        unit = g / np.linalg.norm(g, axis=1, keepdims=True)
        powers = np.outer(losses, losses).astype(np.float64) ** loss_exponent
        w = w * np.exp((powers * (unit @ unit.T)).sum(axis=1) / temperature)
        w = w / w.sum()
        yield w


def gradnorm_oracle(problem, alpha, learning_rate):
    """Chen et al.'s Algorithm 1, with an Adam written out: each step's weights."""
    w, m, v = np.ones(len(TASKS)), np.zeros(len(TASKS)), np.zeros(len(TASKS))
    first = problem[0][1].astype(np.float64)
    for t, (gradients, losses) in enumerate(problem, start=1):
        yield w
        norms = np.linalg.norm(flatten(gradients), axis=1)
        ratio = losses / first
        r = ratio / ratio.mean()
        target = (w * norms).mean() * r**alpha
        slope = np.sign(w * norms - target) * norms
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        w = np.maximum(w - learning_rate * step, 0)
        w = w * len(TASKS) / w.sum()


@pytest.mark.parametrize(
    ("combiner", "oracle", "numbers"),
    [
        (cgd, cgd_oracle, {"loss_exponent": 0.25, "temperature": 2.0}),
        (cgd, cgd_oracle, {"loss_exponent": 0.5, "temperature": 1.0}),
        (gradnorm, gradnorm_oracle, {"alpha": 0.0, "learning_rate": 0.2}),
        (gradnorm, gradnorm_oracle, {"alpha": 1.5, "learning_rate": 0.2}),
    ],
)
def test_weights_equal_the_formulas_over_several_steps(combiner, oracle, numbers):
    problem = steps(8)
    combined, state = run(combiner(tasks=TASKS, trainable=TRAINABLE, **numbers), PARAMS, problem)
    history = list(oracle(problem, **numbers))
    for of_step, weights, (gradients, _) in zip(combined, history, problem, strict=True):
        expected = weights @ flatten(gradients)
        np.testing.assert_allclose(flatten(of_step), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(of_step["encoder"]["frozen"], 0)
    np.testing.assert_allclose(state.report.weights, history[-1], rtol=1e-4)
    assert np.ptp(history[-1]) > 1e-3


@pytest.mark.parametrize("reduction", Reduction)
def test_pcgrad_equals_its_papers_algorithm(reduction):
    problem = conflicting(4)
    combiner = pcgrad(tasks=TASKS, trainable=TRAINABLE, reduction=reduction)
    combined, state = run(combiner, PARAMS, problem)
    for number, (of_step, (gradients, _)) in enumerate(zip(combined, problem, strict=True)):
        g = flatten(gradients)
        expected = surgery(g, np.asarray(visiting_orders(jax.random.key(number), 3)))
        assert not np.allclose(expected, g.sum(0))
        scale = 1 / 3 if reduction is Reduction.MEAN else 1
        np.testing.assert_allclose(flatten(of_step), scale * expected, rtol=2e-5, atol=1e-5)
        np.testing.assert_array_equal(of_step["encoder"]["frozen"], 0)
    assert float(state.report.scalars["conflicts"]) == pytest.approx((g @ g.T < 0).sum() / 6)


@pytest.mark.parametrize(
    ("combiner", "gradients", "losses", "expected", "weights"),
    [
        (pcgrad, [[1, 0], [-1, 1]], [1, 1], [0.5, 1.5], [2, 1.5]),
        (cgd, [[3, 4], [0, 2]], [4, 1], [2.8577, 3.9051], [0.9526, 0.0474]),
        # GradNorm's report has the weights that were used, its memory the next ones.
        (gradnorm, [[4, 0], [0, 2]], [3, 5], [4, 2], [1, 1]),
    ],
)
def test_worked_examples_of_the_docstrings(combiner, gradients, losses, expected, weights):
    numbers = {"loss_exponent": 0.5, "temperature": 1.0} if combiner is cgd else {}
    problem = [({"w": np.array(gradients, np.float32)}, np.array(losses, np.float32))]
    [updates], state = run(combiner(tasks=("a", "b"), **numbers), {"w": jnp.zeros(2)}, problem)
    np.testing.assert_allclose(updates["w"], expected, atol=2e-4)
    np.testing.assert_allclose(state.report.weights, weights, atol=5e-5)
    if combiner is gradnorm:
        np.testing.assert_allclose(state.memory.weights, [0.975, 1.025], rtol=1e-5)


def test_orders_are_permutations_that_differ_by_task_and_key():
    orders = np.stack([visiting_orders(jax.random.key(k), 5) for k in range(40)])
    assert (np.sort(orders, axis=-1) == np.arange(5)).all()
    assert (orders[..., -1] == np.arange(5)).all()
    assert set(orders[:, 0, 0]) == {1, 2, 3, 4}
    assert (orders[:, 0, :4] != orders[:, 1, :4]).any()


def test_tasks_that_agree_or_have_no_gradient_are_left_alone():
    [(gradients, losses)] = steps(1)
    gradients = jax.tree.map(np.abs, gradients)
    for leaf in gradients["encoder"].values():
        leaf[2] = 0
    combined, _ = run(pcgrad(tasks=TASKS, trainable=TRAINABLE), PARAMS, [(gradients, losses)])
    np.testing.assert_allclose(flatten(combined[0]), flatten(gradients).sum(0), rtol=1e-6)
    zeros = jax.tree.map(np.zeros_like, gradients)
    combined, state = run(cgd(tasks=TASKS, trainable=TRAINABLE), PARAMS, [(zeros, losses)])
    assert not flatten(combined[0]).any()
    np.testing.assert_allclose(state.report.weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("losses", [([0.0, 2.0], [1.0, 1.0]), ([1.0, 1.0], [0.0, 0.0])])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_losses_of_zero_or_less_leave_gradnorms_weights_finite(losses, sign):
    problem = [({"w": jnp.eye(2)}, sign * np.array(of_step)) for of_step in losses]
    combined, state = run(gradnorm(tasks=("a", "b")), {"w": jnp.zeros(2)}, problem)
    assert np.all(np.isfinite(combined[-1]["w"]))
    assert float(jnp.sum(state.memory.weights)) == pytest.approx(2)


def test_gradnorms_weights_that_would_all_fall_to_zero_stay():
    combiner, params = gradnorm(tasks=("alone",), learning_rate=2.0), {"w": jnp.zeros(1)}
    state = combiner.init(params)
    # One task alone has no slope; a moment of before pushes its weight below 0.
    moments = jax.tree.map(jnp.ones_like, state.memory.inner)
    state = state._replace(memory=state.memory._replace(inner=moments))
    one = {"losses": jnp.ones(1), "key": jax.random.key(0)}
    _, state = combiner.update({"w": jnp.ones((1, 1))}, state, params, **one)
    np.testing.assert_array_equal(state.memory.weights, [1.0])


@pytest.mark.parametrize("reduction", Reduction)
def test_the_naive_optimiser_takes_summed_gradients(reduction):
    config = MultitaskConfig(Combiner.NAIVE, reduction)
    naive = build_multitask_optimizer(config, OPTIMIZER, PARAMS, tasks=TASKS, total_steps=3)
    plain = build_optimizer(OPTIMIZER, PARAMS, total_steps=3)
    factor = 1 / len(TASKS) if reduction is Reduction.MEAN else 1
    total = [(jax.tree.map(lambda leaf: leaf.sum(0), grads), losses) for grads, losses in steps(3)]
    scaled = [(jax.tree.map(lambda leaf: leaf * factor, grads), losses) for grads, losses in total]
    updates, _ = run(naive, PARAMS, total)
    expected, _ = run(optax.with_extra_args_support(plain), PARAMS, scaled)
    assert_close(updates, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_one_task_gives_the_plain_optimisers_update(combiner):
    plain = build_optimizer(OPTIMIZER, PARAMS, total_steps=5)
    config = MultitaskConfig(combiner)
    optimizer = build_multitask_optimizer(config, OPTIMIZER, PARAMS, tasks=("a",), total_steps=5)
    problem = steps(3, tasks=1)
    combined, _ = run(optimizer, PARAMS, problem)
    alone = [(jax.tree.map(lambda leaf: leaf[0], grads), losses) for grads, losses in problem]
    expected, _ = run(optax.with_extra_args_support(plain), PARAMS, alone)
    assert_close(combined, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_neither_devices_nor_the_order_of_tasks_change_anything(combiner):
    # PCGrad visits tasks in random order: of two, the order of visits has no effect.
    order = [1, 0] if combiner is Combiner.PCGRAD else [1, 2, 0]
    tasks, problem = TASKS[: len(order)], conflicting(3, tasks=len(order))
    in_order, reordered = (
        build_combiner(MultitaskConfig(combiner), tasks=names, total_steps=20, trainable=TRAINABLE)
        for names in (tasks, [tasks[place] for place in order])
    )
    whole, _ = run(in_order, PARAMS, problem)
    sharded, _ = run(in_order, *on_eight_devices(PARAMS, problem))
    moved, _ = run(reordered, PARAMS, permuted(problem, order))
    for expected, *others in zip(whole, sharded, moved, strict=True):
        for combined in others:
            np.testing.assert_allclose(flatten(combined), flatten(expected), rtol=1e-5, atol=1e-6)
