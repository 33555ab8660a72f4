import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.commitment import (
    Marks,
    commitment_rows,
    compare,
    marks_of,
    noise_commitment,
)
from taser_jax.evaluation.sensitivity import (
    Sample,
    make_measures,
    sampled_places,
    total_sensitivities,
)

TEMPERATURE = 2.0
RNG = np.random.default_rng(7)
# Averages of heavy tails, of which the later ones keep a half.
EARLIER = {task: quadratic.stiffness(RNG) for task in quadratic.TASKS}
LATER = {
    task: jax.tree.map(lambda new, old: (new + old) / 2, quadratic.stiffness(RNG), EARLIER[task])
    for task in quadratic.TASKS
}


def placed(averages, devices=1):
    scaled = jax.tree.map(lambda leaf: 3 * leaf, averages)
    return {task: quadratic.put(scaled[task], devices) for task in quadratic.TASKS}


def marks(averages, devices=1):
    return marks_of(placed(averages, devices), TEMPERATURE)


def test_worked_example():
    """Six parameters, owners earlier and later; of the first four, specific, 1 and 3 stay: 50%."""
    specific = jnp.array([True] * 4 + [False] * 2)
    earlier = Marks(jnp.array([0, 1, 2, 1, 0, 2], jnp.int16), specific)
    later = Marks(jnp.array([0, 2, 2, 0, 0, 2], jnp.int16), ~specific)
    commitment = compare([earlier], [later])
    assert (commitment.specific, commitment.committed, commitment.rate) == (4, 2, 0.5)
    twice = compare([earlier, earlier], [later, later])
    assert (twice.specific, twice.committed) == (8, 4)


def test_no_task_specific_parameter_has_no_rate():
    none = Marks(jnp.zeros(3, jnp.int16), jnp.zeros(3, bool))
    assert np.isnan(compare([none], [none]).rate)


def test_counts_equal_a_float64_oracle_that_holds_everything():
    owners, specific = [], []
    for averages in (EARLIER, LATER):
        values = 3 * np.stack([quadratic.flat(averages[task]) for task in quadratic.TASKS])
        entropy, _ = quadratic.entropy(values, TEMPERATURE)
        specific.append((entropy < 0.3) & (values.max(0) >= 0.1))
        tied = (values == values.max(0)).sum(0) > 1
        owners.append(np.where(tied, len(quadratic.TASKS), values.argmax(0)))
    committed = specific[0] & (owners[0] == owners[1])
    commitment = compare(marks(EARLIER), marks(LATER))
    assert specific[0].sum() > 20
    assert 0 < committed.sum() < specific[0].sum()
    assert commitment.specific == specific[0].sum()
    assert commitment.committed == committed.sum()


def test_eight_devices_find_what_one_finds():
    then, now = marks(EARLIER, devices=8), marks(LATER, devices=8)
    # Each device marks its own part of the kernel.
    assert then[1].owner.addressable_shards[0].data.shape == (12, 4)
    assert compare(then, now) == compare(marks(EARLIER), marks(LATER))


def test_each_checkpoint_is_compared_with_the_one_before():
    values = np.random.default_rng(0).normal(10, 1, size=(4, 3, 100))
    sample = Sample(values, np.ones((4, 3)))
    silent = sample._replace(medians=np.zeros((4, 3)))
    first, second = placed(EARLIER), placed(LATER)
    rows = commitment_rows(
        "T-SAGE",
        [(40, first), (80, second), (120, second)],
        {40: sample, 80: sample, 120: silent},
        beta=0.9,
        temperature=TEMPERATURE,
    )
    assert [(row.model, row.earlier_step, row.step) for row in rows] == [
        ("T-SAGE", 40, 80),
        ("T-SAGE", 80, 120),
    ]
    assert rows[0].commitment == compare(marks(EARLIER), marks(LATER))
    assert rows[1].commitment.rate == 1
    # A batch without a median cannot be normalised: there is no noise to show.
    assert [row.noise is None for row in rows] == [False, True]


# At this temperature every entropy is 0: all parameters count as task-specific.
ALL_SPECIFIC = 1e-3


def noise(values, *, beta, steps, temperature=ALL_SPECIFIC):
    sample = Sample(values, np.ones(values.shape[:2]))
    return noise_commitment(sample, beta=beta, temperature=temperature, steps=steps)


@pytest.mark.parametrize("steps", [(30, 32), (30, 60)])
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
