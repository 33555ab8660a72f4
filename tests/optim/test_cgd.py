import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from task_problem import TASKS, TRAINABLE, flatten, on_eight_devices, permuted, run, steps, tree

from taser_jax.optim.cgd import CgdConfig, cgd
from taser_jax.storage.errors import ConfigError

PARAMS = tree(np.random.default_rng(9))
SHARP = CgdConfig(temperature=2.0)
SIZES = {"nq": 100, "fever": 4, "wow": 25}


def make(config=SHARP, tasks=TASKS):
    return cgd(config, tasks=tasks, trainable=TRAINABLE)


def oracle(config, problem):
    num_tasks = len(problem[0][1])
    sizes = np.array([config.task_sizes[t] if config.task_sizes else 1 for t in TASKS[:num_tasks]])
    w = np.exp(config.size_adjustment / np.sqrt(sizes))
    w = w / w.sum()
    shares = num_tasks * w
    combined = []
    for gradients, losses in problem:
        g = flatten(gradients)
        losses = losses.astype(np.float64)
        unit = g / np.linalg.norm(g, axis=1, keepdims=True)
        r = np.zeros(num_tasks)
        for i in range(num_tasks):
            for j in range(num_tasks):
                gain = (losses[i] * losses[j]) ** config.loss_exponent * (unit[i] @ unit[j])
                r[i] += shares[j] * gain
        w = w * np.exp(r / config.temperature)
        w = w / w.sum()
        w = np.maximum(w, config.weight_floor)
        combined.append(w @ g)
    return combined, w


@pytest.mark.parametrize(
    "config",
    [
        SHARP,
        CgdConfig(),
        CgdConfig(loss_exponent=0.5, temperature=1.0),
        CgdConfig(temperature=0.3, weight_floor=0.05),
        CgdConfig(temperature=2.0, size_adjustment=3.0, task_sizes=SIZES),
    ],
    ids=["sharp", "taco-dr", "paper exponent", "floor", "sizes"],
)
def test_it_equals_the_formulas_in_float64_over_several_steps(config):
    problem = steps(6)
    combined, state = run(make(config), PARAMS, problem)
    expected, weights = oracle(config, problem)
    for found, wanted in zip(combined, expected, strict=True):
        np.testing.assert_allclose(flatten(found), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["encoder"]["frozen"], 0)
    np.testing.assert_allclose(state.report.weights, weights, rtol=1e-4)
    assert not np.allclose(weights, 1 / 3, atol=1e-4)


def test_worked_example():
    params = {"w": jnp.zeros(2)}
    combiner = cgd(CgdConfig(loss_exponent=0.5, temperature=1.0), tasks=("a", "b"))
    updates, state = combiner.update(
        {"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])},
        combiner.init(params),
        params,
        losses=jnp.array([4.0, 1.0]),
    )
    np.testing.assert_allclose(state.report.weights, [0.9526, 0.0474], atol=5e-5)
    np.testing.assert_allclose(updates["w"], [2.8577, 3.9051], atol=2e-4)


def test_weights_start_from_the_tasks_sizes():
    # exp(3/10), exp(3/2), exp(3/5) = 1.3499, 4.4817, 1.8221, which add up to 7.6537.
    config = CgdConfig(size_adjustment=3.0, task_sizes=SIZES)
    state = make(config).init(PARAMS)
    np.testing.assert_allclose(state.report.weights, [0.1764, 0.5856, 0.2381], atol=5e-5)
    with pytest.raises(ConfigError, match="each of nq, fever, wow"):
        make(dataclasses.replace(config, task_sizes={"nq": 3, "fever": 1}))


def test_devices_order_and_a_single_task():
    problem, order = steps(3), [1, 2, 0]
    one, _ = run(make(), PARAMS, problem)
    eight, _ = run(make(), *on_eight_devices(PARAMS, problem))
    other, _ = run(make(), PARAMS, permuted(problem, order))
    for wanted, sharded, moved in zip(one, eight, other, strict=True):
        np.testing.assert_allclose(flatten(sharded), flatten(wanted), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(flatten(moved), flatten(wanted), rtol=1e-5, atol=1e-6)
    alone = steps(2, tasks=1)
    combined, _ = run(make(tasks=("a",)), PARAMS, alone)
    np.testing.assert_array_equal(flatten(combined[1]), flatten(alone[1][0])[0])


def test_no_gradient_and_impossible_numbers():
    zeros = jax.tree.map(np.zeros_like, steps(1)[0][0])
    combined, state = run(make(), PARAMS, [(zeros, np.ones(3, np.float32))])
    assert not flatten(combined[0]).any()
    np.testing.assert_allclose(state.report.weights, 1 / 3, rtol=1e-6)
    with pytest.raises(ConfigError, match="temperature 0"):
        CgdConfig(temperature=0.0)
