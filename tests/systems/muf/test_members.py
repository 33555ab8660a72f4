"""Ensembles: shapes, PyTorch's initialisation, members that do not depend on their number."""

import jax
import numpy as np
import pytest

from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.members import EnsembleConfig, apply_members, init_members

CONFIG = EnsembleConfig(members=3, hidden_dims=(6, 5))


def init(members, seed=0):
    return init_members(jax.random.key(seed), dim=4, config=CONFIG, members=members)


def test_parameters_of_the_papers_ensemble():
    # 768·512 + 512 + 512·512 + 512 + 512·768 + 768
    assert EnsembleConfig().parameters(768) == 1_050_368
    leaves = jax.tree.leaves(init(3))
    assert sum(leaf.size for leaf in leaves) == 3 * CONFIG.parameters(4)


def test_equals_float64():
    params = init(3)
    queries = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    found = np.asarray(apply_members(params, queries))
    assert found.shape == (3, 7, 4)
    for member in range(3):
        hidden = queries.astype(np.float64)
        for place in range(3):
            kernel, bias = (
                np.asarray(params[f"layers_{place}"][name][member], np.float64)
                for name in ("kernel", "bias")
            )
            hidden = hidden @ kernel + bias
            hidden = np.maximum(hidden, 0) if place < 2 else hidden
        np.testing.assert_allclose(found[member], hidden, atol=1e-6)


def test_the_first_members_of_more_are_the_same():
    few, many = init(3), init(40)
    for small, large in zip(jax.tree.leaves(few), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(small, large[:3])
    first, second = (
        leaf[0] for leaf in (few["layers_0"]["kernel"], init(3, 1)["layers_0"]["kernel"])
    )
    assert np.abs(first - second).max() > 0.1


def test_weights_are_drawn_as_pytorch_draws_them():
    wide = init_members(
        jax.random.key(0), dim=64, config=EnsembleConfig(hidden_dims=(256,)), members=4
    )
    for layer, inputs in (("layers_0", 64), ("layers_1", 256)):
        bound = inputs**-0.5
        for leaf in wide[layer].values():
            values = np.asarray(leaf)
            assert np.abs(values).max() <= bound
            # A uniform distribution's standard deviation.
            assert values.std() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_an_ensemble_has_two_members_at_least():
    with pytest.raises(ConfigError, match="two members or more"):
        EnsembleConfig(members=1)
    with pytest.raises(ConfigError, match="widths of at least 1"):
        EnsembleConfig(hidden_dims=(0,))
