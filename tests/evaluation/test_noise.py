import math

import jax
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.commitment import noise_commitment
from taser_jax.evaluation.sensitivity import (
    Sample,
    make_measures,
    sampled_places,
    total_sensitivities,
)

# At this temperature every entropy is 0: all parameters count as task-specific.
ALL_SPECIFIC = 1e-3


def noise(values, *, beta, steps, temperature=ALL_SPECIFIC):
    sample = Sample(values, np.ones(values.shape[:2]))
    return noise_commitment(sample, beta=beta, temperature=temperature, steps=steps)


@pytest.mark.parametrize("steps", [(30, 32), (30, 60), (2, 30)])
def test_normal_noise_of_two_tasks_commits_as_its_correlation_says(steps):
    """P(same sign) of two normals with correlation ρ is ½ + arcsin(ρ)/π (Sheppard, 1899)."""
    values = np.random.default_rng(0).normal(10, 1, size=(32, 2, 10_000))
    earlier, later = steps
    for beta in (0.0, 0.6, 0.9):
        commitment = noise(values, beta=beta, steps=steps)
        shared = math.sqrt((1 - beta ** (2 * earlier)) / (1 - beta ** (2 * later)))
        expected = 0.5 + math.asin(beta ** (later - earlier) * shared) / math.pi
        assert commitment.specific == pytest.approx(10_000, rel=0.02)
        assert commitment.rate == pytest.approx(expected, abs=0.016)


def test_without_a_moving_average_noise_is_at_chance():
    values = np.random.default_rng(0).normal(10, 1, size=(8, 5, 20_000))
    found = noise(values, beta=0.0, steps=(30, 32))
    assert found.rate == pytest.approx(1 / 5, abs=0.01)


def test_rates_of_heavy_tailed_noise_equal_a_float64_simulation():
    """Task-specific are few, those with a spike, which the average carries to the next step."""
    rng, beta, temperature = np.random.default_rng(0), 0.9, 2.0
    # Rates of real parameters differ in scale, whatever the task.
    values = np.exp(1.5 * rng.normal(size=(16, 3, 1)) + rng.normal(size=(1, 1, 30_000)))
    values = values * np.exp(1.5 * rng.normal(size=(16, 3, 30_000)))
    found = noise(values, beta=beta, steps=(10, 16), temperature=temperature)
    average, marks = np.zeros((3, 30_000)), []
    for step in range(1, 17):
        drawn = values[rng.integers(16, size=30_000), :, np.arange(30_000)].T
        drawn = rng.permuted(drawn, axis=0)
        average = beta * average + (1 - beta) * drawn
        if step in (10, 16):
            entropy, _ = quadratic.entropy(average, temperature)
            marks.append((average.argmax(0), (entropy < 0.3) & (average.max(0) >= 0.1)))
    (then, was), (now, _) = marks
    assert found.specific == pytest.approx(was.sum(), rel=0.1)
    assert found.rate == pytest.approx((then == now)[was].mean(), abs=0.03)
    assert 0.5 < found.rate < 0.95


def test_a_batch_counts_in_its_own_medians():
    values = np.random.default_rng(0).normal(10, 1, size=(16, 2, 5_000))
    medians = np.array([[4.0, 0.25]] * 16)
    scaled = Sample(values * medians[..., None], medians)
    options = {"beta": 0.9, "temperature": ALL_SPECIFIC, "steps": (3, 5)}
    assert noise_commitment(scaled, **options) == noise(values, beta=0.9, steps=(3, 5))


def test_places_are_spread_evenly_over_all_parameters():
    params = [np.zeros((70, 100)), np.zeros(3_000), np.zeros(())]
    a, b, c = sampled_places(params, 1_000)
    assert len(a) + len(b) + len(c) == 1_000
    assert len(a) == pytest.approx(700, abs=2)
    assert all(len(set(at)) == len(at) for at in (a, b, c))
    assert a.max() < 7_000
    assert b.max() < 3_000
    # Not the same few columns in every row.
    assert len(set(a % 100)) == 100
    np.testing.assert_array_equal(sampled_places(params, 1_000)[0], a)
    everything = sampled_places(params, 10**6)
    assert [at.tolist() for at in everything] == [[*range(7_000)], [*range(3_000)], [0]]


@pytest.mark.parametrize(("devices", "sampled"), [(1, 10**6), (8, 60)])
def test_the_sample_holds_each_batchs_sensitivities(devices, sampled):
    params = quadratic.tree(np.random.default_rng(7))
    batches = quadratic.batches(3)
    measures = make_measures(quadratic.LOSSES, sampled=sampled)
    placed = quadratic.put(params, devices)
    found = total_sensitivities(measures, placed, batches, checkpoint="here").sample
    places = sampled_places(jax.tree.leaves(params), sampled)
    starts = np.cumsum([0, *(leaf.size for leaf in params.values())])
    chosen = np.concatenate([at + start for at, start in zip(places, starts, strict=False)])
    assert found.values.shape == (3, len(quadratic.TASKS), len(chosen))
    wanted = np.stack([quadratic.sensitivities(params, batch) for batch in batches])
    np.testing.assert_allclose(found.values, wanted[..., chosen], rtol=2e-4, atol=1e-6)
    medians = np.stack([quadratic.lower_medians(batch)[:, 0] for batch in wanted])
    np.testing.assert_allclose(found.medians, medians, rtol=2e-4)
