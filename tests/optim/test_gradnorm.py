import jax
import jax.numpy as jnp
import numpy as np
import pytest
from task_problem import TASKS, TRAINABLE, flatten, run, steps, tree

from taser_jax.optim.multitask import gradnorm

PARAMS = tree(np.random.default_rng(9))


def make(alpha=1.5, tasks=TASKS):
    return gradnorm(tasks=tasks, trainable=TRAINABLE, alpha=alpha, learning_rate=0.2)


def oracle(problem, alpha, learning_rate):
    """Chen et al.'s Algorithm 1 in float64, with an Adam written out."""
    num_tasks = len(problem[0][1])
    w, m, v = np.ones(num_tasks), np.zeros(num_tasks), np.zeros(num_tasks)
    first = problem[0][1].astype(np.float64)
    combined, history = [], []
    for t, (gradients, losses) in enumerate(problem, start=1):
        combined.append(w @ flatten(gradients))
        history.append(w)
        norms = np.linalg.norm(flatten(gradients), axis=1)
        ratio = losses / first
        r = ratio / ratio.mean()
        target = (w * norms).mean() * r**alpha
        slope = np.sign(w * norms - target) * norms
        m, v = 0.9 * m + 0.1 * slope, 0.999 * v + 0.001 * slope**2
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        w = np.maximum(w - learning_rate * step, 0)
        w = w * num_tasks / w.sum()
    return combined, history


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_it_equals_the_paper_in_float64_over_several_steps(alpha):
    problem = steps(8)
    combined, state = run(make(alpha), PARAMS, problem)
    expected, history = oracle(problem, alpha, learning_rate=0.2)
    for found, wanted in zip(combined, expected, strict=True):
        np.testing.assert_allclose(flatten(found), wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(found["encoder"]["frozen"], 0)
    np.testing.assert_allclose(state.report.weights, history[-1], rtol=1e-4)
    assert float(jnp.sum(state.weights)) == pytest.approx(3, rel=1e-6)
    assert not np.allclose(history[-1], 1, atol=0.1)


def test_worked_example():
    params = {"w": jnp.zeros(2)}
    combiner = gradnorm(tasks=("a", "b"))
    updates, state = jax.jit(combiner.update)(
        {"w": jnp.array([[4.0, 0.0], [0.0, 2.0]])},
        combiner.init(params),
        params,
        losses=jnp.array([3.0, 5.0]),
    )
    np.testing.assert_allclose(updates["w"], [4.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(state.weights, [0.975, 1.025], rtol=1e-5)


def test_weights_even_out_the_norms_where_tasks_learn_alike():
    """The broken port's weights stay 1; here w·‖g‖ becomes one number."""
    params = {"w": jnp.zeros(2)}
    combiner = gradnorm(tasks=("a", "b"), learning_rate=0.01)
    gradients = {"w": jnp.array([[3.0, 0.0], [0.0, 1.0]])}

    def step(_, state):
        return combiner.update(gradients, state, params, losses=jnp.ones(2))[1]

    state = jax.lax.fori_loop(0, 300, step, combiner.init(params))
    np.testing.assert_allclose(state.weights, [0.5, 1.5], atol=0.03)


def test_a_task_that_learns_slower_gets_more_weight():
    params = {"w": jnp.zeros(2)}
    combiner = gradnorm(tasks=("slow", "fast"))
    gradients = {"w": jnp.eye(2)}
    state = combiner.init(params)
    for losses in ([1.0, 1.0], [0.9, 0.3], [0.9, 0.2]):
        _, state = combiner.update(gradients, state, params, losses=jnp.array(losses))
    assert state.weights[0] > 1 > state.weights[1]


@pytest.mark.parametrize("losses", [([0.0, 2.0], [1.0, 1.0]), ([1.0, 1.0], [0.0, 0.0])])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_losses_of_zero_or_less_leave_weights_finite(losses, sign):
    params = {"w": jnp.zeros(2)}
    combiner = gradnorm(tasks=("a", "b"))
    state = combiner.init(params)
    for of_step in losses:
        updates, state = jax.jit(combiner.update)(
            {"w": jnp.eye(2)}, state, params, losses=sign * jnp.array(of_step)
        )
    assert np.all(np.isfinite(updates["w"]))
    assert float(jnp.sum(state.weights)) == pytest.approx(2)


def test_weights_that_would_all_fall_to_zero_stay():
    params = {"w": jnp.zeros(1)}
    combiner = gradnorm(tasks=("alone",), learning_rate=2.0)
    state = combiner.init(params)
    # One task alone has no slope; a moment of before pushes its weight below 0.
    moments = jax.tree.map(lambda leaf: jnp.ones_like(leaf), state.inner)
    state = state._replace(inner=moments)
    _, state = combiner.update({"w": jnp.ones((1, 1))}, state, params, losses=jnp.ones(1))
    np.testing.assert_array_equal(state.weights, [1.0])
