"""The least time a step can take: arithmetic, memory, links and network, each at its peak."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from taser_jax.devices.compilation.collectives import Collective, Network
from taser_jax.devices.compilation.topologies import Topology


class Bound(enum.Enum):
    """The resource that limits a step."""

    COMPUTE = "compute"
    HBM = "HBM"
    ICI = "ICI"
    DCN = "DCN"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds per step that each resource of a device is busy.

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
    def bound(self) -> Bound:
        """The resource that is needed longest."""
        seconds = {
            Bound.COMPUTE: self.compute,
            Bound.HBM: self.hbm,
            Bound.ICI: self.ici,
            Bound.DCN: self.dcn,
        }
        return max(seconds, key=lambda bound: seconds[bound])

    @property
    def step_seconds(self) -> float:
        """Seconds if all resources work at once: the longest decides."""
        return max(self.compute, self.hbm, self.ici, self.dcn)

    @property
    def sequential_seconds(self) -> float:
        """Seconds if no two resources work at once: their sum."""
        return self.compute + self.hbm + self.ici + self.dcn

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
    chip = topology.chip
    return Roofline(
        compute=flops / chip.peak_flops,
        hbm=num_bytes / chip.hbm_bandwidth,
        ici=sum(
            each.link_bytes / (topology.links(each.group_size, each.extent) * chip.link_bandwidth)
            for each in collectives
            if each.network is Network.ICI
        ),
        dcn=sum(each.link_bytes for each in collectives if each.network is Network.DCN)
        / chip.network_bandwidth,
        model_flops=model_flops,
        peak_flops=chip.peak_flops,
    )
