"""Rows put together from others, and mixes of queries: by hand."""

import numpy as np
import pytest

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.tables import MixedConfig, draw_mixes, mix


def evaluation(task, values):
    ids = tuple(f"{task}{i}" for i in range(len(values)))
    return Evaluation(ids, {"R@1": np.array(values, float)})


ROW = {"x": evaluation("x", [1, 1, 0, 1]), "y": evaluation("y", [0, 0])}


def test_mixes_have_equal_shares_without_repetition():
    config = MixedConfig(sets=3, queries=4)
    draws = draw_mixes({"x": 4, "y": 2}, config)
    assert len(draws) == 3
    for draw in draws:
        assert [len(set(lines.tolist())) for lines in draw.values()] == [2, 2]
    assert draw_mixes({"x": 4, "y": 2}, config)[2]["x"].tolist() == draws[2]["x"].tolist()
    mixed = mix(ROW, draws)
    assert list(mixed) == ["mix 1", "mix 2", "mix 3"]
    first = draws[0]
    expected = [ROW[task].values["R@1"][line] for task in first for line in first[task]]
    assert mixed["mix 1"].values["R@1"].tolist() == expected
    assert mixed["mix 1"].query_ids[0] == f"x:x{first['x'][0]}"


@pytest.mark.parametrize(
    "config",
    [MixedConfig(queries=6), MixedConfig(queries=3), MixedConfig(queries=4, tasks=("x", "z"))],
)
def test_mixes_that_cannot_be_drawn(config):
    with pytest.raises(ConfigError, match="take equal shares of known tasks"):
        draw_mixes({"x": 4, "y": 2}, config)
