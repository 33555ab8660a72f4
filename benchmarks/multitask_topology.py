"""What the TPU compiler says of a plain and a multi-task step, on a machine without a TPU."""

from __future__ import annotations

from typing import Any

import jax
from multitask_problem import Problem

from taser_jax.compilation.ahead_of_time import compile_step
from taser_jax.compilation.roofline import roofline
from taser_jax.compilation.topologies import open_topology
from taser_jax.models.dual_encoder import logical_axes
from taser_jax.optim.multitask import Combiner
from taser_jax.partitioning import MeshConfig, Partitioner, make_mesh
from taser_jax.training.state import state_shardings

MEDIAN_PASSES = 5
"""Of T-SAGE. The compiler counts the body of a loop once: the other passes are added."""


def compiled_figure(problem: Problem, method: str, topology_name: str) -> dict[str, Any]:
    """Memory, FLOPs, bytes and least time of one device.

    Parameters, moments, task gradients and averages are split over all chips (fsdp), and so is
    each task's batch.
    """
    topology = open_topology(topology_name)
    num_devices = len(topology.devices)
    mesh = make_mesh(MeshConfig(data=1, fsdp=num_devices), devices=topology.devices)
    partitioner = Partitioner(mesh)
    params = partitioner.param_shardings(logical_axes(problem.model), problem.params)
    state = jax.eval_shape(lambda: problem.state(method))
    shardings = state_shardings(state, params)

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    batches = jax.tree.map(
        lambda leaf: placed(leaf, partitioner.batch_sharding), dict(problem.batches)
    )
    step = problem.step(method, state_shardings=shardings)
    compiled = compile_step(step, jax.tree.map(placed, state, shardings), batches, mesh=mesh)
    num_bytes = compiled.compiler_bytes
    if method == Combiner.TSAGE.value:
        again = 4.0 * (len(problem.batches) + 1) * problem.num_parameters
        num_bytes += (MEDIAN_PASSES - 1) * again / num_devices
    flops = sum(product.flops * product.passes for product in compiled.products) / num_devices
    least = roofline(
        topology,
        flops=flops,
        model_flops=flops,
        num_bytes=num_bytes,
        collectives=compiled.collectives,
    )
    memory = compiled.memory
    return {
        "topology": topology_name,
        "devices": num_devices,
        "argument_bytes": memory.arguments,
        "temporary_bytes": memory.temporaries,
        "peak_bytes": memory.peak,
        "fits": memory.peak <= topology.chip.hbm_bytes,
        "flops": flops,
        "bytes": num_bytes,
        "compute_milliseconds": 1e3 * least.compute,
        "memory_milliseconds": 1e3 * least.hbm,
        "link_milliseconds": 1e3 * least.ici,
        "least_milliseconds": 1e3 * least.step_seconds,
        "one_after_another_milliseconds": 1e3 * least.sequential_seconds,
        "peaks": topology.chip.source,
    }
