"""The real TPU compiler's answers to functions whose figures are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from taser_jax.devices.collectives import DCN
from taser_jax.devices.compiler import CompilerEffort, OutOfMemory, compile_step, matrix_products
from taser_jax.devices.mesh import MeshConfig, make_mesh, open_topology


def array(mesh, shape, spec=PartitionSpec(), dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def test_a_product_split_over_four_chips():
    mesh = make_mesh(MeshConfig(), devices=open_topology("v5e:2x2").devices)
    split = PartitionSpec(None, "data")
    left, right = array(mesh, (512, 1024), split), array(mesh, (1024, 256), PartitionSpec("data"))
    step = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, PartitionSpec()))
    compiled = compile_step(step, left, right, mesh=mesh)
    # A quarter of 512·1024 and of 1024·256 numbers of two bytes; a result of 512·256.
    assert compiled.memory.arguments == (512 * 1024 + 1024 * 256) // 4 * 2
    assert compiled.memory.outputs == 512 * 256 * 2
    assert sum(product.flops for product in compiled.products) == 2 * 512 * 1024 * 256
    assert compiled.compiler_flops == pytest.approx(2 * 512 * 1024 * 256 / 4, rel=0.1)
    # Partial sums are added over the four, all-reduced or scattered and gathered.
    sent = sum(each.link_bytes for each in compiled.collectives)
    sums = [2 * 3 / 4 * 512 * 256 * num_bytes for num_bytes in (2, 4)]
    assert any(sent == pytest.approx(each, rel=0.01) for each in sums)


def test_quick_effort_compiles_the_same_products_and_is_over_afterwards():
    mesh = make_mesh(MeshConfig(), devices=open_topology("v5e:1x1").devices)
    square = array(mesh, (256, 256))

    levels = []

    def step():
        def product(x):
            levels.append(jax.config.values["jax_optimization_level"])
            return jnp.tanh(x @ x) @ x

        return jax.jit(product)

    before = jax.config.values["jax_optimization_level"]
    quick = compile_step(step(), square, mesh=mesh, effort=CompilerEffort.QUICK)
    full = compile_step(step(), square, mesh=mesh)
    assert levels == ["O1", before]
    assert (quick.effort, full.effort) == (CompilerEffort.QUICK, CompilerEffort.FULL)
    for compiled in (quick, full):
        assert sum(product.flops for product in compiled.products) == 2 * 2 * 256**3


def test_more_than_the_chip_has():
    mesh = make_mesh(MeshConfig(), devices=open_topology("v5e:1x1").devices)
    large = array(mesh, (2**17, 2**17))
    with pytest.raises(OutOfMemory) as error:
        compile_step(jax.jit(jnp.add), large, large, mesh=mesh)
    assert error.value.needed >= 64 * 2**30
    assert 15 * 2**30 < error.value.available <= 16 * 2**30


def test_a_collective_in_a_loop_counts_in_each_round():
    """Gradients of chunks: the TPU compiler does not write how often a loop goes round."""
    mesh = make_mesh(MeshConfig(), devices=open_topology("v5e:2x2").devices)
    kernel = array(mesh, (256, 512), dtype=jnp.float32)
    chunks = array(mesh, (6, 64, 256), PartitionSpec(None, "data"), dtype=jnp.float32)

    def step(kernel, chunks):
        def add(total, rows):
            gradient = jax.grad(lambda kernel: jnp.sum(jnp.tanh(rows @ kernel)))(kernel)
            # Were it a sum of gradients, the compiler would reduce it once, after the loop.
            return 0.5 * total + gradient, None

        return jax.lax.scan(add, jnp.zeros_like(kernel), chunks)[0]

    step = jax.jit(step, out_shardings=NamedSharding(mesh, PartitionSpec()))
    collectives = compile_step(step, kernel, chunks, mesh=mesh).collectives
    assert sum(each.num_bytes * each.times for each in collectives) == 6 * 256 * 512 * 4


def test_two_slices_add_up_gradients_over_the_network():
    topology = open_topology("v5e:2x2", num_slices=2)
    mesh = make_mesh(MeshConfig(replica=2, data=4), devices=topology.devices)
    rows = array(mesh, (64, 256), PartitionSpec(("replica", "data")), jnp.float32)
    kernel = array(mesh, (256, 512), dtype=jnp.float32)

    def step(kernel, rows):
        return kernel - jax.grad(lambda kernel: jnp.sum(jnp.tanh(rows @ kernel)))(kernel)

    compiled = compile_step(jax.jit(step), kernel, rows, mesh=mesh)
    crossing = [each for each in compiled.collectives if each.network == DCN]
    assert [each.group_size for each in crossing] == [2] * len(crossing)
    # Each chip of a slice sends its quarter of the slice's sum, or all of it.
    size = 4 * 256 * 512
    assert size / 4 <= sum(each.num_bytes for each in crossing) <= size


A, B, SQUARE = jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.ones((2, 2))


def recomputed(a):
    return jnp.sin(jax.checkpoint(lambda a: jnp.sin(a @ B) @ B.T)(a)).sum()


def branches(x):
    return jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, x)


@pytest.mark.parametrize(
    ("function", "arguments", "flops"),
    [
        (jnp.matmul, (A, B), 2 * 2 * 3 * 5),
        (jax.grad(lambda a, b: jnp.matmul(a, b).sum(), argnums=(0, 1)), (A, B), 3 * 60),
        # Batch axes.
        (
            lambda x, y: jnp.einsum("bhqd,bhkd->bhqk", x, y),
            (jnp.ones((4, 7, 2, 3)), jnp.ones((4, 7, 5, 3))),
            4 * 7 * 60,
        ),
        # Forward 2, backward 2, and the first product again to know the cosine.
        (jax.grad(recomputed), (A,), 5 * 60),
        # The larger branch.
        (branches, (SQUARE,), 2 * 16),
    ],
)
def test_products_of_a_program_by_hand(function, arguments, flops):
    products = matrix_products(jax.make_jaxpr(function)(*arguments))
    assert sum(product.flops for product in products) == flops


def test_loops_and_inner_functions():
    def step(x, _):
        return jax.jit(jnp.matmul)(x, jnp.ones((2, 2))), None

    def loop(x):
        return jax.lax.scan(step, x, length=6)[0]

    (product,) = matrix_products(jax.make_jaxpr(loop)(jnp.ones((2, 2))))
    assert (product.flops, product.times) == (6 * 16, 6)


def test_dtype_precision_and_passes():
    def products(a, b):
        yield jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
        yield jnp.matmul(a, b, precision="highest")
        yield jnp.matmul(a, b)
        # One float32 operand makes a float32 product.
        yield jax.lax.dot(a, b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    found = matrix_products(jax.make_jaxpr(lambda *sides: [*products(*sides)])(A, B))
    assert [(each.dtype, each.precision, each.passes) for each in found] == [
        ("bfloat16", "DEFAULT", 1),
        ("float32", "HIGHEST", 6),
        ("float32", "DEFAULT", 1),
        ("float32", "DEFAULT", 1),
    ]


def test_what_devices_compute_apart_counts_for_all_of_them():
    mesh = make_mesh(MeshConfig(data=4, model=2))
    split = jax.P("data")
    apart = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(split, jax.P()), out_specs=split)
    # Eight rows, two on each of the four parts; the two devices of each part compute the same.
    arguments = (jnp.ones((8, 3)), jnp.ones((3, 5)))
    (product,) = matrix_products(jax.make_jaxpr(apart)(*arguments))
    assert product.times == 1
    assert product.flops == 2 * 2 * 8 * 3 * 5
