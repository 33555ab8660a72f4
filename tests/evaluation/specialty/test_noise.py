import math

import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.specialty.commitment import JudgedAt
from taser_jax.evaluation.specialty.noise import agreements, noise_commitments
from taser_jax.evaluation.specialty.sensitivity import Sample, make_measure, sampled_places
from taser_jax.evaluation.specialty.specialty import Bounds
from taser_jax.optim.tsage_options import BiasCorrection

# Every entropy of two tasks is below 0.7 nats: all parameters count as task-specific.
ALL_SPECIFIC = Bounds(specific_entropy=0.7, activated=0.0)


def sample_of(values):
    return Sample(values, np.ones(values.shape[:2]), np.ones(values.shape[1]))


def noise(values, **options):
    settings = {
        "betas": (0.0, 0.9),
        "batches": (30, 32),
        "temperature": 2.0,
        "bounds": Bounds(),
        "bias_correction": BiasCorrection.ADAM,
    }
    return noise_commitments(sample_of(values), **(settings | options))


@pytest.mark.parametrize("batches", [(30, 32), (30, 60), (2, 30)])
def test_normal_noise_of_two_tasks_commits_as_its_correlation_says(batches):
    """P(same sign) of two normals with correlation ρ is ½ + arcsin(ρ)/π (Sheppard, 1899)."""
    values = np.random.default_rng(0).normal(10, 1, size=(64, 2, 40_000))
    found = noise(values, betas=(0.0, 0.6, 0.9), batches=batches, bounds=ALL_SPECIFIC)
    earlier, later = batches
    for beta, commitment in zip((0.0, 0.6, 0.9), found, strict=True):
        shared = math.sqrt((1 - beta ** (2 * earlier)) / (1 - beta ** (2 * later)))
        expected = 0.5 + math.asin(beta ** (later - earlier) * shared) / math.pi
        assert commitment.specific[JudgedAt.EARLIER] == 40_000
        assert commitment.rate(JudgedAt.EARLIER) == pytest.approx(expected, abs=0.008)


def test_without_a_moving_average_noise_is_at_chance():
    values = np.random.default_rng(0).normal(10, 1, size=(8, 5, 20_000))
    (found,) = noise(values, betas=(0.0,), bounds=Bounds(specific_entropy=1.7, activated=0.0))
    assert found.rate(JudgedAt.LATER) == pytest.approx(1 / 5, abs=0.01)


@pytest.mark.parametrize("correction", BiasCorrection)
def test_rates_of_heavy_tailed_noise_equal_a_float64_simulation(correction):
    """Task-specific are few, those with a spike, which the average carries to the next step."""
    rng, beta, temperature = np.random.default_rng(0), 0.9, 2.0
    # Rates of real parameters differ in scale, whatever the task.
    values = np.exp(1.5 * rng.normal(size=(16, 3, 1)) + rng.normal(size=(1, 1, 30_000)))
    values = values * np.exp(1.5 * rng.normal(size=(16, 3, 30_000)))
    (found,) = noise(values, betas=(beta,), batches=(10, 16), bias_correction=correction)
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
    assert found.specific[JudgedAt.EARLIER] == pytest.approx(was.sum(), rel=0.1)
    assert found.rate(JudgedAt.EARLIER) == pytest.approx((then == now)[was].mean(), abs=0.03)
    assert 0.5 < found.rate(JudgedAt.EARLIER) < 0.95


def test_a_batch_counts_in_its_own_medians():
    values = np.random.default_rng(0).normal(10, 1, size=(16, 2, 5_000))
    medians = np.array([[4.0, 0.25]] * 16)
    scaled = Sample(values * medians[..., None], medians, medians[0])
    settings = {"betas": (0.9,), "batches": (3, 5), "temperature": 2.0, "bounds": ALL_SPECIFIC}
    (found,) = noise_commitments(scaled, bias_correction=BiasCorrection.ADAM, **settings)
    (plain,) = noise(values, betas=(0.9,), batches=(3, 5), bounds=ALL_SPECIFIC)
    assert found == plain


