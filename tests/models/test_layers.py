"""Products of every projection, and activations that stay with their devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import assert_close

from taser_jax.models.layers import rows_product

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
