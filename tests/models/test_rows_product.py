"""x·kernel of every projection: float32 sums of bfloat16 products, on CPUs too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from taser_jax.models.layers import rows_product

LARGEST_ROUNDING = 2**-8


def operands(dtype):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((4, 6, 32)), rng.standard_normal((32, 16))
    return jnp.asarray(x, dtype), jnp.asarray(kernel, jnp.float32)


def test_by_hand():
    # 256 + 1 has no bfloat16: sums in bfloat16 would lose both ones.
    x = jnp.asarray([[256.0, 1.0, 1.0]], jnp.bfloat16)
    assert rows_product(x, jnp.ones((3, 1))).tolist() == [[258.0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_float64(dtype):
    x, kernel = operands(dtype)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((4, 6, 16)), dtype)

    def loss(x, kernel):
        return (rows_product(x, kernel) * weight).astype(jnp.float32).sum()

    found = [rows_product(x, kernel), *jax.grad(loss, (0, 1))(x, kernel)]
    assert [one.dtype for one in found] == [dtype, dtype, jnp.float32]
    wide_x, wide_weight = (np.asarray(one, np.float64) for one in (x, weight))
    wide_kernel = np.asarray(kernel.astype(dtype), np.float64)
    expected = [
        wide_x @ wide_kernel,
        wide_weight @ wide_kernel.T,
        np.einsum("abi,abo->io", wide_x, wide_weight),
    ]
    limit = LARGEST_ROUNDING if dtype == "bfloat16" else 1e-5
    for one, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), value, rtol=limit, atol=limit)


@pytest.mark.parametrize(("platform", "result"), [("cpu", "f32"), ("tpu", "bf16")])
def test_every_product_is_of_bfloat16_on_each_platform(platform, result):
    def gradients(x, kernel):
        return jax.grad(lambda *both: rows_product(*both).astype(jnp.float32).sum(), (0, 1))(
            x, kernel
        )

    traced = jax.jit(gradients).trace(*operands(jnp.bfloat16))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 2
    for line in products:
        assert re.findall(r"x([a-z]+\d+)>", line) == ["bf16", "bf16", result], line


def test_sharded_equals_unsharded():
    x, kernel = operands(jnp.bfloat16)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def both(x, kernel):
        loss = lambda *both: rows_product(*both).astype(jnp.float32).sum()  # noqa: E731
        return rows_product(x, kernel), jax.grad(loss, (0, 1))(x, kernel)

    expected = jax.jit(both)(x, kernel)
    found = jax.jit(both)(put(x, "data"), put(kernel, None, "fsdp"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=LARGEST_ROUNDING
        )