def test_agreement_by_hand():
    """Six parameters, owners of the first batch 0 0 0 1 1 -, of the second 0 0 1 1 - 1.

    The fifth is not activated in the second, the sixth not in the first. Of the four left three
    agree; by chance ¾·½ + ¼·½ = ½ would. The first parameter is task-specific and agrees, the
    third is and does not.
    """
    first = [[90.0, 1, 90, 0, 0, 0], [0, 0, 0, 1, 1, 0]]
    second = [[1.0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 1]]
    (found,) = agreements(sample_of(np.array([first, second])), temperature=2.0, bounds=Bounds())
    assert (found.batches, found.activated, found.specific) == (1, 0.75, 0.5)
    assert found.chance == pytest.approx(0.5)


def test_agreement_of_means_equals_a_float64_oracle_and_grows_with_batches():
    rng = np.random.default_rng(0)
    preferred = np.exp(0.5 * rng.normal(size=(3, 4_000)))
    values = preferred * rng.exponential(size=(9, 3, 4_000)) * np.array([[5.0], [1.0], [0.1]])
    medians = np.median(values.mean(0), axis=1)
    sample = Sample(values, np.ones((9, 3)), medians)
    found = agreements(sample, temperature=0.1, bounds=Bounds())
    assert [agreement.batches for agreement in found] == [1, 2, 4]
    for agreement in found:
        size, rates = agreement.batches, []
        for start in range(0, 9 - 2 * size + 1, 2 * size):
            halves = [
                values[start + half * size : start + (half + 1) * size].mean(0) / medians[:, None]
                for half in (0, 1)
            ]
            owners = [half.argmax(0) for half in halves]
            both = np.logical_and(*(half.max(0) >= 0.1 for half in halves))
            entropy, _ = quadratic.entropy(halves[0], 0.1)
            specific = (entropy < 0.3) & (halves[0].max(0) >= 0.1)
            same = owners[0] == owners[1]
            shares = [np.bincount(owner[both], minlength=3) / both.sum() for owner in owners]
            rates.append([same[both].mean(), same[specific].mean(), shares[0] @ shares[1]])
        wanted = np.mean(rates, axis=0)
        got = [agreement.activated, agreement.specific, agreement.chance]
        np.testing.assert_allclose(got, wanted, atol=1e-3)
    assert found[0].activated < found[1].activated < found[2].activated
    assert found[0].chance == pytest.approx(1 / 3, abs=0.02)


def test_one_batch_has_none_to_agree_with():
    values = np.ones((1, 2, 3))
    assert agreements(sample_of(values), temperature=2.0, bounds=Bounds()) == []


def test_places_are_spread_evenly_over_all_parameters():
    params = {"a": np.zeros((70, 100)), "b": np.zeros(3_000), "c": np.zeros(())}
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
    found = make_measure(quadratic.LOSSES, sampled=sampled)(
        quadratic.put(params, devices), batches
    ).sample
    places = sampled_places(params, sampled)
    starts = np.cumsum([0, *(leaf.size for leaf in params.values())])
    chosen = np.concatenate([at + start for at, start in zip(places, starts, strict=False)])
    assert found.values.shape == (3, len(quadratic.TASKS), len(chosen))
    wanted = np.stack([quadratic.sensitivities(params, batch) for batch in batches])
    np.testing.assert_allclose(found.values, wanted[..., chosen], rtol=2e-4, atol=1e-6)
    medians = np.stack([quadratic.lower_medians(batch)[:, 0] for batch in wanted])
    np.testing.assert_allclose(found.batch_medians, medians, rtol=2e-4)
    mean = quadratic.lower_medians(wanted.mean(0))[:, 0]
    np.testing.assert_allclose(found.medians, mean, rtol=2e-4)
