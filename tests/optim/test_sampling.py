import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.optim.sampling import SHARE, sample, sample_share


def numbered(*shape):
    """Entries that are their own places, the same for both tasks."""
    places = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    return jnp.stack([places, places])


def test_worked_example():
    leaf = numbered(1024, 256)
    first, second = sample([leaf, leaf], share=64)
    np.testing.assert_array_equal(first, leaf[:, :32, :128])
    np.testing.assert_array_equal(second, leaf[:, 40:72, 128:])


def test_long_arrays_are_sampled_all_along():
    (found,) = sample([numbered(10240, 128)], share=64)
    rows = np.asarray(found[0, :, 0]) // 128
    np.testing.assert_array_equal(rows[::16], np.arange(10) * 1024)
    np.testing.assert_array_equal(rows[:16], np.arange(16))


SHAPES = [(30000, 16), (300, 3000), (768, 12, 64), (12, 64, 768), (768, 768)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_about_one_of_share_entries_is_taken_once(shape):
    found = np.asarray(sample([numbered(*shape)], share=SHARE)[0][0]).reshape(-1)
    assert len(set(found)) == len(found)
    assert 0.5 < len(found) * SHARE / np.prod(shape) < 2


def test_small_arrays_are_left_out_and_so_are_arrays_beyond_the_most():
    leaves = [numbered(64, 256), numbered(30), numbered()]
    assert len(sample(leaves, share=64)) == 1
    assert sample(leaves[1:], share=64) == []
    many = [leaves[0] + place for place in range(10)]
    kept = sample(many, share=64, most=4)
    jax.tree.map(np.testing.assert_array_equal, kept, sample(many[::3], share=64))


def test_share_one_takes_all_and_small_models_have_it():
    leaf = numbered(7, 3)
    assert sample_share([leaf]) == 1
    assert sample([leaf], share=1)[0] is leaf
    assert sample_share([jnp.zeros((2, 1024, 512)), jnp.zeros((2, 1024, 512))]) == SHARE
