"""What the TPU compiler says of multi-task steps and combiners, on a machine without a TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from multitask_problem import Problem

from taser_jax.devices.compiler import CompiledStep, CompilerEffort, compile_step
from taser_jax.devices.mesh import MeshConfig, Topology, make_mesh, open_topology
from taser_jax.devices.partitioning import Partitioner
from taser_jax.devices.step_report import roofline
from taser_jax.models.parameters import logical_axes
from taser_jax.optim.multitask import Combiner
from taser_jax.training.state import TrainState, state_shardings

MEDIAN_PASSES = 5
"""Of T-SAGE. The compiler counts the body of a loop once: the other passes are added."""


def compiled_figure(
    problem: Problem, method: str, topology_name: str, *, effort: CompilerEffort
) -> dict[str, Any]:
    """Memory, FLOPs, bytes and least time of one device in a step.

    Parameters, moments, task gradients and averages are split over all chips (fsdp), and so is
    each task's batch.
    """
    topology, partitioner = _open(topology_name)
    params = partitioner.param_shardings(logical_axes(problem.model), problem.params)
    state = jax.eval_shape(lambda: problem.state(method))
    shardings = state_shardings(state, params)
    batches = jax.tree.map(
        lambda leaf: _placed(leaf, partitioner.batch_sharding), dict(problem.batches)
    )
    step = problem.step(method, state_shardings=shardings)
    compiled = compile_step(
        step, jax.tree.map(_placed, state, shardings), batches, mesh=partitioner.mesh, effort=effort
    )
    return _figure(compiled, problem, method, topology)


def combiner_figure(
    problem: Problem, method: str, topology_name: str, *, effort: CompilerEffort
) -> dict[str, Any]:
    """The same of the combiner alone, and of what it makes longer.

    `plain_compute_milliseconds` is the least time of the plain step, its model FLOPs at the chip's
    peak. `ratio_at_peak` is what the combiner adds to a plain step as fast as that, and
    `ratio_at_half` to one that reaches half of the peak.
    """
    topology, partitioner = _open(topology_name)
    param_shardings = partitioner.param_shardings(logical_axes(problem.model), problem.params)
    tasks, combiner = len(problem.batches), problem.combiner(method)
    gradients = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((tasks, *leaf.shape), jnp.float32), problem.params
    )
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=problem.params,
        opt_state=(jax.eval_shape(combiner.init, problem.params), gradients),
    )
    state = jax.tree.map(_placed, state, state_shardings(state, param_shardings))

    def update(gradients: Any, state: Any, params: Any) -> Any:
        losses, key = jnp.ones(tasks), jax.random.key(0)
        return combiner.update(
            gradients, state, params, losses=losses, key=key, param_shardings=param_shardings
        )

    compiled = compile_step(
        jax.jit(update, donate_argnums=1),
        state.opt_state[1],
        state.opt_state[0],
        state.params,
        mesh=partitioner.mesh,
        effort=effort,
    )
    figure = _figure(compiled, problem, method, topology)
    plain = problem.training_flops() / len(topology.devices) / topology.chip.peak_flops
    extra = figure["least_milliseconds"]
    return figure | {
        "plain_compute_milliseconds": 1e3 * plain,
        "ratio_at_peak": 1 + extra / (1e3 * plain),
        "ratio_at_half": 1 + extra / (2e3 * plain),
    }


def _open(topology_name: str) -> tuple[Topology, Partitioner]:
    topology = open_topology(topology_name)
    config = MeshConfig(data=1, fsdp=len(topology.devices))
    return topology, Partitioner(make_mesh(config, devices=topology.devices))


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _figure(
    compiled: CompiledStep, problem: Problem, method: str, topology: Topology
) -> dict[str, Any]:
    num_devices = len(topology.devices)
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
        "topology": topology.name,
        "compiler_effort": compiled.effort.value,
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
