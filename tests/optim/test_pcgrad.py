import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from task_problem import TASKS, TRAINABLE, flatten, on_eight_devices, permuted, run, steps, tree

from taser_jax.optim.multitask import pcgrad, projected, visiting_orders
from taser_jax.optim.task_gradients import Reduction

PARAMS = tree(np.random.default_rng(9))


def make(reduction=Reduction.SUM, tasks=TASKS):
    return pcgrad(tasks=tasks, trainable=TRAINABLE, reduction=reduction)


def conflicting(number, tasks=3):
    """Gradients that partly point against each other."""
    problem = steps(number, tasks=tasks)
    for gradients, _ in problem:
        for name, leaf in gradients["encoder"].items():
            leaf[1:] -= 0.5 * leaf[:1]
            gradients["encoder"][name] = leaf
    return problem


def oracle(g, orders):
    """The paper's Algorithm 1 with whole vectors, in float64. [tasks, n] -> [n]."""
    total = np.zeros(g.shape[1])
    for task, order in enumerate(orders):
        mine = g[task].copy()
        for other in order:
            product = mine @ g[other]
            if other != task and product < 0:
                mine -= product / (g[other] @ g[other]) * g[other]
        total += mine
    return total


@pytest.mark.parametrize("reduction", Reduction)
def test_it_equals_the_papers_algorithm_in_float64(reduction):
    problem = conflicting(4)
    combined, state = run(make(reduction), PARAMS, problem)
    changed = 0
    for number, (found, (gradients, _)) in enumerate(zip(combined, problem, strict=True)):
        g = flatten(gradients)
        orders = np.asarray(visiting_orders(jax.random.key(number), 3))
        wanted = oracle(g, orders)
        changed += not np.allclose(wanted, g.sum(0))
        if reduction is Reduction.MEAN:
            wanted = wanted / 3
        np.testing.assert_allclose(flatten(found), wanted, rtol=2e-5, atol=1e-5)
        np.testing.assert_array_equal(found["encoder"]["frozen"], 0)
    assert changed == 4
    products = g @ g.T
    assert float(state.report.scalars["conflicts"]) == pytest.approx((products < 0).sum() / 6)


def test_worked_example():
    params = {"w": jnp.zeros(2)}
    combiner = pcgrad(tasks=("a", "b"))
    updates, state = jax.jit(combiner.update)(
        {"w": jnp.array([[1.0, 0.0], [-1.0, 1.0]])},
        combiner.init(params),
        params,
        losses=jnp.ones(2),
        key=jax.random.key(0),
    )
    np.testing.assert_allclose(updates["w"], [0.5, 1.5], rtol=1e-6)
    np.testing.assert_allclose(state.report.weights, [2.0, 1.5], rtol=1e-6)


def test_the_order_of_visits_matters_and_is_the_oracles():
    g = np.array([[1.0, 0.0, 0.2], [-1.0, 1.0, 0.0], [-0.5, -1.0, 1.0], [0.1, -1.0, -2.0]])
    results = set()
    for others in itertools.permutations([1, 2, 3]):
        orders = np.array([[*others, 0], [0, 2, 3, 1], [3, 1, 0, 2], [2, 0, 1, 3]])
        factors = projected(jnp.asarray(g @ g.T, jnp.float32), jnp.asarray(orders))
        found = np.asarray(factors, np.float64).sum(0) @ g
        np.testing.assert_allclose(found, oracle(g, orders), rtol=1e-5, atol=1e-6)
        results.add(tuple(found.round(3)))
    assert len(results) > 1


def test_orders_are_permutations_that_differ_by_task_and_key():
    found = np.stack([visiting_orders(jax.random.key(k), 5) for k in range(40)])
    assert (np.sort(found, axis=-1) == np.arange(5)).all()
    assert (found[..., -1] == np.arange(5)).all()
    first = found[:, 0, 0]
    assert set(first) == {1, 2, 3, 4}
    assert (found[:, 0, :4] != found[:, 1, :4]).any()


def test_gradients_that_agree_and_empty_ones_are_left_alone():
    problem = steps(1)
    gradients = jax.tree.map(np.abs, problem[0][0])
    gradients["encoder"]["kernel"][2] = 0
    gradients["encoder"]["bias"][2] = 0
    gradients["encoder"]["scalar"][2] = 0
    combined, _ = run(make(), PARAMS, [(gradients, problem[0][1])])
    np.testing.assert_allclose(flatten(combined[0]), flatten(gradients).sum(0), rtol=1e-6)


def test_eight_devices_and_the_order_of_two_tasks():
    problem = conflicting(2)
    one, _ = run(make(), PARAMS, problem)
    eight, _ = run(make(), *on_eight_devices(PARAMS, problem))
    for found, wanted in zip(eight, one, strict=True):
        np.testing.assert_allclose(flatten(found), flatten(wanted), rtol=1e-5, atol=1e-6)

    pair = conflicting(2, tasks=2)
    one, _ = run(make(tasks=("a", "b")), PARAMS, pair)
    other, _ = run(make(tasks=("b", "a")), PARAMS, permuted(pair, [1, 0]))
    for found, wanted in zip(other, one, strict=True):
        np.testing.assert_allclose(flatten(found), flatten(wanted), rtol=1e-5, atol=1e-6)
