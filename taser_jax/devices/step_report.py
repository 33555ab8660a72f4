"""Report of a compiled training step, with the least time that it can take, as text and JSON."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from taser_jax.devices.collectives import DCN, ICI, Collective
from taser_jax.devices.compiler import CompiledStep
from taser_jax.devices.mesh import Topology

_GIB, _MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds per step that each resource of a device is busy, at its peak.

    Attributes:
        compute: matrix products at the chip's bfloat16 peak.
        hbm: bytes that the compiler counts, at memory bandwidth.
        ici: bytes that collectives send, over the links.
        dcn: bytes that collectives send to other slices, over the data centre's network.
        model_flops: useful FLOPs of a device, the numerator of MFU.
        peak_flops: per device.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float
    model_flops: float
    peak_flops: float

    @property
    def seconds(self) -> dict[str, float]:
        """Resource -> how long a step needs it."""
        needed = {"compute": self.compute, "HBM": self.hbm, ICI: self.ici}
        return needed | ({DCN: self.dcn} if self.dcn else {})

    @property
    def bound(self) -> str:
        """The resource that is needed longest."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def step_seconds(self) -> float:
        """Seconds if all resources work at once: the longest decides."""
        return max(self.seconds.values())

    @property
    def sequential_seconds(self) -> float:
        """Seconds if no two resources work at once: their sum."""
        return sum(self.seconds.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of a step of `step_seconds`: an upper bound."""
        return self.model_flops / (self.step_seconds * self.peak_flops)


def roofline(
    topology: Topology,
    *,
    flops: float,
    model_flops: float,
    num_bytes: float,
    collectives: Sequence[Collective],
) -> Roofline:
    """A step's use of a device's resources.

    Example:
        On v5e 197e9 FLOPs take 1 ms, and so do 819e6 bytes of memory traffic.

    Args:
        topology: the topology, for its chips' peaks.
        flops: FLOPs that a device executes, in passes of the matrix unit.
        model_flops: the useful ones among them.
        num_bytes: bytes read and written per device.
        collectives: the step's collectives.
    """
    chip, seconds = topology.chip, {ICI: 0.0, DCN: 0.0}
    for each in collectives:
        bandwidth = chip.network_bandwidth
        if each.network == ICI:
            bandwidth = topology.links(each.group_size) * chip.link_bandwidth
        seconds[each.network] += each.link_bytes / bandwidth
    return Roofline(
        compute=flops / chip.peak_flops,
        hbm=num_bytes / chip.hbm_bandwidth,
        ici=seconds[ICI],
        dcn=seconds[DCN],
        model_flops=model_flops,
        peak_flops=chip.peak_flops,
    )


@dataclasses.dataclass(frozen=True)
class RealWork:
    """The part of a step that is not padding.

    Attributes:
        tokens: of the step's texts.
        padded_tokens: the same with padding.
        share: share of the FLOPs that is not spent on padding, by the model's formulas.
    """

    tokens: int
    padded_tokens: int
    share: float

    @property
    def padding(self) -> float:
        """Share of positions that hold no token."""
        return 1 - self.tokens / self.padded_tokens


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A compiled step, compared with the model's formulas and the chip's limits.

    Attributes:
        about: its input, in words.
        topology: the target.
        mesh: devices along each axis.
        compiled: the compiler's report.
        model_flops: FLOPs of one device by the model's formulas, padded positions included.
        real: the work without padding; None where the texts' lengths are unknown.
        copied: which parameters could not be split, in words.
    """

    about: str
    topology: Topology
    mesh: Mapping[str, int]
    compiled: CompiledStep
    model_flops: float
    real: RealWork | None = None
    copied: Sequence[str] = ()

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
    def loop_factor(self) -> float:
        """Factor for the compiler's bytes, since it counts the body of a loop once.

        1 without loops around matrix products; else products computed over those in the text.
        """
        once = sum(product.flops / product.times for product in self.compiled.products)
        return self.executed_flops * self.num_devices / once if once else 1.0

    @property
    def roofline(self) -> Roofline:
        """The least time of a step; exact float32 products take several passes."""
        passes = sum(each.flops * each.passes for each in self.compiled.products)
        return roofline(
            self.topology,
            flops=passes / self.num_devices,
            model_flops=self.model_flops,
            num_bytes=self.compiled.compiler_bytes * self.loop_factor,
            collectives=self.compiled.collectives,
        )

    @property
    def real_mfu(self) -> float | None:
        """MFU that counts the work of real tokens alone: an upper bound."""
        return None if self.real is None else self.roofline.mfu * self.real.share

    def as_json(self) -> dict[str, object]:
        """The report's figures as plain values, in bytes, FLOPs and seconds of one device."""
        memory, estimate = self.compiled.memory, self.roofline
        return {
            "topology": self.topology.name,
            "num_slices": self.topology.num_slices,
            "mesh": dict(self.mesh),
            "fits": self.fits,
            "memory": dataclasses.asdict(memory)
            | {"peak": memory.peak, "hbm": self.topology.chip.hbm_bytes},
            "flops": {
                "model": self.model_flops,
                "matrix_products": self.executed_flops,
                "compiler": self.compiled.compiler_flops,
                "loop_factor": self.loop_factor,
            },
            "bytes_accessed": self.compiled.compiler_bytes,
            "collectives": [
                dataclasses.asdict(each) | {"sent": each.link_bytes}
                for each in self.compiled.collectives
            ],
            "roofline": dataclasses.asdict(estimate)
            | {
                "step_seconds": estimate.step_seconds,
                "bound": estimate.bound,
                "mfu": estimate.mfu,
                "mfu_of_real_tokens": self.real_mfu,
            },
            "padding": None if self.real is None else self.real.padding,
        }

    def __str__(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1)
        slices = f" x {self.topology.num_slices} slices" if self.topology.num_slices > 1 else ""
        lines = [
            f"training step on {self.topology.name}{slices}: mesh of {axes or '1 device'}; "
            f"{self.about}; {self.compiled.effort.value} effort of the compiler",
            *_memory_lines(self),
            *_arithmetic_lines(self),
            *_collective_lines(self.compiled.collectives),
            *_time_lines(self.roofline),
        ]
        if self.real is not None:
            counts = f"{self.real.tokens:,} tokens in {self.real.padded_tokens:,} positions"
            share = f"MFU of the tokens alone {self.real_mfu:.1%}"
            lines.append(f"  {self.real.padding:.1%} padding: {counts}; {share}")
        return "\n".join(lines)


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
    compiled = report.compiled
    rows = {
        "the model's": report.model_flops,
        "matrix products computed": report.executed_flops,
        "the compiler's count": compiled.compiler_flops,
    }
    lines = [
        *(f"  {message}" for message in report.copied),
        "  arithmetic of a device, TFLOPs",
        *(
            f"    {name:<33}{flops / 1e12:8.3f}  {flops / report.model_flops:.2f} of the model's"
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
    flops = [each.flops for each in compiled.products if each.dtype == "float32"]
    share = sum(flops) / report.num_devices / report.executed_flops if flops else 0.0
    return [*lines, f"  {len(flops)} float32 matrix products, {share:.2%} of the arithmetic"]


def _collective_lines(collectives: Sequence[Collective]) -> list[str]:
    if not collectives:
        return ["  no collectives"]
    lines = [f"  {'collectives of a step':<35}{'count':>8}{'MiB':>12}{'MiB sent':>12}"]
    for name, members in itertools.groupby(sorted(collectives, key=_name), key=_name):
        count = size = sent = 0.0
        for each in members:
            count += each.times
            size += each.times * each.num_bytes / _MIB
            sent += each.link_bytes / _MIB
        lines.append(f"    {name:<33}{count:>8.0f}{size:>12.3f}{sent:>12.3f}")
    return lines


def _name(collective: Collective) -> str:
    return collective.kind + (f", {DCN}" if collective.network == DCN else "")


def _time_lines(estimate: Roofline) -> list[str]:
    parts = ", ".join(f"{name} {1e3 * each:.2f}" for name, each in estimate.seconds.items())
    return [
        f"  roofline: {1e3 * estimate.step_seconds:.2f} ms per step, bound by "
        f"{estimate.bound}, MFU {estimate.mfu:.1%}",
        f"    ms of each: {parts}; one after another {1e3 * estimate.sequential_seconds:.2f}",
    ]
