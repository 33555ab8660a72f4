import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taser_jax.optim.median import MedianOver, lower_median
from taser_jax.storage.errors import ConfigError

median = jax.jit(lower_median, static_argnames="over")
SHAPES = ((40, 30), (77,), (), (5, 6, 7))
INF = 0x7F800000


def sorted_median(values, *, nonzero=False):
    """By a sort of bit patterns in NumPy, which flushes no denormals. [tasks]."""
    flat = np.concatenate([np.asarray(v).reshape(len(v), -1) for v in values], axis=1)
    bits = np.sort(np.abs(flat.astype(np.float32)).view(np.int32))
    rows = [row[row > 0] if nonzero else row for row in bits]
    return np.array([row[(len(row) - 1) // 2] if len(row) else 0 for row in rows], np.int32)


SIZES = [math.prod(shape) for shape in SHAPES]


def split(rows):
    """[tasks, n] as several arrays, n as in SHAPES."""
    parts = np.split(rows, np.cumsum(SIZES)[:-1], axis=1)
    return [p.reshape(len(rows), *s) for p, s in zip(parts, SHAPES, strict=True)]


def adversarial(rng):
    """Name -> a row of floats, by their bit patterns."""
    n = sum(SIZES)
    patterns = {
        "zeros": np.zeros(n, np.int32),
        "one value": np.full(n, 0x3F800000),
        "two values": np.where(np.arange(n) < (n + 1) // 2, 1, INF),
        "two values, upper": np.where(np.arange(n) < (n - 1) // 2, 1, INF),
        "denormals": rng.integers(0, 1 << 23, n),
        "infinities": np.where(rng.random(n) < 0.6, INF, rng.integers(0, INF, n)),
        "all infinite": np.full(n, INF),
        "every pattern": rng.integers(0, INF + 1, n),
        "neighbours": 0x3E000000 + rng.integers(0, 5, n),
        "mostly zero": np.where(rng.random(n) < 0.49, 0, rng.integers(0, INF, n)),
        "clumps": rng.choice([0, 1, 1 << 22, 1 << 29, (1 << 29) + 1, INF - 1], n),
        "far outlier below": np.where(np.arange(n) < n // 2 - 1, 3, (1 << 30) + np.arange(n)),
        "halving": (INF >> (np.arange(n) % 31)).astype(np.int64),
    }
    return {
        name: rng.permutation(bits.astype(np.int32)).view(np.float32)
        for name, bits in patterns.items()
    }


def test_worked_example():
    # |4, 0, -1, 9| sorted: 0, 1, 4, 9. The lower of the middle two is 1; of 1, 4, 9 it is 4.
    values = [jnp.array([[4.0, 0.0, -1.0, 9.0]])]
    assert float(lower_median(values).value[0]) == 1.0
    assert float(lower_median(values, over=MedianOver.NONZERO).value[0]) == 4.0


@pytest.mark.parametrize("over", MedianOver)
@pytest.mark.parametrize("guess", ["none", "right", "wrong"])
def test_it_equals_a_sort_whatever_the_distribution(guess, over):
    rng = np.random.default_rng(5)
    by_name = adversarial(rng)
    rows = np.stack(list(by_name.values()))
    signs = np.where(rng.random(rows.shape) < 0.5, np.int32(-(2**31)), 0).astype(np.int32)
    rows = (rows.view(np.int32) | signs).view(np.float32)
    values = split(rows)
    expected = sorted_median(values, nonzero=over is MedianOver.NONZERO)
    start = {
        "none": np.zeros(len(rows), np.int32),
        "right": expected,
        "wrong": rng.integers(0, INF + 1, len(rows)).astype(np.int32),
    }[guess]
    medians = median(values, guess=start, over=over)
    np.testing.assert_array_equal(medians.bits, expected, err_msg=str([*by_name]))
    np.testing.assert_array_equal(np.asarray(medians.value).view(np.int32), expected)
    assert int(medians.passes) <= 15


def test_with_shardings_devices_exchange_once_per_split_and_pass():
    rng = np.random.default_rng(4)
    both = ("data", "model")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), both)
    specs = [P(None, "model"), P("model", None), P("model", "data"), P(None, both), P()]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    values = [rng.normal(size=(5, 32, 64)).astype(np.float32) for _ in specs]
    values[1][:, :20] = 0
    factors = [rng.normal(size=(32, 64)).astype(np.float32) for _ in specs]
    guess = jnp.full(5, 0x3F000000, jnp.int32)
    on_one = median(values, factors=factors, guess=guess)
    products = [value * factor for value, factor in zip(values, factors, strict=True)]
    np.testing.assert_array_equal(on_one.bits, sorted_median(products))

    @jax.jit
    def on_all(values, factors):
        return lower_median(values, factors=factors, guess=guess, shardings=shardings)

    of_tasks = [NamedSharding(mesh, P(None, *spec)) for spec in specs]
    put = jax.device_put((values, factors), (of_tasks, shardings))
    jax.tree.map(np.testing.assert_array_equal, on_one, on_all(*put))
    program = on_all.lower(*put).compile().as_text()
    assert "all-gather" not in program
    # Arrays split over model alone add up together, those over data and model likewise.
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) <= 2


def test_no_product_is_kept():
    values = [jax.ShapeDtypeStruct((4, 256, 128), jnp.float32)]
    factors = [jax.ShapeDtypeStruct((256, 128), jnp.float32)]
    guess = jax.ShapeDtypeStruct((4,), jnp.int32)
    memory = median.lower(values, factors=factors, guess=guess).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 256 * 128


def test_nothing_to_take_a_median_of():
    with pytest.raises(ConfigError, match="0 trainable parameters"):
        lower_median([jnp.zeros((2, 0))])


def test_rows_of_different_scales_take_few_passes():
    """As those of a vocabulary; a third of the entries is zero."""
    rng = np.random.default_rng(9)
    shapes = ((30000, 24), (256, 1024), (1024, 256), (700, 1))
    values = [
        rng.normal(size=(2, *shape)) * np.exp(2 * rng.normal(size=(2, shape[0], 1)))
        for shape in shapes
    ]
    values[0][:, rng.random(30000) < 0.5] = 0
    values = [value.astype(np.float32) for value in values]
    expected = sorted_median(values)
    near = (expected.view(np.float32) * np.float32(1.3)).view(np.int32)
    for guess, most in ((np.zeros(2, np.int32), 8), (near, 6), (expected, 6)):
        medians = median(values, guess=guess)
        np.testing.assert_array_equal(medians.bits, expected)
        assert int(medians.passes) <= most
