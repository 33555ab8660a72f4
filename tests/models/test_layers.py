"""Products of every projection, dropout, and activations that stay with their devices."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_models import assert_close

from taser_jax.models.layers import Dropout, drop, kept, rows_product

SALT = jnp.array([123456789, 987654321], jnp.uint32)


def hashed(position, salt):
    """MurmurHash3's finaliser in Python's integers, with the second word in its middle."""
    word = (position * 0x9E3779B1 + int(salt[0])) % 2**32
    word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
    word = (word ^ (word >> 13) ^ int(salt[1])) * 0xC2B2AE35 % 2**32
    return word ^ (word >> 16)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 5)])
def test_a_position_decides_as_its_hash_does(shape):
    size = int(np.prod(shape))
    expected = [hashed(position, SALT) >= round(0.3 * 2**32) for position in range(size)]
    np.testing.assert_array_equal(kept(shape, SALT, rate=0.3), np.reshape(expected, shape))


def test_what_is_kept_is_scaled_and_the_gradient_has_the_same_mask():
    x = jax.random.normal(jax.random.key(0), (4, 33))
    mask = np.asarray(kept(x.shape, SALT, rate=0.25))
    assert 0 < mask.sum() < mask.size
    dropped, gradient = jax.value_and_grad(lambda x: jnp.sum(drop(x, SALT, 0.25) ** 2))(x)
    expected = np.where(mask, np.asarray(x, np.float64) / 0.75, 0)
    np.testing.assert_allclose(drop(x, SALT, 0.25), expected, rtol=1e-6)
    np.testing.assert_allclose(dropped, (expected**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * expected / 0.75, rtol=1e-5)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_look_like_independent_draws(rate):
    """Shares, and agreement of neighbours, rows, steps, within five standard errors."""
    keys = jax.random.split(jax.random.key(3), 64)
    salts = jax.vmap(jax.random.key_data)(keys)
    shape = (64, 96)
    masks = np.stack([np.asarray(kept(shape, salt, rate=rate)) for salt in salts]).astype(float)
    keep = 1 - rate
    errors = 5 * np.sqrt(rate * keep)
    assert abs(masks.mean() - keep) < errors / np.sqrt(masks.size)
    per_entry = masks.mean(axis=0)
    assert np.abs(per_entry - keep).max() < 1.1 * errors / np.sqrt(len(salts))
    for pairs in (
        masks[:, :, 1:] * masks[:, :, :-1],
        masks[:, 1:] * masks[:, :-1],
        masks[:, :, 64:] * masks[:, :, :32],
        masks[1:] * masks[:-1],
    ):
        error = np.sqrt(keep**2 * (1 - keep**2) / pairs.size)
        # Neighbouring pairs share entries, which widens the error a little.
        assert abs(pairs.mean() - keep**2) < 10 * error


def test_a_sharded_array_has_the_mask_of_a_whole_one():
    x = jnp.ones((16, 24))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows", "columns")))
    compiled = jax.jit(lambda x: drop(x, SALT, 0.4)).lower(sharded).compile()
    np.testing.assert_array_equal(compiled(sharded), drop(x, SALT, 0.4))
    assert "all-" not in compiled.as_text()


class Twice(nn.Module):
    rate: float
    deterministic: bool

    @nn.compact
    def __call__(self, x):
        return Dropout(self.rate, self.deterministic)(x), Dropout(self.rate, self.deterministic)(x)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_every_call_and_every_key_has_a_mask_of_its_own(impl):

    def run(seed):
        rngs = {"dropout": jax.random.key(seed, impl=impl)}
        return Twice(0.5, deterministic=False).apply({}, jnp.ones((8, 32)), rngs=rngs)

    first, second = run(0)
    other, _ = run(1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(first, run(0)[0])


LARGEST_ROUNDING = 2**-8


def operands(dtype):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((4, 6, 32)), rng.standard_normal((32, 16))
    return jnp.asarray(x, dtype), jnp.asarray(kernel, jnp.float32)


def test_a_product_sums_in_float32_by_hand():
    # 256 + 1 has no bfloat16: sums in bfloat16 would lose both ones.
    x = jnp.asarray([[256.0, 1.0, 1.0]], jnp.bfloat16)
    assert rows_product(x, jnp.ones((3, 1))).tolist() == [[258.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_their_gradients_are_those_of_float64(dtype):
    x, kernel = operands(dtype)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((4, 6, 16)), dtype)

    def loss(x, kernel):
        return (rows_product(x, kernel) * weight).astype(jnp.float32).sum()

    actual = [rows_product(x, kernel), *jax.grad(loss, (0, 1))(x, kernel)]
    assert [array.dtype for array in actual] == [dtype, dtype, jnp.float32]
    wide_x, wide_weight = (np.asarray(array, np.float64) for array in (x, weight))
    wide_kernel = np.asarray(kernel.astype(dtype), np.float64)
    expected = [
        wide_x @ wide_kernel,
        wide_weight @ wide_kernel.T,
        np.einsum("abi,abo->io", wide_x, wide_weight),
    ]
    limit = LARGEST_ROUNDING if dtype == "bfloat16" else 1e-5
    for array, value in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(array, np.float64), value, rtol=limit, atol=limit)


@functools.partial(jax.grad, argnums=(0, 1))
def gradients(x, kernel):
    return rows_product(x, kernel).astype(jnp.float32).sum()


@pytest.mark.parametrize(("platform", "result"), [("cpu", "f32"), ("tpu", "bf16")])
def test_every_product_is_of_bfloat16_on_each_platform(platform, result):
    traced = jax.jit(gradients).trace(*operands(jnp.bfloat16))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 2
    for line in products:
        assert re.findall(r"x([a-z]+\d+)>", line) == ["bf16", "bf16", result], line


def test_a_sharded_product_equals_the_unsharded_one():
    x, kernel = operands(jnp.bfloat16)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    @jax.jit
    def both(x, kernel):
        results = rows_product(x, kernel), gradients(x, kernel)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), results)

    sharded = both(put(x, "data"), put(kernel, None, "fsdp"))
    assert_close(sharded, both(x, kernel), rtol=LARGEST_ROUNDING)
