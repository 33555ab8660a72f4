import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.specialty import (
    ACTIVATED,
    BINS_PER_MEDIAN,
    NUM_BINS,
    SHARED_BINS,
    SPECIFIC_ENTROPY,
    Specialty,
    add_up,
    count_leaf,
    entropy_edges,
    most_sensitive_task,
    on_host,
    specialty_of,
    task_entropy,
    task_weights,
)
from taser_jax.evaluation.specialty_report import LARGEST_SHOWN, sensitivity_density

SILENT, SPECIFIC, SHARED = range(3)


def draw(seed=0, tasks=3):
    """A total a task of each leaf; a quarter of the values small, some of them all 0."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in quadratic.SHAPES.items():
        values = np.exp(2 * rng.normal(size=(tasks, *shape))).astype(np.float32)
        small = rng.uniform(size=shape) < 0.25
        values = np.where(small, values * np.float32(1e-3), values)
        found[name] = np.where(rng.uniform(size=shape) < 0.1, np.float32(0), values)
    return found


def count(values, *, devices=1, medians=None, temperature=2.0):
    """Counts of each leaf."""
    tasks = len(values["bias"])
    medians = np.ones(tasks, np.float32) if medians is None else medians
    placed = [
        quadratic.put({name: leaf[task] for name, leaf in values.items()}, devices)
        for task in range(tasks)
    ]
    return {
        name: on_host(
            count_leaf(
                tuple(tree[name] for tree in placed),
                medians,
                temperature=temperature,
                sharding=placed[0][name].sharding,
            )
        )
        for name in values
    }


def test_entropy_of_the_papers_bound():
    """95% on one task and 5% on the other seven are just inside 0.3 nats."""
    weights = jnp.array([0.95, *[0.05 / 7] * 7])
    assert float(task_entropy(weights)) == pytest.approx(0.2958, abs=1e-4)
    assert float(task_entropy(jnp.full(8, 1 / 8))) == pytest.approx(math.log(8))


def test_worked_example():
    """Three tasks; I of four parameters, at τ = 2.

    (8, 0, 0): softmax of (4, 0, 0) is (0.9647, 0.0177, 0.0177), entropy 0.1774: specific to 0.
    (0, 5, 0): softmax of (0, 2.5, 0) gives 0.5046 nats: shared. (1, 1, 1): ln 3, shared, and
    nobody's. (0.05, 0.09, 0): not activated.
    """
    values = jnp.array([[8.0, 0, 1, 0.05], [0, 5, 1, 0.09], [0, 0, 1, 0]])
    entropy = task_entropy(task_weights(values, 2.0))
    np.testing.assert_allclose(entropy[:3], [0.1774, 0.5046, math.log(3)], atol=1e-4)
    kinds = specialty_of(values, entropy)
    assert kinds.tolist() == [SPECIFIC, SHARED, SHARED, SILENT]
    assert most_sensitive_task(values).tolist() == [0, 1, 3, 1]
    sharding = quadratic.put({"bias": np.zeros(16)})["bias"].sharding
    counts = on_host(
        count_leaf(
            tuple(values * 3),
            jnp.full(3, 3.0),
            temperature=2.0,
            sharding=sharding,
        )
    )
    assert counts.size == 4
    assert counts.specialty.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]]
    # Not activated parameters have no entropy bin; ln 3 is in the last one.
    assert counts.entropy.tolist() == [1, 0, 0, 0, 1, *[0] * 7, 1]
    assert counts.mean_entropy == pytest.approx((0.1774 + 0.5046 + math.log(3)) / 3, abs=1e-3)
    assert counts.share(Specialty.SPECIFIC) == 0.25
    assert counts.specific_by_task().tolist() == [0.25, 0, 0]
    # Task 1 has the values 0, 5, 1, 0.09.
    assert np.flatnonzero(counts.sensitivity[1]).tolist() == [0, 3, 40, 200]


@pytest.mark.parametrize("temperature", [2.0, 8.0])
def test_everything_equals_a_float64_oracle(temperature):
    values = draw()
    medians = np.array([0.5, 1.0, 3.0], np.float32)
    counts = add_up(count(values, medians=medians, temperature=temperature).values())
    single = np.concatenate([v.reshape(3, -1) for v in values.values()], 1) / medians[:, None]
    edges = np.append(np.arange(NUM_BINS) / BINS_PER_MEDIAN, np.inf)
    wanted = [np.histogram(row, edges)[0] for row in single]
    np.testing.assert_array_equal(counts.sensitivity, wanted)
    flat = single.astype(np.float64)
    activated = flat.max(0) >= ACTIVATED
    owner = np.where((flat == flat.max(0)).sum(0) == 1, flat.argmax(0), 3)
    entropy, _ = quadratic.entropy(flat, temperature)
    specific = entropy < SPECIFIC_ENTROPY
    kind = np.where(activated, np.where(specific, SPECIFIC, SHARED), SILENT)
    wanted = np.zeros((3, 4), int)
    np.add.at(wanted, (kind, owner), 1)
    np.testing.assert_array_equal(counts.specialty, wanted)
    assert set(kind.tolist()) == {SILENT, SPECIFIC, SHARED}
    bins, _ = np.histogram(entropy[activated], entropy_edges(3))
    assert np.abs(counts.entropy - bins).sum() <= 2
    assert counts.entropy_sum == pytest.approx(entropy[activated].sum(), rel=1e-5)


def test_eight_devices_count_what_one_counts():
    one, eight = count(draw()), count(draw(), devices=8)
    for name in quadratic.SHAPES:
        for field, mine, its in zip(one[name]._fields, one[name], eight[name], strict=True):
            if field.endswith("_sum"):
                np.testing.assert_allclose(its, mine, rtol=1e-5, err_msg=name)
            else:
                np.testing.assert_array_equal(its, mine, err_msg=f"{name} {field}")


def test_no_device_gets_more_than_its_part_of_a_leaf():
    """The compiled count has no collective but sums, and no array with the whole leaf's entries."""
    placed = quadratic.put({"kernel": np.zeros((24, 16), np.float32)}, 8)["kernel"]
    program = count_leaf.lower(
        (placed,) * 3,
        jnp.ones(3),
        temperature=2.0,
        sharding=placed.sharding,
    ).compile()
    text = program.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert "24,16]" not in text


