"""Sensitivities, specialty and commitment against float64 oracles, on one device and eight."""

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
    Commitment,
    Specialty,
    add_up,
    commitments,
    count_leaf,
    entropy_edges,
    make_measures,
    most_sensitive_task,
    sensitivity,
    specialty_of,
    task_entropy,
    total_sensitivities,
)
from taser_jax.optim.median import MedianOver
from taser_jax.storage.errors import DataError

PARAMS = quadratic.tree(np.random.default_rng(7))
SILENT, SPECIFIC, SHARED = Specialty
TEMPERATURE = 2.0


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
        name: count_leaf(
            tuple(tree[name] for tree in placed),
            medians,
            temperature=temperature,
            sharding=placed[0][name].sharding,
        )
        for name in values
    }


def test_entropy_of_the_papers_bound():
    """95% on one task and 5% on the other seven are just inside 0.3 nats."""
    weights = jnp.array([0.95, *[0.05 / 7] * 7])
    assert float(task_entropy(2 * jnp.log(weights), 2.0)) == pytest.approx(0.2958, abs=1e-4)
    assert float(task_entropy(jnp.ones(8), 2.0)) == pytest.approx(math.log(8))


def test_worked_example():
    """Three tasks; I of four parameters, at τ = 2.

    (8, 0, 0): softmax of (4, 0, 0) is (0.9647, 0.0177, 0.0177), entropy 0.1774: specific to 0.
    (0, 5, 0): softmax of (0, 2.5, 0) gives 0.5046 nats: shared. (1, 1, 1): ln 3, shared, and
    nobody's. (0.05, 0.09, 0): not activated.
    """
    values = jnp.array([[8.0, 0, 1, 0.05], [0, 5, 1, 0.09], [0, 0, 1, 0]])
    entropy = task_entropy(values, 2.0)
    np.testing.assert_allclose(entropy[:3], [0.1774, 0.5046, math.log(3)], atol=1e-4)
    kinds = specialty_of(values, entropy)
    assert kinds.tolist() == [SPECIFIC, SHARED, SHARED, SILENT]
    assert most_sensitive_task(values).tolist() == [0, 1, 3, 1]
    sharding = quadratic.put({"bias": np.zeros(16)})["bias"].sharding
    counts = count_leaf(tuple(values * 3), jnp.full(3, 3.0), temperature=2.0, sharding=sharding)
    assert counts.size == 4
    assert counts.specialty.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]]
    # Not activated parameters have no entropy bin; ln 3 is in the last one.
    assert counts.entropy.tolist() == [1, 0, 0, 0, 1, *[0] * 7, 1]
    assert counts.mean_entropy == pytest.approx((0.1774 + 0.5046 + math.log(3)) / 3, abs=1e-3)
    assert counts.share(Specialty.SPECIFIC) == 0.25
    assert counts.specific_by_task().tolist() == [0.25, 0, 0]
    # Task 1 has the values 0, 5, 1, 0.09, in tenths.
    assert np.flatnonzero(counts.sensitivity[1]).tolist() == [0, 10, 50]


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
    leaf = jax.tree.map(lambda a: np.full_like(a, 2**31 - 1, np.int32), count(draw())["bias"])
    assert add_up([leaf, leaf]).entropy[0] == 2**32 - 2


def measured(params, batches, *, losses=quadratic.LOSSES, over=MedianOver.ALL):
    measures = make_measures(losses)
    return total_sensitivities(measures, params, batches, checkpoint="step 4", over=over)


def flat(found):
    return np.stack([quadratic.flat(tree) for tree in found.totals.values()])


def test_totals_by_hand():
    """Gradients (3, 1), then (−1, 2), at θ = (1, −2): totals 3 + 1 and 2 + 4, lower median 4."""
    params = quadratic.put({"bias": np.array([1.0, -2.0], np.float32)})
    losses = {"only": lambda params, batch: jnp.vdot(params["bias"], batch)}
    batches = [{"only": jnp.array([3.0, 1.0])}, {"only": jnp.array([-1.0, 2.0])}]
    found = measured(params, batches, losses=losses)
    assert found.totals["only"]["bias"].tolist() == [4, 6]
    assert found.medians.tolist() == [4]


