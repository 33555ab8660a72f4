"""Reports of a compiled step, as text and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from taser_jax.devices.compilation.ahead_of_time import CompiledStep
from taser_jax.devices.compilation.collectives import Collective, Network
from taser_jax.devices.compilation.products import MatrixProduct
from taser_jax.devices.compilation.roofline import Roofline, roofline
from taser_jax.devices.compilation.topologies import Topology
from taser_jax.devices.copied_axes import CopiedAxis

_GIB, _MIB = 2**30, 2**20
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A compiled step, compared with the model's formulas and the chip's limits.

    Attributes:
        name: the step's name.
        about: its input, in words.
        topology: the target.
        mesh: devices along each axis.
        compiled: the compiler's report.
        model_flops: useful FLOPs of one device, by the model's formulas.
        copied: axes of parameters that could not be split.
    """

    name: str
    about: str
    topology: Topology
    mesh: Mapping[str, int]
    compiled: CompiledStep
    model_flops: float
    copied: Sequence[CopiedAxis] = ()

    @property
    def num_devices(self) -> int:
        """Devices that share the step."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether a chip has the memory; the compiler accepts some programs that do not fit."""
        return self.compiled.memory.peak <= self.topology.chip.hbm_bytes

    @property
    def executed_flops(self) -> float:
        """A device's part of all matrix products: loops and recomputation included."""
        return sum(product.flops for product in self.compiled.products) / self.num_devices

    @property
    def executed_passes(self) -> float:
        """The same in passes of the matrix unit: more for exact float32 products."""
        return sum(each.flops * each.passes for each in self.compiled.products) / self.num_devices

    @property
    def float32_products(self) -> list[MatrixProduct]:
        """Products of float32 operands, largest first."""
        found = [product for product in self.compiled.products if product.dtype == "float32"]
        return sorted(found, key=lambda product: -product.flops)

    @property
    def loop_factor(self) -> float:
        """Factor for the compiler's bytes, since it counts the body of a loop once.

        1 without loops around matrix products; else products computed over those in the text.
        """
        once = sum(product.flops / product.times for product in self.compiled.products)
        return self.executed_flops * self.num_devices / once if once else 1.0

    @property
    def roofline(self) -> Roofline:
        """The least time of a step."""
        return roofline(
            self.topology,
            flops=self.executed_passes,
            model_flops=self.model_flops,
            num_bytes=self.compiled.compiler_bytes * self.loop_factor,
            collectives=self.compiled.collectives,
        )

    def as_json(self) -> dict[str, object]:
        """The report as plain values, in bytes, FLOPs and seconds of one device."""
        estimate = self.roofline
        return {
            "step": self.name,
            "about": self.about,
            "topology": self.topology.name,
            "num_slices": self.topology.num_slices,
            "mesh": dict(self.mesh),
            "compiler_effort": self.compiled.effort.value,
            "fits": self.fits,
            "memory": dataclasses.asdict(self.compiled.memory)
            | {"peak": self.compiled.memory.peak, "hbm": self.topology.chip.hbm_bytes},
            "flops": {
                "model": self.model_flops,
                "matrix_products": self.executed_flops,
                "matrix_passes": self.executed_passes,
                "compiler": self.compiled.compiler_flops,
                "loop_factor": self.loop_factor,
            },
            "bytes_accessed": self.compiled.compiler_bytes,
            "collectives": [
                dataclasses.asdict(each)
                | {
                    "kind": each.kind.value,
                    "network": each.network.value,
                    "sent": each.link_bytes,
                }
                for each in self.compiled.collectives
            ],
            "float32_products": [dataclasses.asdict(each) for each in self.float32_products],
            "copied_axes": [dataclasses.asdict(each) for each in self.copied],
            "loops_of_unknown_length": self.compiled.unknown_loops,
            "warnings": list(self.compiled.warnings),
            "roofline": dataclasses.asdict(estimate)
            | {
                "step_seconds": estimate.step_seconds,
                "sequential_seconds": estimate.sequential_seconds,
                "bound": estimate.bound.value,
                "mfu": estimate.mfu,
            },
        }

    def __str__(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1)
        slices = f" x {self.topology.num_slices} slices" if self.topology.num_slices > 1 else ""
        lines = [
            f"{self.name} on {self.topology.name}{slices}: mesh of {axes or '1 device'}; "
            f"{self.about}; {self.compiled.effort.value} effort of the compiler",
            *_memory_lines(self),
            *_arithmetic_lines(self),
            *_collective_lines(self.compiled.collectives),
            *_time_lines(self.roofline),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class StepRefusal:
    """A step that the compiler could not place in a device's memory.

    Attributes:
        name: the step's name.
        topology: the target.
        needed: bytes per device.
        available: bytes a device has.
    """

    name: str
    topology: Topology
    needed: int
    available: int

    def as_json(self) -> dict[str, object]:
        """The refusal as plain values; `fits` distinguishes it from a report."""
        return {
            "step": self.name,
            "topology": self.topology.name,
            "num_slices": self.topology.num_slices,
            "fits": False,
            "memory": {"peak": self.needed, "hbm": self.available},
        }

    def __str__(self) -> str:
        return (
            f"{self.name} on {self.topology.name}: does not fit, "
            f"{self.needed / _GIB:.2f} of {self.available / _GIB:.2f} GiB per device"
        )


def _memory_lines(report: StepReport) -> list[str]:
    memory, hbm = report.compiled.memory, report.topology.chip.hbm_bytes
    entries = {
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "outputs": memory.outputs,
        "outputs in the arguments' place": memory.aliased,
        "program": memory.program,
    }
    return [
        "  memory of a device, GiB",
        *(f"    {name:<33}{size / _GIB:8.3f}" for name, size in entries.items()),
        f"    {'peak':<33}{memory.peak / _GIB:8.3f} of {hbm / _GIB:.0f} ({memory.peak / hbm:.0%})",
    ]


def _arithmetic_lines(report: StepReport) -> list[str]:
    model, compiled = report.model_flops, report.compiled
    rows = {
        "the model's": model,
        "matrix products computed": report.executed_flops,
        "the compiler's count": compiled.compiler_flops,
    }
    lines = [
        *(f"  {axis}" for axis in report.copied),
        "  arithmetic of a device, TFLOPs",
        *(
            f"    {name:<33}{flops / 1e12:8.3f}  {flops / model:.2f} of the model's"
            for name, flops in rows.items()
        ),
        "  memory traffic of a device, GiB",
        f"    {'the compiler’s count':<33}{compiled.compiler_bytes / _GIB:8.3f}",
    ]
    if report.loop_factor > 1:
        lines.append(
            f"    the compiler counts loop bodies once; products count {report.loop_factor:.2f} "
            "times as much with all rounds, and the traffic is taken to"
        )
    if compiled.unknown_loops:
        lines.append(
            f"  loops of a length that the compiler does not know: {compiled.unknown_loops}; their "
            "arithmetic, traffic and collectives count for one round, so the times are too short"
        )
    lines += [f"  {warning}" for warning in compiled.warnings]
    lines += _float32_lines(report)
    return lines


def _float32_lines(report: StepReport) -> list[str]:
    products = report.float32_products
    if not products:
        return ["  no float32 matrix products"]
    share = sum(each.flops for each in products) / report.num_devices / report.executed_flops
    lines = [f"  {len(products)} float32 matrix products, {share:.2%} of the arithmetic; largest:"]
    lines += [
        f"    {each.flops / report.num_devices / 1e9:10.3f} GFLOPs  {each.precision:<8} "
        f"{each.operation or '(the loss)'}"
        for each in products[:_SHOWN]
    ]
    return lines


def _collective_lines(collectives: Sequence[Collective]) -> list[str]:
    if not collectives:
        return ["  no collectives"]
    lines = [f"  {'collectives of a step':<35}{'count':>8}{'MiB':>12}{'MiB sent':>12}"]
    by_name = sorted(collectives, key=_name)
    for name, members in itertools.groupby(by_name, key=_name):
        lines.append(_collective_line(name, list(members)))
    lines.append("  largest")
    for each in sorted(collectives, key=lambda each: -each.link_bytes)[:_SHOWN]:
        lines.append(
            f"    {each.num_bytes * each.times / _MIB:10.3f} MiB  {_name(each):<18} "
            f"over {each.group_size}: {each.operation}"
        )
    return lines


def _name(collective: Collective) -> str:
    crosses = collective.network is Network.DCN
    return f"{collective.kind.value}{', DCN' if crosses else ''}"


def _collective_line(name: str, members: Sequence[Collective]) -> str:
    count = sum(each.times for each in members)
    size = sum(each.times * each.num_bytes for each in members)
    sent = sum(each.link_bytes for each in members)
    return f"    {name:<33}{count:>8}{size / _MIB:>12.3f}{sent / _MIB:>12.3f}"


def _time_lines(estimate: Roofline) -> list[str]:
    milliseconds = {
        "compute": estimate.compute,
        "HBM": estimate.hbm,
        "ICI": estimate.ici,
    }
    if estimate.dcn:
        milliseconds["DCN"] = estimate.dcn
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in milliseconds.items())
    return [
        f"  roofline: {1e3 * estimate.step_seconds:.2f} ms per step, bound by "
        f"{estimate.bound.value}, MFU {estimate.mfu:.1%}",
        f"    ms of each: {parts}; one after another {1e3 * estimate.sequential_seconds:.2f}",
    ]
