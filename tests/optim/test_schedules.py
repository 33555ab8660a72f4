import numpy as np
import pytest

from taser_jax.optim.optimizers import OptimizerConfig, build_schedule
from taser_jax.storage.errors import ConfigError


def rates(steps, *, total_steps, **settings):
    schedule = build_schedule(OptimizerConfig(**settings), total_steps)
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 2, "floor": 0.1}, [0, 0.5, 1, 0.75, 0.5, 0.25, 0.1, 0.1]),
        # A floor of 1 keeps the rate; without a warm-up the first step has the peak rate.
        ({"warmup_steps": 2, "floor": 1.0}, [0, 0.5, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 0}, [1, 5 / 6, 4 / 6]),
    ],
)
def test_linear_by_hand(settings, expected):
    steps = range(len(expected))
    found = rates(steps, learning_rate=1.0, total_steps=6, **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [{"warmup_steps": 5}, {"warmup_steps": -1}, {"learning_rate": -1.0}, {"floor": -0.1}],
)
def test_impossible_numbers(wrong):
    with pytest.raises(ConfigError):
        rates([0], total_steps=4, **wrong)
