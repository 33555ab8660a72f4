"""Sensitivities and specialty against float64 oracles, on one device and eight."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic
from tiny_models import assert_close

from taser_jax.evaluation import specialty
from taser_jax.optim.median import MedianOver
from taser_jax.storage.errors import DataError

PARAMS = quadratic.tree(np.random.default_rng(7))
SILENT, SPECIFIC, SHARED = specialty.Specialty
TEMPERATURE = 2.0


def draw():
    """A total a task of each leaf; a quarter of the values small, some of them all 0."""
    rng = np.random.default_rng(0)
    totals = {}
    for name, shape in quadratic.SHAPES.items():
        values = np.exp(2 * rng.normal(size=(3, *shape))).astype(np.float32)
        values = np.where(rng.uniform(size=shape) < 0.25, values * np.float32(1e-3), values)
        totals[name] = np.where(rng.uniform(size=shape) < 0.1, np.float32(0), values)
    return totals


def count(values, *, devices=1, medians=np.ones(3, np.float32), temperature=2.0):
    """Counts of each leaf."""
    placed = [
        quadratic.put({name: leaf[task] for name, leaf in values.items()}, devices)
        for task in range(3)
    ]
    return {
        name: specialty.count_leaf(
            tuple(tree[name] for tree in placed),
            medians,
            temperature=temperature,
            sharding=placed[0][name].sharding,
        )
        for name in values
    }


def test_worked_example():
    """Three tasks; I of four parameters, at τ = 2.

    (8, 0, 0): softmax of (4, 0, 0) is (0.9647, 0.0177, 0.0177), entropy 0.1774: specific to 0.
    (0, 5, 0): softmax of (0, 2.5, 0) gives 0.5046 nats: shared. (1, 1, 1): ln 3, shared, and
    nobody's. (0.05, 0.09, 0): not activated.
    """
    values = jnp.array([[8.0, 0, 1, 0.05], [0, 5, 1, 0.09], [0, 0, 1, 0]])
    sharding = quadratic.put({"bias": np.zeros(16)})["bias"].sharding
    counts = specialty.count_leaf(
        tuple(values * 3), jnp.full(3, 3.0), temperature=2.0, sharding=sharding
    )
    assert counts.size == 4
    assert counts.specialty.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]]
    # Not activated parameters have no entropy bin; ln 3 is in the last one.
    assert counts.entropy.tolist() == [1, 0, 0, 0, 1, *[0] * 7, 1]
    assert counts.mean_entropy == pytest.approx((0.1774 + 0.5046 + math.log(3)) / 3, abs=1e-3)
    assert counts.share(specialty.Specialty.SPECIFIC) == 0.25
    assert counts.specific_by_task().tolist() == [0.25, 0, 0]
    # Task 1 has the values 0, 5, 1, 0.09, in tenths.
    assert np.flatnonzero(counts.sensitivity[1]).tolist() == [0, 10, 50]


@pytest.mark.parametrize("temperature", [2.0, 8.0])
def test_everything_equals_a_float64_oracle(temperature):
    values = draw()
    medians = np.array([0.5, 1.0, 3.0], np.float32)
    counts = specialty.add_up(count(values, medians=medians, temperature=temperature).values())
    single = np.concatenate([v.reshape(3, -1) for v in values.values()], 1) / medians[:, None]
    edges = np.append(np.arange(specialty.NUM_BINS) / specialty.BINS_PER_MEDIAN, np.inf)
    expected = [np.histogram(row, edges)[0] for row in single]
    np.testing.assert_array_equal(counts.sensitivity, expected)
    flat = single.astype(np.float64)
    activated = flat.max(0) >= specialty.ACTIVATED
    owner = np.where((flat == flat.max(0)).sum(0) == 1, flat.argmax(0), 3)
    entropy, _ = quadratic.entropy(flat, temperature)
    specific = entropy < specialty.SPECIFIC_ENTROPY
    kind = np.where(activated, np.where(specific, SPECIFIC, SHARED), SILENT)
    expected = np.zeros((3, 4), int)
    np.add.at(expected, (kind, owner), 1)
    np.testing.assert_array_equal(counts.specialty, expected)
    assert set(kind.tolist()) == {SILENT, SPECIFIC, SHARED}
    bins, _ = np.histogram(entropy[activated], specialty.entropy_edges(3))
    assert np.abs(counts.entropy - bins).sum() <= 2
    assert counts.entropy_sum == pytest.approx(entropy[activated].sum(), rel=1e-5)


def test_eight_devices_count_what_one_counts():
    # Counts are too small to differ by this and not be equal; sums of entropies round.
    assert_close(count(draw(), devices=8), count(draw()), rtol=1e-5, atol=0)


def test_no_device_gets_more_than_its_part_of_a_leaf():
    """The compiled count has no collective but sums, and no array with the whole leaf's entries."""
    placed = quadratic.put({"kernel": np.zeros((24, 16), np.float32)}, 8)["kernel"]
    options = {"temperature": 2.0, "sharding": placed.sharding}
    text = specialty.count_leaf.lower((placed,) * 3, jnp.ones(3), **options).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert "24,16]" not in text


