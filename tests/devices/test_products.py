"""Matrix products counted in jaxprs, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from taser_jax.devices.compiler import matrix_products
from taser_jax.devices.mesh import MeshConfig, make_mesh

A, B = jnp.ones((2, 3)), jnp.ones((3, 5))


def flops(function, *arguments):
    return [product.flops for product in matrix_products(jax.make_jaxpr(function)(*arguments))]


def test_a_product_and_its_gradients():
    assert flops(jnp.matmul, A, B) == [2 * 2 * 3 * 5]
    gradient = jax.grad(lambda a, b: jnp.matmul(a, b).sum(), argnums=(0, 1))
    assert sum(flops(gradient, A, B)) == 3 * 60


def test_batch_axes():
    left, right = jnp.ones((4, 7, 2, 3)), jnp.ones((4, 7, 5, 3))
    assert flops(lambda x, y: jnp.einsum("bhqd,bhkd->bhqk", x, y), left, right) == [4 * 7 * 60]


def test_loops_and_inner_functions():
    def step(x, _):
        return jax.jit(jnp.matmul)(x, jnp.ones((2, 2))), None

    def loop(x):
        return jax.lax.scan(step, x, length=6)[0]

    (product,) = matrix_products(jax.make_jaxpr(loop)(jnp.ones((2, 2))))
    assert (product.flops, product.times) == (6 * 16, 6)


def test_recomputation_counts():
    def loss(a):
        return jnp.sin(jax.checkpoint(lambda a: jnp.sin(a @ B) @ B.T)(a)).sum()

    # Forward 2, backward 2, and the first product again to know the cosine.
    assert sum(flops(jax.grad(loss), A)) == 5 * 60


def test_the_larger_branch_counts():
    def choose(x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert sum(flops(choose, jnp.ones((2, 2)))) == 2 * 16


def test_dtype_precision_and_passes():
    def both(a, b):
        small = jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
        return small, jnp.matmul(a, b, precision="highest"), jnp.matmul(a, b)

    found = matrix_products(jax.make_jaxpr(both)(A, B))
    assert [(each.dtype, each.precision, each.passes) for each in found] == [
        ("bfloat16", "DEFAULT", 1),
        ("float32", "HIGHEST", 6),
        ("float32", "DEFAULT", 1),
    ]


def test_one_float32_operand_makes_a_float32_product():
    def mixed(a, b):
        return jax.lax.dot_general(
            a, b.astype(jnp.bfloat16), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    assert matrix_products(jax.make_jaxpr(mixed)(A, B))[0].dtype == "float32"


def test_what_devices_compute_apart_counts_for_all_of_them():
    mesh = make_mesh(MeshConfig(data=4, model=2))
    split = jax.P("data")

    def both(a, b):
        return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(split, jax.P()), out_specs=split)(
            a, b
        )

    # Eight rows, two on each of the four parts; the two devices of each part compute the same.
    arguments = (jnp.ones((8, 3)), jnp.ones((3, 5)))
    (product,) = matrix_products(jax.make_jaxpr(both)(*arguments))
    assert product.times == 1
    assert product.flops == 2 * 2 * 8 * 3 * 5
