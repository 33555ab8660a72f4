import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.evaluation.specialty.float_bins import (
    NUM_BINS,
    bin_edges,
    bin_of,
    kernel_density,
    quantile,
    share_below,
)

EDGES = bin_edges()


def counts_of(values):
    return np.bincount(np.asarray(bin_of(jnp.asarray(values, jnp.float32))), minlength=NUM_BINS)


def test_worked_example():
    found = bin_of(jnp.array([0.0, 1e-9, 2.0**-20, 1.0, 1.06, 1.0625, 2.0, 1e30, jnp.inf]))
    last = NUM_BINS - 1
    assert found.tolist() == [0, 0, 1, 321, 321, 322, 337, last, last]
    assert EDGES[321] == 1
    assert EDGES[322] == 1.0625
    assert EDGES[337] == 2
    assert len(EDGES) == NUM_BINS + 1


def test_every_value_lies_between_its_edges():
    values = np.exp(np.random.default_rng(0).normal(scale=8, size=5000)).astype(np.float32)
    values = np.concatenate([values, EDGES[:-1].astype(np.float32)])
    place = np.asarray(bin_of(jnp.asarray(values)))
    assert (EDGES[place] <= values).all()
    assert (values < EDGES[place + 1]).all()


def test_shares_and_quantiles_are_those_of_the_values_to_a_bin():
    values = np.exp(np.random.default_rng(1).normal(size=20_000))
    counts = counts_of(values)
    for value in (0.1, 1.0, 6.0):
        assert share_below(counts, value) == pytest.approx((values < value).mean(), abs=2e-3)
    assert share_below(counts, 6.0) == (values.astype(np.float32) < 6).mean()
    for share in (0.01, 0.5, 0.99):
        assert quantile(counts, share) == pytest.approx(np.quantile(values, share), rel=0.02)


def test_quantiles_by_hand():
    counts = counts_of([1.0] * 4 + [2.0] * 4)  # bins [1, 1.0625) and [2, 2.125)
    assert quantile(counts, 0.25) == 1.03125
    assert quantile(counts, 0.75) == 2.0625
    assert quantile(counts_of([1e9]), 0.5) == 2.0**20


def test_density_equals_a_gaussian_kernel_estimate_mirrored_at_zero():
    values = np.random.default_rng(2).gamma(2.0, size=4000)
    at, bandwidth = np.linspace(0, 6, 31), 0.2

    def kernel(x):
        return np.exp(-0.5 * (x / bandwidth) ** 2) / (bandwidth * np.sqrt(2 * np.pi))

    wanted = (kernel(at[:, None] - values) + kernel(at[:, None] + values)).mean(1)
    found = kernel_density(counts_of(values), at, bandwidth=bandwidth)
    np.testing.assert_allclose(found, wanted, rtol=0.03, atol=2e-3)


def test_density_integrates_to_the_share_that_is_in_a_finite_bin():
    counts = counts_of([0.0, 0.5, 1.0, 2.0, 1e9])
    at = np.linspace(0, 6, 601)
    density = kernel_density(counts, at, bandwidth=0.1)
    assert np.trapezoid(density, at) == pytest.approx(0.8, abs=1e-4)
