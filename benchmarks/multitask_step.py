r"""What a multi-task optimiser costs: T-SAGE, PCGrad, CGD, GradNorm, the sum, and a plain step.

    python benchmarks/multitask_step.py                     # tiny, for a CPU
    python benchmarks/multitask_step.py --shape minilm      # seven tasks of 16 queries
    python benchmarks/multitask_step.py --shape t5_base     # T5-base, the paper's batch

Needs jax, flax, optax and numpy. The plain step is the sum of the tasks' losses, differentiated
task by task, without a task axis. Methods take turns, so that a machine with other work on it slows
all of them alike. Prints one JSON line a figure:

    bandwidth   bytes read and written a second by scaling a large array on this device
    <method>    milliseconds (median of --steps), processor milliseconds, the ratio to the plain
                step's, bytes of the optimiser's state and of the compiler's scratch, and what the
                combiner moves: `traffic_bytes`, counted by hand, `traffic_milliseconds` at the
                measured bandwidth, `extra_milliseconds` over the plain step and their quotient
                `extra_over_traffic`

With --parts also the combiner alone, on random gradients: `update_milliseconds`, and for T-SAGE
`median_milliseconds`. With --parts_only nothing else, which compiles in seconds.

    python benchmarks/multitask_step.py --shape t5_base --topology v5e:2x4 --batch_multiple 8 \
        --methods plain tsage

compiles the steps for TPUs, without one: memory, FLOPs and bytes of one device, and the least time
they take at the chip's peaks. A step of eight tasks has all their backward passes and takes hours
to compile on two cores. With --parts_only the combiner alone is compiled, in minutes, and held
against the least time of the plain step. Needs libtpu; run it with JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from multitask_problem import PLAIN, Problem, add_arguments, make_problem, traffic_bytes, with_shape
from multitask_topology import combiner_figure, compiled_figure

from taser_jax.devices.compiler import CompilerEffort
from taser_jax.optim.median import lower_median
from taser_jax.optim.multitask import Combiner
from taser_jax.storage.progress import track


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bandwidth_megabytes", type=int, default=256)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--parts_only", action="store_true")
    parser.add_argument("--topology", help="such as v5e:2x4: compile for it, run nothing")
    parser.add_argument(
        "--effort", choices=[effort.value for effort in CompilerEffort], default="quick",
        help="of the TPU compiler",
    )  # fmt: skip
    return with_shape(parser.parse_args())


class Cost(NamedTuple):
    """Of one call, in seconds; `processor` adds up the cores."""

    wall: float
    processor: float


def cost(function: Callable[[], Any]) -> Cost:
    start, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    return Cost(time.perf_counter() - start, time.process_time() - used)


def median(costs: list[Cost]) -> Cost:
    return Cost(*(float(np.median(column)) for column in zip(*costs, strict=True)))


class Scaling:
    """x <- 1.5·x in place, on a large array."""

    def __init__(self, megabytes: int) -> None:
        self.array = jnp.zeros((megabytes * 2**20 // 4,), jnp.float32)
        self._scale = jax.jit(lambda x: x * 1.5, donate_argnums=0)
        self()

    def __call__(self) -> jax.Array:
        """Once."""
        self.array = jax.block_until_ready(self._scale(self.array))
        return self.array


class Training:
    """A compiled step and the state it continues from."""

    def __init__(self, problem: Problem, method: str, batches: Any) -> None:
        # device_put sorts a dictionary; the compiled step takes the tasks in their own order.
        self.batches = tuple(batches[task] for task in problem.batches)
        self.state = problem.state(method)
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.opt_state))
        start = time.perf_counter()
        self.compiled = problem.step(method).lower(self.state, batches).compile()
        self.compile_seconds = time.perf_counter() - start
        self.passes: list[float] = []
        self()
        # The first step has no last median.
        self.passes.clear()

    def __call__(self) -> Any:
        """One step."""
        self.state, metrics = self.compiled(self.state, self.batches)
        jax.block_until_ready(self.state)
        assert not metrics["skipped"]
        self.passes.append(float(metrics.get("median_passes", 0)))
        return self.state


class Update:
    """A method's combiner alone, or T-SAGE's median alone, on random gradients."""

    def __init__(self, problem: Problem, method: str) -> None:
        tasks, params = len(problem.batches), problem.initialise(jax.random.key(0))
        leaves, structure = jax.tree.flatten(params)

        @jax.jit
        def draw(key: jax.Array) -> list[jax.Array]:
            keys = jax.random.split(key, len(leaves))
            return [
                jax.random.normal(key, (tasks, *leaf.shape))
                for key, leaf in zip(keys, leaves, strict=True)
            ]

        self.gradients = jax.tree.unflatten(structure, draw(jax.random.key(1)))
        self.params, self.tasks = params, tasks
        self._combiner = problem.combiner(method)
        self.state = self._combiner.init(params)
        self._update = jax.jit(self._combiner.update, donate_argnums=1)
        self._median = jax.jit(
            lambda values, factors, guess: lower_median(values, factors=factors, guess=guess)
        )
        self()

    def __call__(self) -> Any:
        """One combined gradient."""
        updates, self.state = self._update(
            self.gradients,
            self.state,
            self.params,
            losses=jnp.ones(self.tasks),
            key=jax.random.key(0),
        )
        return jax.block_until_ready(updates)

    def median(self) -> Any:
        """T-SAGE's medians, from the last ones."""
        return self._median(
            jax.tree.leaves(self.gradients), jax.tree.leaves(self.params), self.state.median_bits
        )


