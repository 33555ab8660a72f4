import jax
import jax.numpy as jnp
import numpy as np
import pytest
from task_problem import TASKS, TRAINABLE, flatten, run, steps, tree

from taser_jax.optim.multitask import cgd

PARAMS = tree(np.random.default_rng(9))


def make(tasks=TASKS, **numbers):
    return cgd(tasks=tasks, trainable=TRAINABLE, **{"temperature": 2.0} | numbers)


def oracle(problem, loss_exponent, temperature):
    num_tasks = len(problem[0][1])
    w = np.full(num_tasks, 1 / num_tasks)
    combined = []
    for gradients, losses in problem:
        g = flatten(gradients)
        losses = losses.astype(np.float64)
        unit = g / np.linalg.norm(g, axis=1, keepdims=True)
        r = np.zeros(num_tasks)
        for i in range(num_tasks):
            for j in range(num_tasks):
                r[i] += (losses[i] * losses[j]) ** loss_exponent * (unit[i] @ unit[j])
        w = w * np.exp(r / temperature)
        w = w / w.sum()
        combined.append(w @ g)
    return combined, w


@pytest.mark.parametrize(
    ("loss_exponent", "temperature"),
    [(0.25, 2.0), (0.25, 100.0), (0.5, 1.0)],
    ids=["sharp", "taco-dr", "paper"],
)
def test_it_equals_the_formulas_in_float64_over_several_steps(loss_exponent, temperature):
    problem = steps(6)
    numbers = {"loss_exponent": loss_exponent, "temperature": temperature}
    combined, state = run(make(**numbers), PARAMS, problem)
    expected, weights = oracle(problem, **numbers)
    for found, wanted in zip(combined, expected, strict=True):
        np.testing.assert_allclose(flatten(found), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["encoder"]["frozen"], 0)
    np.testing.assert_allclose(state.report.weights, weights, rtol=1e-4)
    assert not np.allclose(weights, 1 / 3, atol=1e-4)


def test_worked_example():
    params = {"w": jnp.zeros(2)}
    combiner = cgd(tasks=("a", "b"), loss_exponent=0.5, temperature=1.0)
    updates, state = jax.jit(combiner.update)(
        {"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])},
        combiner.init(params),
        params,
        losses=jnp.array([4.0, 1.0]),
    )
    np.testing.assert_allclose(state.report.weights, [0.9526, 0.0474], atol=5e-5)
    np.testing.assert_allclose(updates["w"], [2.8577, 3.9051], atol=2e-4)


def test_no_gradient():
    zeros = jax.tree.map(np.zeros_like, steps(1)[0][0])
    combined, state = run(make(), PARAMS, [(zeros, np.ones(3, np.float32))])
    assert not flatten(combined[0]).any()
    np.testing.assert_allclose(state.report.weights, 1 / 3, rtol=1e-6)
