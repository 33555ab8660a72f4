import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.sensitivity import (
    make_measures,
    sensitivity,
    total_sensitivities,
)
from taser_jax.optim.median import MedianOver
from taser_jax.storage.errors import DataError

PARAMS = quadratic.tree(np.random.default_rng(7))


def measured(params, batches, *, losses=quadratic.LOSSES, over=MedianOver.ALL):
    measures = make_measures(losses, over=over)
    return total_sensitivities(measures, params, batches, checkpoint="step 4", over=over)


def flat(found):
    return np.stack([quadratic.flat(tree) for tree in found.totals.values()])


def test_worked_example():
    """Gradients (3, 1), then (−1, 2), at θ = (1, −2): totals 3 + 1 and 2 + 4, lower median 4."""
    params = quadratic.put({"bias": np.array([1.0, -2.0], np.float32)})
    losses = {"only": lambda params, batch: jnp.vdot(params["bias"], batch)}
    batches = [{"only": jnp.array([3.0, 1.0])}, {"only": jnp.array([-1.0, 2.0])}]
    found = measured(params, batches, losses=losses)
    assert found.totals["only"]["bias"].tolist() == [4, 6]
    assert found.medians.tolist() == [4]


@pytest.mark.parametrize("over", MedianOver)
def test_it_equals_a_float64_oracle(over):
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