def measure_parts(problem: Problem, method: str, steps: int) -> dict[str, float]:
    if method == PLAIN:
        return {}
    update = Update(problem, method)
    parts = {"update": update} | (
        {"median": update.median} if method == Combiner.TSAGE.value else {}
    )
    milliseconds = {}
    for name, part in parts.items():
        cost(part)
        of_part = median([cost(part) for _ in range(steps)])
        milliseconds[f"{name}_milliseconds"] = 1e3 * of_part.wall
        milliseconds[f"{name}_processor_milliseconds"] = 1e3 * of_part.processor
    return milliseconds


def main() -> None:
    arguments = parse()
    problem = make_problem(arguments)
    about = {"benchmark": "multitask_step"} | problem.about()
    about |= {
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }
    methods = sorted(dict.fromkeys(arguments.methods), key=lambda method: method != PLAIN)
    if arguments.topology:
        about = {"benchmark": "multitask_step"} | problem.about()
        for method in track(methods, "compiling"):
            figure_of = combiner_figure if arguments.parts_only else compiled_figure
            effort = CompilerEffort(arguments.effort)
            figure = figure_of(problem, method, arguments.topology, effort=effort)
            print_line(about | {"figure": method} | figure)
        return
    if not arguments.parts_only:
        measure_steps(problem, methods, arguments, about)
    if arguments.parts or arguments.parts_only:
        for method in methods:
            if parts := measure_parts(problem, method, arguments.steps):
                print_line(about | {"figure": f"{method} alone"} | parts)


def measure_steps(
    problem: Problem, methods: Sequence[str], arguments: argparse.Namespace, about: dict[str, Any]
) -> None:
    batches = jax.device_put(dict(problem.batches))
    scaling = Scaling(arguments.bandwidth_megabytes)
    trainings = {
        method: Training(problem, method, batches) for method in track(methods, "compiling")
    }
    costs: dict[str, list[Cost]] = {method: [] for method in ("bandwidth", *methods)}
    for _ in track(range(arguments.steps), "rounds"):
        costs["bandwidth"].append(cost(scaling))
        for method, training in trainings.items():
            costs[method].append(cost(training))
    medians = {name: median(spent) for name, spent in costs.items()}
    rate = 2 * scaling.array.nbytes / medians["bandwidth"].wall
    figure: dict[str, Any] = {"figure": "bandwidth", "gigabytes_per_second": rate / 1e9}
    print_line(about | figure)
    plain = medians.get(PLAIN)
    for method, training in trainings.items():
        passes = float(np.mean(training.passes))
        spent = medians[method]
        figure = {
            "figure": method,
            "milliseconds": 1e3 * spent.wall,
            "processor_milliseconds": 1e3 * spent.processor,
            "compile_seconds": training.compile_seconds,
            "state_bytes": training.state_bytes,
            "scratch_bytes": training.compiled.memory_analysis().temp_size_in_bytes,
            "traffic_bytes": traffic_bytes(
                method, tasks=len(problem.batches), parameters=problem.num_parameters, passes=passes
            ),
        }
        traffic = figure["traffic_bytes"] / rate
        figure["traffic_milliseconds"] = 1e3 * traffic
        if method == Combiner.TSAGE.value:
            figure["median_passes"] = passes
        if plain is not None:
            figure["ratio_to_plain"] = spent.wall / plain.wall
            figure["processor_ratio_to_plain"] = spent.processor / plain.processor
            figure["extra_milliseconds"] = 1e3 * (spent.wall - plain.wall)
            if traffic:
                figure["extra_over_traffic"] = (spent.wall - plain.wall) / traffic
        print_line(about | figure)


def print_line(figure: dict[str, Any]) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figure.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