def test_the_bound_of_specific_is_an_edge():
    edges = entropy_edges(8)
    assert len(edges) == SHARED_BINS + 2
    assert edges[:2].tolist() == [0, 0.3]
    assert edges[-1] == pytest.approx(math.log(8))


def test_counts_of_leaves_beyond_two_billion_add_up():
    leaf = jax.tree.map(lambda a: np.full_like(a, 2**31 - 1, np.int64), count(draw())["bias"])
    assert add_up([leaf, leaf]).entropy[0] == 2**32 - 2


def counts_of(values):
    edges = np.append(np.arange(NUM_BINS) / BINS_PER_MEDIAN, np.inf)
    return np.histogram(values, edges)[0]


def test_density_equals_a_gaussian_kernel_estimate_mirrored_at_zero():
    values = np.random.default_rng(2).gamma(2.0, size=4000)
    bandwidth = LARGEST_SHOWN / 40

    def kernel(x):
        return np.exp(-0.5 * (x / bandwidth) ** 2) / (bandwidth * np.sqrt(2 * np.pi))

    axis, density = sensitivity_density(counts_of(values))
    wanted = (kernel(axis[:, None] - values) + kernel(axis[:, None] + values)).mean(1)
    np.testing.assert_allclose(density, wanted, rtol=0.01, atol=1e-3)


def test_density_integrates_to_the_share_of_values_that_are_shown():
    axis, density = sensitivity_density(counts_of([0.0, 0.5, 1.0, 2.0, 1e9]))
    assert (axis[0], axis[-1]) == (0, LARGEST_SHOWN)
    assert np.trapezoid(density, axis) == pytest.approx(0.8, abs=1e-3)
