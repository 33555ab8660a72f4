"""Sums over parameters: whole, sharded, and how often devices exchange something."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from taser_jax.optim.task_gradients import sum_over_devices

SPECS = (
    PartitionSpec("model", None),
    PartitionSpec(None, "model"),
    PartitionSpec(("data", "model"), None),
    PartitionSpec("model", "data"),
    PartitionSpec(),
)


def weighted_sums(stacked, plain, scale):
    (gradients,), (params,) = stacked, plain
    return sum(
        scale * jnp.sum(gradient * param, axis=(1, 2))
        for gradient, param in zip(gradients, params, strict=True)
    )


def test_whole_and_sharded_sums_by_an_oracle_and_one_exchange_a_split():
    rng = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    shardings = [NamedSharding(mesh, spec) for spec in SPECS]
    gradients = [rng.normal(size=(3, 16, 8)).astype(np.float32) for _ in SPECS]
    params = [rng.normal(size=(16, 8)).astype(np.float32) for _ in SPECS]
    expected = 2.0 * sum(
        np.einsum("tij,ij->t", g.astype(np.float64), p)
        for g, p in zip(gradients, params, strict=True)
    )

    def sums(gradients, params, shardings=None):
        return sum_over_devices(
            weighted_sums,
            stacked=(gradients,),
            plain=(params,),
            shared=(jnp.float32(2),),
            shardings=shardings,
        )

    np.testing.assert_allclose(jax.jit(sums)(gradients, params), expected, rtol=1e-5)
    on_all = jax.jit(lambda gradients, params: sums(gradients, params, shardings))
    put = [
        jax.device_put(gradient, NamedSharding(mesh, PartitionSpec(None, *spec)))
        for gradient, spec in zip(gradients, SPECS, strict=True)
    ]
    others = [jax.device_put(p, s) for p, s in zip(params, shardings, strict=True)]
    np.testing.assert_allclose(on_all(put, others), expected, rtol=1e-5)
    program = on_all.lower(put, others).compile().as_text()
    assert "all-gather" not in program
    # Two splits: over model alone, and over data and model, in whatever order.
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == 2