@pytest.mark.parametrize("over", MedianOver)
def test_totals_and_medians_equal_a_float64_oracle(over):
    batches = quadratic.batches(4)
    found = measured(quadratic.put(PARAMS), batches, over=over)
    wanted = sum(quadratic.sensitivities(PARAMS, batch) for batch in batches)
    np.testing.assert_allclose(flat(found), wanted, rtol=2e-4, atol=1e-6)
    medians = quadratic.lower_medians(flat(found), nonzero=over is MedianOver.NONZERO)
    np.testing.assert_array_equal(found.medians, medians[:, 0].astype(np.float32))
    assert list(found.leaves()) == ["bias", "kernel", "scale"]
    assert found.leaves()["kernel"][1] is found.totals["fever"]["kernel"]


def test_eight_devices_measure_what_one_does_and_keep_the_parameters_shardings():
    batches = quadratic.batches(3)
    one = measured(quadratic.put(PARAMS), batches)
    placed = quadratic.put(PARAMS, 8)
    eight = measured(placed, batches)
    np.testing.assert_array_equal(flat(eight), flat(one))
    np.testing.assert_array_equal(eight.medians, one.medians)
    for tree in eight.totals.values():
        for name, leaf in tree.items():
            assert leaf.sharding.is_equivalent_to(placed[name].sharding, leaf.ndim)


def test_it_is_the_first_order_change_of_the_loss_when_a_parameter_is_zeroed():
    params = {"scale": jnp.float32(0.01), "bias": jnp.zeros(2)}

    def loss(params, batch):
        return batch * jnp.sin(params["scale"]) + jnp.sum(params["bias"])

    found = sensitivity(loss, params, 3.0)
    zeroed = loss({**params, "scale": 0.0}, 3.0)
    assert float(found["scale"]) == pytest.approx(float(loss(params, 3.0) - zeroed), rel=1e-3)
    assert not np.any(found["bias"])


def test_gradients_that_are_not_finite_name_the_task():
    batches = quadratic.batches(2)
    batches[1]["fever"]["c"]["bias"][0] = np.nan
    with pytest.raises(DataError, match="step 4: gradients of fever are not finite"):
        measured(quadratic.put(PARAMS), batches)


def test_a_median_of_zero_says_what_to_do():
    batches = quadratic.batches(2)
    for batch in batches:
        batch["wow"]["a"] = jax.tree.map(np.zeros_like, batch["wow"]["a"])
        batch["wow"]["a"]["scale"] = np.float32(1)
    with pytest.raises(
        DataError, match=r"(?s)step 4: the median sensitivity to wow is 0.*median_over='nonzero'"
    ):
        measured(quadratic.put(PARAMS), batches)
    found = measured(quadratic.put(PARAMS), batches, over=MedianOver.NONZERO)
    assert float(found.medians[2]) == found.totals["wow"]["scale"]


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
    return commitments(
        ((40 * number, of_step) for number, of_step in enumerate(placed, 1)),
        temperature=TEMPERATURE,
    )


def test_commitment_by_hand():
    """Averages of five parameters; 0, 1, 2 and 4 are specific at first, and 0 and 2 stay."""
    first = jnp.array([[9.0, 0, 0, 1, 9], [0, 9, 9, 1, 0]])
    second = jnp.array([[9.0, 9, 0, 9, 2], [0, 0, 1, 0, 2]])
    averages = [
        (5, {"a": (first[0],), "b": (first[1],)}),
        (9, {"a": (second[0],), "b": (second[1],)}),
    ]
    assert commitments(averages, temperature=TEMPERATURE) == [Commitment(5, 9, 4, 2)]
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