def test_counts_of_leaves_beyond_two_billion_add_up():
    leaf = jax.tree.map(lambda a: np.full_like(a, 2**31 - 1, np.int32), count(draw())["bias"])
    assert specialty.add_up([leaf, leaf]).entropy[0] == 2**32 - 2


def measured(params, batches, *, losses=quadratic.LOSSES, over=MedianOver.ALL):
    measures = specialty.make_measures(losses)
    return specialty.total_sensitivities(measures, params, batches, checkpoint="step 4", over=over)


def flat(sensitivities):
    return np.stack([quadratic.flat(tree) for tree in sensitivities.totals.values()])


def test_totals_by_hand():
    """Gradients (3, 1), then (−1, 2), at θ = (1, −2): totals 3 + 1 and 2 + 4, lower median 4."""
    params = quadratic.put({"bias": np.array([1.0, -2.0], np.float32)})
    losses = {"only": lambda params, batch: jnp.vdot(params["bias"], batch)}
    batches = [{"only": jnp.array([3.0, 1.0])}, {"only": jnp.array([-1.0, 2.0])}]
    sensitivities = measured(params, batches, losses=losses)
    assert sensitivities.totals["only"]["bias"].tolist() == [4, 6]
    assert sensitivities.medians.tolist() == [4]


@pytest.mark.parametrize("over", MedianOver)
def test_totals_and_medians_equal_a_float64_oracle(over):
    batches = quadratic.batches(4)
    sensitivities = measured(quadratic.put(PARAMS), batches, over=over)
    expected = sum(quadratic.sensitivities(PARAMS, batch) for batch in batches)
    np.testing.assert_allclose(flat(sensitivities), expected, rtol=2e-4, atol=1e-6)
    medians = quadratic.lower_medians(flat(sensitivities), nonzero=over is MedianOver.NONZERO)
    np.testing.assert_array_equal(sensitivities.medians, medians[:, 0].astype(np.float32))
    assert list(sensitivities.leaves()) == ["bias", "kernel", "scale"]
    assert sensitivities.leaves()["kernel"][1] is sensitivities.totals["fever"]["kernel"]


def test_eight_devices_measure_what_one_does_and_keep_the_parameters_shardings():
    batches = quadratic.batches(3)
    on_one = measured(quadratic.put(PARAMS), batches)
    placed = quadratic.put(PARAMS, 8)
    on_eight = measured(placed, batches)
    np.testing.assert_array_equal(flat(on_eight), flat(on_one))
    np.testing.assert_array_equal(on_eight.medians, on_one.medians)
    for tree in on_eight.totals.values():
        for name, leaf in tree.items():
            assert leaf.sharding.is_equivalent_to(placed[name].sharding, leaf.ndim)


def test_it_is_the_first_order_change_of_the_loss_when_a_parameter_is_zeroed():
    params = {"scale": jnp.float32(0.01), "bias": jnp.zeros(2)}

    def loss(params, batch):
        return batch * jnp.sin(params["scale"]) + jnp.sum(params["bias"])

    sensitivities = specialty.sensitivity(loss, params, 3.0)
    zeroed = loss({**params, "scale": 0.0}, 3.0)
    assert float(sensitivities["scale"]) == pytest.approx(
        float(loss(params, 3.0) - zeroed), rel=1e-3
    )
    assert not np.any(sensitivities["bias"])


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
    sensitivities = measured(quadratic.put(PARAMS), batches, over=MedianOver.NONZERO)
    assert float(sensitivities.medians[2]) == sensitivities.totals["wow"]["scale"]


def test_places_are_spread_evenly_over_all_parameters():
    params = [np.zeros((70, 100)), np.zeros(3_000), np.zeros(())]
    a, b, c = specialty.sampled_places(params, 1_000)
    assert len(a) + len(b) + len(c) == 1_000
    assert len(a) == pytest.approx(700, abs=2)
    assert all(len(set(at)) == len(at) for at in (a, b, c))
    assert (a.max() < 7_000, b.max() < 3_000) == (True, True)
    # Not the same few columns in every row.
    assert len(set(a % 100)) == 100
    everything = specialty.sampled_places(params, 10**6)
    assert [at.tolist() for at in everything] == [[*range(7_000)], [*range(3_000)], [0]]


@pytest.mark.parametrize(("devices", "sampled"), [(1, 10**6), (8, 60)])
def test_the_sample_holds_each_batchs_sensitivities_in_its_medians(devices, sampled):
    batches = quadratic.batches(3)
    measures = specialty.make_measures(quadratic.LOSSES, sampled=sampled)
    placed = quadratic.put(PARAMS, devices)
    sample = specialty.total_sensitivities(measures, placed, batches, checkpoint="here").sample
    places = specialty.sampled_places(jax.tree.leaves(PARAMS), sampled)
    starts = np.cumsum([0, *(leaf.size for leaf in PARAMS.values())])
    chosen = np.concatenate([at + start for at, start in zip(places, starts, strict=False)])
    expected = np.stack([quadratic.sensitivities(PARAMS, batch) for batch in batches])
    expected = np.stack([values / quadratic.lower_medians(values) for values in expected])
    assert sample.shape == (3, len(quadratic.TASKS), len(chosen))
    np.testing.assert_allclose(sample, expected[..., chosen], rtol=4e-4, atol=1e-6)
