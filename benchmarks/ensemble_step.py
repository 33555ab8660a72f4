r"""What a step of an ensemble costs: all members against one, and against PyTorch.

    python benchmarks/ensemble_step.py                       # DPR-MUF's sizes: 20 members, 768 wide
    JAX_PLATFORMS=cpu python benchmarks/ensemble_step.py --topology v5e:4x4

Needs jax, flax, optax and numpy; the PyTorch side needs torch, which takes all members in one
batched product per layer. Sides take turns, so that a machine with other work on it slows all of
them alike. Prints one JSON line per figure:

    one       a step of one member: milliseconds (median), processor milliseconds
    members   a step of all members, with the ratio to one member's
    torch     PyTorch's step of all members, with ratios to ours
    batches   drawing rows and gathering vectors of one step on the host, as a share of the step

With --topology the step is compiled for TPUs, without one: memory of one chip, members on each,
and the bytes of its collectives, which are those of the metrics alone. Needs libtpu.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

from side_by_side import Times, in_turns, machine, show  # isort: skip  # before JAX computes

import jax
import numpy as np

from taser_jax.devices.compiler import CompilerEffort, compile_step
from taser_jax.devices.mesh import open_topology
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.systems.muf.members import (
    EnsembleBatch,
    EnsembleConfig,
    MemberPlacement,
    init_ensemble_state,
    init_members,
    make_ensemble_step,
)

_STEPS = 1000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--passages", type=int, default=100_000, help="vectors to gather from")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sides", nargs="+", choices=["ours", "torch"], default=["ours", "torch"])
    parser.add_argument("--topology", help="such as v5e:4x4: compile for it, run nothing")
    return parser.parse_args()


def config_of(arguments: argparse.Namespace) -> EnsembleConfig:
    return EnsembleConfig(max(2, arguments.members), (arguments.hidden, arguments.hidden))


def optimizer_of(arguments: argparse.Namespace) -> Any:
    init = functools.partial(init_members, dim=arguments.dim, config=config_of(arguments))
    shapes = jax.eval_shape(lambda key: init(key, members=1), jax.random.key(0))
    member = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes)
    return build_optimizer(OptimizerConfig(warmup_steps=10), member, total_steps=_STEPS)


class Gathering:
    """Each member's batch, drawn and gathered on the host from as many vectors as there are."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        rng = np.random.default_rng(0)
        self._arguments, self._step = arguments, 0
        self._passages = rng.normal(size=(arguments.passages, arguments.dim)).astype(np.float32)
        self._queries = rng.normal(size=(10_000, arguments.dim)).astype(np.float32)

    def __call__(self, members: int | None = None) -> EnsembleBatch:
        """The next step's."""
        batch, self._step = self._arguments.batch, self._step + 1
        draws = [
            np.random.default_rng([self._step, member])
            for member in range(members or self._arguments.members)
        ]
        rows = np.stack([rng.integers(0, len(self._passages), 2 * batch) for rng in draws])
        queries = np.stack([rng.integers(0, len(self._queries), batch) for rng in draws])
        index = np.tile(2 * np.arange(batch, dtype=np.int32), (len(draws), 1))
        ignore = np.zeros((len(draws), batch, 2 * batch), bool)
        return EnsembleBatch(self._queries[queries], self._passages[rows], index, ignore)


class Ours:
    """A compiled step and the state it continues from."""

    def __init__(self, arguments: argparse.Namespace, members: int, batch: EnsembleBatch) -> None:
        placement = MemberPlacement.over(jax.devices()[:1], members)
        init = functools.partial(
            init_members, dim=arguments.dim, config=config_of(arguments), members=members
        )
        optimizer = optimizer_of(arguments)
        self.state = init_ensemble_state(init, optimizer, 0, placement)
        self.batch = jax.device_put(batch, placement.split)
        self.step = make_ensemble_step(optimizer, placement)
        self()

    def __call__(self) -> None:
        """One step."""
        self.state, metrics = self.step(self.state, self.batch)
        assert not int(metrics["skipped_in_a_row"])
        jax.block_until_ready(self.state)


