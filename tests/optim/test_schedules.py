import numpy as np
import pytest

from taser_jax.optim.optimizers import OptimizerConfig, build_schedule
from taser_jax.storage.errors import ConfigError


def rates(steps, *, total_steps, **settings):
    schedule = build_schedule(OptimizerConfig(**settings), total_steps)
    return [float(schedule(step)) for step in steps]


def test_linear_by_hand():
    found = rates(range(9), learning_rate=1.0, warmup_steps=2, total_steps=6, floor=0.1)
    np.testing.assert_allclose(found, [0, 0.5, 1, 0.75, 0.5, 0.25, 0.1, 0.1, 0.1], rtol=1e-6)


def test_a_floor_of_1_keeps_the_rate():
    found = rates(range(5), learning_rate=0.4, floor=1.0, warmup_steps=2, total_steps=4)
    np.testing.assert_allclose(found, [0, 0.2, 0.4, 0.4, 0.4], rtol=1e-6)


def test_without_warmup_the_first_step_has_the_peak_rate():
    assert rates([0], learning_rate=0.4, total_steps=4) == [pytest.approx(0.4)]


def test_equals_dprs_formula_over_a_run():
    peak, warmup, total = 2e-5, 1237, 40_000

    def formula(step):
        if step < warmup:
            return peak * step / warmup
        return peak * max(1e-7, (total - step) / (total - warmup))

    steps = [0, 1, 600, 1236, 1237, 1238, 20_000, 39_999, 40_000, 50_000]
    found = rates(steps, learning_rate=peak, warmup_steps=warmup, total_steps=total)
    np.testing.assert_allclose(found, [formula(step) for step in steps], rtol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [{"warmup_steps": 5}, {"warmup_steps": -1}, {"learning_rate": -1.0}, {"floor": -0.1}],
)
def test_impossible_numbers(wrong):
    with pytest.raises(ConfigError):
        rates([0], total_steps=4, **wrong)
