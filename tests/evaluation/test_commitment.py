"""Commitment against a float64 oracle, and noise against correlations and a simulation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.commitment import (
    Commitment,
    commitments,
    noise_commitment,
    noise_specialty,
)
from taser_jax.evaluation.specialty import ACTIVATED, SPECIFIC_ENTROPY, Specialty
from taser_jax.optim.median import MedianOver
from taser_jax.optim.tsage import BiasCorrection

TEMPERATURE = 2.0
# A batch whose median is 0.
UNKNOWN = np.full((1, 3, 5), np.nan)

RNG = np.random.default_rng(7)
# Averages of heavy tails, of which the later ones keep a half.
EARLIER = {task: quadratic.stiffness(RNG) for task in quadratic.TASKS}
LATER = {
    task: jax.tree.map(lambda new, old: (new + old) / 2, quadratic.stiffness(RNG), EARLIER[task])
    for task in quadratic.TASKS
}


def committed(*averages, devices=1):
    """Commitment over checkpoints of steps 40, 80, ..."""
    placed = (
        {
            task: quadratic.put(jax.tree.map(lambda leaf: 3 * leaf, of_step[task]), devices)
            for task in quadratic.TASKS
        }
        for of_step in averages
    )
    samples = {40 * number: UNKNOWN for number in range(1, len(averages) + 1)}
    steps = zip(samples, placed, strict=True)
    return commitments(steps, samples, beta=0.9, temperature=TEMPERATURE)


def test_commitment_by_hand():
    """Averages of five parameters; 0, 1, 2 and 4 are specific at first, and 0 and 2 stay."""
    first = jnp.array([[9.0, 0, 0, 1, 9], [0, 9, 9, 1, 0]])
    second = jnp.array([[9.0, 9, 0, 9, 2], [0, 0, 1, 0, 2]])
    averages = [(step, {"a": (a,), "b": (b,)}) for step, (a, b) in ((5, first), (9, second))]
    sample = np.full((2, 2, 100), 5.0)
    (of_steps,) = commitments(averages, {9: sample}, beta=0.9, temperature=TEMPERATURE)
    assert of_steps[:4] == (5, 9, 4, 2)
    # Where all tasks are alike no parameter is specific.
    assert np.isnan(of_steps.noise)
    assert Commitment(5, 9, 4, 2).rate == 0.5
    assert np.isnan(Commitment(5, 9, 0, 0).rate)


def test_commitment_equals_a_float64_oracle_that_holds_everything():
    owners, specific = [], []
    for averages in (EARLIER, LATER):
        values = 3 * np.stack([quadratic.flat(averages[task]) for task in quadratic.TASKS])
        entropy, _ = quadratic.entropy(values, TEMPERATURE)
        specific.append((entropy < 0.3) & (values.max(0) >= 0.1))
        tied = (values == values.max(0)).sum(0) > 1
        owners.append(np.where(tied, len(quadratic.TASKS), values.argmax(0)))
    stay = specific[0] & (owners[0] == owners[1])
    assert specific[0].sum() > 20
    assert 0 < stay.sum() < specific[0].sum()
    first, second = committed(EARLIER, LATER, LATER)
    assert first == Commitment(40, 80, specific[0].sum(), stay.sum())
    assert second == Commitment(80, 120, specific[1].sum(), specific[1].sum())
    assert committed(EARLIER, LATER, devices=8) == [first]


def test_corrected_averages_count_as_the_training_weighted_by_them():
    """After 2 and 4 steps, averages are 0.19 and 0.34 of what T-SAGE takes the softmax of."""
    options = {"samples": {4: UNKNOWN}, "beta": 0.9, "temperature": TEMPERATURE}
    grown = {2: EARLIER, 4: LATER}
    saved = {
        step: jax.tree.map(lambda leaf, step=step: leaf * (1 - 0.9**step), averages)
        for step, averages in grown.items()
    }
    assert commitments(saved.items(), **options) != commitments(grown.items(), **options)
    corrected = commitments(saved.items(), correction=BiasCorrection.ADAM, **options)
    assert corrected == commitments(grown.items(), **options)


# At this temperature every entropy is 0: all parameters count as task-specific.
ALL_SPECIFIC = 1e-3


@pytest.mark.parametrize("steps", [(30, 32), (30, 60)])
def test_normal_noise_of_two_tasks_commits_as_its_correlation_says(steps):
    """P(same sign) of two normals with correlation ρ is ½ + arcsin(ρ)/π (Sheppard, 1899)."""
    sample = np.random.default_rng(0).normal(10, 1, size=(32, 2, 10_000))
    earlier, later = steps
    for beta in (0.0, 0.6, 0.9):
        noise = noise_commitment(sample, beta=beta, temperature=ALL_SPECIFIC, steps=steps)
        shared = math.sqrt((1 - beta ** (2 * earlier)) / (1 - beta ** (2 * later)))
        expected = 0.5 + math.asin(beta ** (later - earlier) * shared) / math.pi
        assert noise.specific == pytest.approx(10_000, rel=0.02)
        assert noise.rate == pytest.approx(expected, abs=0.016)


def heavy_tails(batches):
    """Few are task-specific, those with a spike; sizes of parameters differ, whatever the task."""
    rng = np.random.default_rng(0)
    values = np.exp(1.5 * rng.normal(size=(batches, 3, 1)) + rng.normal(size=(1, 1, 30_000)))
    return values * np.exp(1.5 * rng.normal(size=(batches, 3, 30_000)))


def specific(values):
    entropy, _ = quadratic.entropy(values, TEMPERATURE)
    return (entropy < SPECIFIC_ENTROPY) & (values.max(0) >= ACTIVATED), entropy


@pytest.mark.parametrize("correction", BiasCorrection)
def test_rates_of_heavy_tailed_noise_equal_a_float64_simulation(correction):
    rng, beta, values = np.random.default_rng(0), 0.9, heavy_tails(16)
    options = {"beta": beta, "temperature": TEMPERATURE, "correction": correction}
    noise = noise_commitment(values, steps=(10, 16), **options)
    average, owners, marks = np.zeros((3, 30_000)), [], []
    for step in range(1, 17):
        drawn = values[rng.integers(16, size=30_000), :, np.arange(30_000)].T
        average = beta * average + (1 - beta) * rng.permuted(drawn, axis=0)
        if step in (10, 16):
            owners.append(average.argmax(0))
            divisor = 1 - beta**step if correction is BiasCorrection.ADAM else 1
            marks.append(specific(average / divisor)[0])
    assert noise.specific == pytest.approx(marks[0].sum(), rel=0.1)
    assert noise.rate == pytest.approx((owners[0] == owners[1])[marks[0]].mean(), abs=0.03)
    assert 0.5 < noise.rate < 0.95


def test_specialty_of_noise_equals_a_float64_simulation_and_has_no_preference():
    # Each parameter prefers task 1, which noise must not.
    drawn = heavy_tails(4) * np.array([1.0, 9.0, 1.0])[:, None]
    counts = noise_specialty(drawn, temperature=TEMPERATURE)
    mean = np.random.default_rng(1).permuted(drawn, axis=1).mean(axis=0)
    mean /= np.sort(mean, axis=1)[:, (30_000 - 1) // 2, None]
    is_specific, entropy = specific(mean)
    assert counts.share(Specialty.SPECIFIC) == pytest.approx(is_specific.mean(), rel=0.05)
    activated = mean.max(0) >= ACTIVATED
    assert counts.mean_entropy == pytest.approx(entropy[activated].mean(), rel=0.05)
    by_task = counts.specific_by_task()
    assert by_task.max() < 1.1 * by_task.min()
    assert noise_specialty(UNKNOWN, temperature=TEMPERATURE) is None


@pytest.mark.parametrize("over", MedianOver)
def test_noise_of_tasks_that_are_alike_is_what_is_measured_of_them(over):
    """Measured are totals over their median; each batch of the sample has its own median."""
    rng = np.random.default_rng(3)
    raw = np.exp(1.5 * rng.normal(size=(8, 3, 30_000)) + rng.normal(size=(1, 1, 30_000)))
    if over is MedianOver.NONZERO:
        # Rows of a vocabulary that no batch touches.
        raw[:, :, ::3] = 0

    def in_medians(values):
        counted = [row if over is MedianOver.ALL else row[row > 0] for row in values]
        return values / np.array([[np.sort(row)[(len(row) - 1) // 2]] for row in counted])

    is_specific, _ = specific(in_medians(raw.sum(axis=0)))
    sample = np.stack([in_medians(batch) for batch in raw])
    counts = noise_specialty(sample, temperature=TEMPERATURE, over=over)
    assert counts.share(Specialty.SPECIFIC) == pytest.approx(is_specific.mean(), rel=0.06)