class Torch:
    """All members' step in PyTorch: one batched product per layer."""

    def __init__(self, arguments: argparse.Namespace, batch: EnsembleBatch) -> None:
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.queries, self.passages = (
            torch.tensor(np.asarray(array), device=self.device)
            for array in (batch.queries, batch.passages)
        )
        index = np.asarray(batch.positive_index, np.int64)
        self.target = torch.tensor(index, device=self.device)
        self.layers = []
        for inputs, outputs in config_of(arguments).layer_dims(arguments.dim):
            shapes = ((arguments.members, inputs, outputs), (arguments.members, 1, outputs))
            self.layers.append(
                [
                    torch.nn.Parameter(
                        (2 * torch.rand(shape, device=self.device) - 1) / inputs**0.5
                    )
                    for shape in shapes
                ]
            )
        self.parameters = [leaf for layer in self.layers for leaf in layer]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=2e-5, weight_decay=0.0)
        self()

    def __call__(self) -> None:
        """One step."""
        torch, hidden = self.torch, self.queries
        for place, (kernel, bias) in enumerate(self.layers):
            hidden = torch.baddbmm(bias, hidden, kernel)
            hidden = torch.relu(hidden) if place < len(self.layers) - 1 else hidden
        logits = torch.bmm(hidden, self.passages.transpose(1, 2))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), self.target.flatten(), reduction="sum"
        )
        self.optimizer.zero_grad()
        (loss / self.target.shape[1]).backward()
        # Each member's gradient by its own norm.
        squares = sum(leaf.grad.square().sum(dim=(1, 2)) for leaf in self.parameters)
        scale = torch.clamp(2.0 / squares.sqrt(), max=1.0)
        for leaf in self.parameters:
            leaf.grad *= scale[:, None, None]
        self.optimizer.step()
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(arguments: argparse.Namespace) -> None:
    gather = Gathering(arguments)
    calls: dict[str, Callable[[], object]] = {}
    if "ours" in arguments.sides:
        calls["one"] = Ours(arguments, 1, gather(1))
        calls["members"] = Ours(arguments, arguments.members, gather())
        calls["batches"] = gather
    if "torch" in arguments.sides:
        calls["torch"] = Torch(arguments, gather())
    times = in_turns(calls, repeats=arguments.repeats, uncounted=1)
    packages = ("torch",) if "torch" in arguments.sides else ()
    common = {"members": arguments.members, "dim": arguments.dim, "batch": arguments.batch}
    for name, call_times in times.items():
        figure: dict[str, Any] = {"figure": name, **common, **call_times.figures(None)}
        if name != "one" and "one" in times:
            figure["ratio_to_one"] = ratio(call_times, times["one"])
        if name != "members" and "members" in times:
            figure["ratio_to_members"] = ratio(call_times, times["members"])
        show({**figure, **machine(*packages)})


def ratio(times: Times, to: Times) -> float:
    return statistics.median(times.wall) / statistics.median(to.wall)


def compile_for(arguments: argparse.Namespace) -> None:
    topology = open_topology(arguments.topology)
    placement = MemberPlacement.over(list(topology.devices), arguments.members)
    optimizer, size = optimizer_of(arguments), placement.padded
    init = functools.partial(
        init_members, dim=arguments.dim, config=config_of(arguments), members=size
    )

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = placement.split if leaf.ndim else placement.replicated
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    state = jax.eval_shape(lambda: init_ensemble_state(init, optimizer, 0, placement))
    batch = jax.eval_shape(lambda: Gathering(small(arguments))(size))
    compiled = compile_step(
        make_ensemble_step(optimizer, placement),
        jax.tree.map(placed, state),
        jax.tree.map(placed, batch),
        mesh=placement.mesh,
        effort=CompilerEffort.QUICK,
    )
    show(
        {
            "figure": arguments.topology,
            "members": arguments.members,
            "padded": size,
            "members_per_chip": size // placement.mesh.size,
            "peak_bytes_per_chip": compiled.memory.peak,
            "collectives": len(compiled.collectives),
            "collective_bytes": sum(each.num_bytes for each in compiled.collectives),
        }
    )


def small(arguments: argparse.Namespace) -> argparse.Namespace:
    """The same batches from few vectors: only shapes are looked at."""
    return argparse.Namespace(**{**vars(arguments), "passages": 2 * arguments.batch})


def main() -> None:
    arguments = parse()
    if arguments.topology:
        compile_for(arguments)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
