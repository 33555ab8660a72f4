import numpy as np
import pytest

from taser_jax.evaluation.specialty import BINS_PER_MEDIAN, NUM_BINS
from taser_jax.evaluation.specialty_report import LARGEST_SHOWN, sensitivity_density


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
