import math

import jax
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.specialty.commitment import Smoothing, noise_commitments
from taser_jax.evaluation.specialty.sensitivity import (
    Sample,
    make_measure_batch,
    sampled_places,
    total_sensitivities,
)
from taser_jax.evaluation.specialty.specialty import SpecialtyConfig
from taser_jax.optim.tsage_options import BiasCorrection

# Every entropy of two tasks is below 0.7 nats: all parameters count as task-specific.
ALL_SPECIFIC = SpecialtyConfig(specific_entropy=0.7, activated=0.0)


def noise(values, *, betas, batches, specialty=SpecialtyConfig(), correction=BiasCorrection.ADAM):
    sample = Sample(values, np.ones(values.shape[:2]))
    return noise_commitments(sample, Smoothing(betas, correction, specialty), batches=batches)


@pytest.mark.parametrize("batches", [(30, 32), (30, 60), (2, 30)])
def test_normal_noise_of_two_tasks_commits_as_its_correlation_says(batches):
    """P(same sign) of two normals with correlation ρ is ½ + arcsin(ρ)/π (Sheppard, 1899)."""
    values = np.random.default_rng(0).normal(10, 1, size=(64, 2, 40_000))
    found = noise(values, betas=(0.0, 0.6, 0.9), batches=batches, specialty=ALL_SPECIFIC)
    earlier, later = batches
    for beta, commitment in zip((0.0, 0.6, 0.9), found, strict=True):
        shared = math.sqrt((1 - beta ** (2 * earlier)) / (1 - beta ** (2 * later)))
        expected = 0.5 + math.asin(beta ** (later - earlier) * shared) / math.pi
        assert commitment.specific == 40_000
        assert commitment.rate == pytest.approx(expected, abs=0.008)


def test_without_a_moving_average_noise_is_at_chance():
    values = np.random.default_rng(0).normal(10, 1, size=(8, 5, 20_000))
    everything = SpecialtyConfig(specific_entropy=1.7, activated=0.0)
    (found,) = noise(values, betas=(0.0,), batches=(30, 32), specialty=everything)
    assert found.rate == pytest.approx(1 / 5, abs=0.01)


@pytest.mark.parametrize("correction", BiasCorrection)
def test_rates_of_heavy_tailed_noise_equal_a_float64_simulation(correction):
    """Task-specific are few, those with a spike, which the average carries to the next step."""
    rng, beta, temperature = np.random.default_rng(0), 0.9, 2.0
    # Rates of real parameters differ in scale, whatever the task.
    values = np.exp(1.5 * rng.normal(size=(16, 3, 1)) + rng.normal(size=(1, 1, 30_000)))
    values = values * np.exp(1.5 * rng.normal(size=(16, 3, 30_000)))
    (found,) = noise(values, betas=(beta,), batches=(10, 16), correction=correction)
    average, marks = np.zeros((3, 30_000)), []
    for step in range(1, 17):
        drawn = values[rng.integers(16, size=30_000), :, np.arange(30_000)].T
        drawn = rng.permuted(drawn, axis=0)
        average = beta * average + (1 - beta) * drawn
        if step in (10, 16):
            is_adam = correction is BiasCorrection.ADAM
            corrected = average / (1 - beta**step) if is_adam else average
            entropy, _ = quadratic.entropy(corrected, temperature)
            marks.append((corrected.argmax(0), (entropy < 0.3) & (corrected.max(0) >= 0.1)))
    (then, was), (now, _) = marks
    assert found.specific == pytest.approx(was.sum(), rel=0.1)
    assert found.rate == pytest.approx((then == now)[was].mean(), abs=0.03)
    assert 0.5 < found.rate < 0.95


def test_a_batch_counts_in_its_own_medians():
    values = np.random.default_rng(0).normal(10, 1, size=(16, 2, 5_000))
    medians = np.array([[4.0, 0.25]] * 16)
    scaled = Sample(values * medians[..., None], medians)
    smoothing = Smoothing((0.9,), specialty=ALL_SPECIFIC)
    (found,) = noise_commitments(scaled, smoothing, batches=(3, 5))
    (plain,) = noise(values, betas=(0.9,), batches=(3, 5), specialty=ALL_SPECIFIC)
    assert found == plain


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
    measure = make_measure_batch(quadratic.LOSSES, sampled=sampled)
    placed = quadratic.put(params, devices)
    found = total_sensitivities(measure, placed, batches, checkpoint="here").sample
    places = sampled_places(jax.tree.leaves(params), sampled)
    starts = np.cumsum([0, *(leaf.size for leaf in params.values())])
    chosen = np.concatenate([at + start for at, start in zip(places, starts, strict=False)])
    assert found.values.shape == (3, len(quadratic.TASKS), len(chosen))
    wanted = np.stack([quadratic.sensitivities(params, batch) for batch in batches])
    np.testing.assert_allclose(found.values, wanted[..., chosen], rtol=2e-4, atol=1e-6)
    medians = np.stack([quadratic.lower_medians(batch)[:, 0] for batch in wanted])
    np.testing.assert_allclose(found.medians, medians, rtol=2e-4)
