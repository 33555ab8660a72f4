import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from task_problem import TASKS, TRAINABLE, flatten, run, steps, tree

from taser_jax.optim import tsage
from taser_jax.optim.median import MedianOver, check_median
from taser_jax.optim.task_gradients import find_report
from taser_jax.storage.errors import ConfigError

PARAMS = tree(np.random.default_rng(9))
QUICK = tsage.TSageConfig(beta=0.6, temperature=1.5, burn_in_share=0.2)


@functools.cache
def make(config=QUICK, *, total_steps=10):
    """Kept, so that tests of equal settings share its compiled update."""
    return tsage.tsage(config, tasks=TASKS, total_steps=total_steps, trainable=TRAINABLE)


def oracle(config, problem, total_steps):
    """Algorithm 1 on flat float64 vectors, with a sort for the median: what each step has."""
    theta = flatten(PARAMS)
    num_tasks = len(problem[0][1])
    average = np.zeros((num_tasks, len(theta)))
    for number, (gradients, _) in enumerate(problem):
        g = flatten(gradients)
        sensitivity = np.abs(g * theta)
        nonzero = config.median_over is MedianOver.NONZERO
        rows = [np.sort(row[row != 0] if nonzero else row) for row in sensitivity]
        medians = np.array([row[(len(row) - 1) // 2] for row in rows])
        sensitivity /= medians[:, None]
        average = config.beta * average + (1 - config.beta) * sensitivity
        scores = average / tsage.temperature_of(config)
        if config.bias_correction is tsage.BiasCorrection.ADAM:
            scores = scores / (1 - config.beta ** (number + 1))
        u = np.exp(scores - scores.max(0))
        u /= u.sum(0)
        if number < int(total_steps * config.burn_in_share):
            u = np.full_like(u, 1 / num_tasks)
        elif config.step_scale is tsage.StepScale.RELEASED:
            u = u / num_tasks
        yield (u * g).sum(0), average, u


OPTIONS = {
    "the paper's": {},
    "released code": {"step_scale": tsage.StepScale.RELEASED},
    "bias correction": {"bias_correction": tsage.BiasCorrection.ADAM},
    "nonzero": {"median_over": MedianOver.NONZERO},
    "no momentum": {"beta": 0.0, "burn_in_share": 0.0},
    "infinite": {"temperature_schedule": tsage.TemperatureSchedule.INFINITE, "burn_in_share": 0.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_algorithm_1_in_float64_over_several_steps(name):
    config = dataclasses.replace(QUICK, **OPTIONS[name])
    problem = steps(5)
    for gradients, _ in problem:
        gradients["encoder"]["kernel"][:, :3] = 0  # rows of unseen words
    combined, state = run(make(config), PARAMS, problem)
    expected, averages, weights = zip(*oracle(config, problem, 10), strict=True)
    for gradient, exact in zip(combined, expected, strict=True):
        np.testing.assert_allclose(flatten(gradient), exact, rtol=3e-5, atol=1e-6)
        np.testing.assert_array_equal(gradient["encoder"]["frozen"], 0)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *map(state.average.get, TASKS))
    stacked["encoder"]["frozen"] = None
    np.testing.assert_allclose(flatten(stacked), averages[-1], rtol=1e-5)
    if name == "the paper's":
        report = find_report(("anything", (state,)))
        np.testing.assert_allclose(report.weights, weights[-1].mean(1), rtol=1e-5)
        entropy = -(weights[-1] * np.log(weights[-1])).sum(0).mean()
        assert float(report.scalars["task_entropy"]) == pytest.approx(entropy, rel=1e-5)


def one_step(params, gradients):
    config = tsage.TSageConfig(beta=0.0, temperature=1.0, burn_in_share=0.0)
    combiner = tsage.tsage(config, tasks=("a", "b"), total_steps=1)
    [combined], state = run(combiner, {"w": params}, [({"w": gradients}, np.ones(2, np.float32))])
    return combined["w"], state


def test_worked_example():
    combined, _ = one_step(jnp.array([1.0, 2.0]), jnp.array([[1.0, 2.0], [3.0, 1.0]]))
    np.testing.assert_allclose(combined, [2.2449, 1.9526], atol=5e-5)


def test_scaling_a_task_leaves_weights_as_they_are():
    problem = steps(4)
    louder = [
        (jax.tree.map(lambda g: np.concatenate([g[:1] * 64, g[1:]]), gradients), losses)
        for gradients, losses in problem
    ]
    _, state = run(make(), PARAMS, problem)
    _, louder_state = run(make(), PARAMS, louder)
    np.testing.assert_allclose(state.report.weights, louder_state.report.weights, rtol=1e-5)


def test_reported_weights_of_a_large_model_are_of_a_sample():
    rows, sampled = 8192, np.arange(8192) % 64 == 0
    gradients = np.full((2, rows, 128), 1.0, np.float32)
    gradients[0, sampled] = 3.0
    _, state = one_step(jnp.ones((rows, 128)), gradients)
    # Medians are 1, so the sample's scores are 3 and 1, and everywhere else 1 and 1.
    share = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(state.report.weights, [share, 1 - share], rtol=1e-5)


def test_temperatures_of_episodes():
    assert tsage.temperature_of(tsage.TSageConfig()) == 2
    infinite = tsage.TSageConfig(temperature_schedule=tsage.TemperatureSchedule.INFINITE)
    assert tsage.temperature_of(infinite) == math.inf


def table_and_rest(*, vocabulary, rest, embed=4):
    shapes = {"embeddings": {"token": {"embedding": (vocabulary, embed)}}, "wi": (rest,)}
    return {"encoder": jax.tree.map(jnp.zeros, shapes, is_leaf=lambda s: isinstance(s, tuple))}


def test_a_median_that_must_be_0_is_refused_before_anything_is_computed():
    """100 rows of 4 and 199 others: the median is at place 299, that of 601 at place 300.

    25 tokens, and a T5's start, leave 74 rows or 296 entries without a gradient; 24 leave 300.
    """
    params = table_and_rest(vocabulary=100, rest=199)
    check_median(params, tokens={"nq": 25})
    with pytest.raises(ConfigError, match=r"(?s)300 of 599 .*fever.*24 tokens.*nonzero"):
        check_median(params, tokens={"nq": 60, "fever": 24})
    check_median(table_and_rest(vocabulary=100, rest=201), tokens={"fever": 24})
    frozen = {"encoder": {"embeddings": {"token": {"embedding": False}}, "wi": True}}
    check_median(params, tokens={"fever": 1}, trainable=frozen)
