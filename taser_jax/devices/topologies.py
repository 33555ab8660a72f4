"""TPU chips with their peaks, and topologies by name: libtpu describes them without a TPU."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from taser_jax.storage.errors import ConfigError

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU chip, or what JAX sees as a device of it.

    v4 and v5p have two cores that JAX sees as one device (megacore). TPU7x has two chiplets, each a
    device with half of the chip's memory and bandwidths.

    Attributes:
        name: generation, the first part of a topology's name.
        device_kind: JAX's name of its devices.
        hbm_bytes: memory.
        peak_flops: dense bfloat16 FLOP/s.
        hbm_bandwidth: bytes/s between memory and core.
        link_bandwidth: bytes/s out of one inter-chip link.
        num_links: inter-chip links.
        network_bandwidth: bytes/s of a chip's share of its host's connection to the data centre.
        source: page with the figures.
    """

    name: str
    device_kind: str
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    num_links: int
    network_bandwidth: float
    source: str


_DOCS = "https://cloud.google.com/tpu/docs"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # Network: 50 Gbit/s a v5p chip; 6.4 and 25.6 Tbit/s a pod of 256 v5e and v6e chips. Nothing
        # is published for v4: v5p's is taken.
        # Links: all-reduce bandwidth of a pod, 1.1 PB/s, over 4,096 chips of six links.
        Chip("v4", "TPU v4", 32 * _GIB, 275e12, 1.2e12, 45e9, 6, 6.25e9, f"{_DOCS}/v4"),
        # Links: 400 GB/s a chip, both directions, over four; v5p: 1,200 GB/s over six. v6e:
        # the page has had 3,200 and 3,584 Gbit/s a chip, one direction, over four; the lower agrees
        # with its all-reduce bandwidth of a pod, 102.4 TB/s over 256 chips.
        Chip("v5e", "TPU v5 lite", 16 * _GIB, 197e12, 819e9, 50e9, 4, 3.125e9, f"{_DOCS}/v5e"),
        Chip("v5p", "TPU v5", 95 * _GIB, 459e12, 2.765e12, 100e9, 6, 6.25e9, f"{_DOCS}/v5p"),
        # TPU7x: half a chip's 192 GiB, 2,307 TFLOP/s, 7,380 GB/s, 1,200 GB/s over six links and
        # 100 Gbit/s.
        Chip("v6e", "TPU v6 lite", 32 * _GIB, 918e12, 1.638e12, 100e9, 4, 12.5e9, f"{_DOCS}/v6e"),
        Chip("tpu7x", "TPU7x", 96 * _GIB, 1153.5e12, 3.69e12, 50e9, 6, 6.25e9, f"{_DOCS}/tpu7x"),
    )
}
# Chip -> US dollars for an hour on demand, by the list of February 2025; the source, and what is
# not in it: launch/_tables.py.
PRICES = {"v5e": 1.20, "v5p": 4.20}
# Dense bfloat16 FLOP/s of one device, by the vendors' data sheets; a prefix of device_kind.
PEAK_FLOPS = {
    **{chip.device_kind: chip.peak_flops for chip in CHIPS.values()},
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops() -> float | None:
    """Peak of all devices together; None if the table lacks this kind of device."""
    kind = jax.devices()[0].device_kind
    matches = [prefix for prefix in PEAK_FLOPS if kind.startswith(prefix)]
    if not matches:
        return None
    return PEAK_FLOPS[max(matches, key=len)] * jax.device_count()


# Shapes of slices that TPU VMs offer, of chips with four and with six links; libtpu is queried for
# any other shape.
_SHAPES = {
    4: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    6: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
# Both cores of a chip are one device, as on TPU VMs; libtpu's own default for v4 is one per core.
_MEGACORE = ("v4", "v5p")

_ENVIRONMENT = {
    # There is no TPU VM whose metadata libtpu could query.
    "TPU_SKIP_MDS_QUERY": "1",
    # No chip is opened, so several compilations may run at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips to compile for.

    Attributes:
        name: as given, "v5e:4x4".
        chip: their kind.
        shape: chips along each axis of a slice.
        devices: JAX's descriptions of all of them.
        num_slices: slices of this shape.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: Sequence[jax.Device]
    num_slices: int = 1

    @property
    def num_chips(self) -> int:
        """Chips of all slices; TPU7x has two devices on each."""
        return math.prod(self.shape) * self.num_slices

    @property
    def dollars_an_hour(self) -> float | None:
        """Price of all chips on demand; None where the list has none.

        Example:
            The 8 chips of v5e:2x4 cost 8 x 1.20 = 9.60 dollars.
        """
        price = PRICES.get(self.chip.name)
        return None if price is None else price * self.num_chips

    def links(self, group_size: int) -> int:
        """Links of a chip that a collective can use.

        A group as large as the slice spans all of its axes; a smaller one is taken to have one
        link. Along an axis that closes to a ring a chip sends both ways. Elsewhere the chip at the
        end has one neighbour, and the others wait for it: one link.

        Args:
            group_size: devices that take part.
        """
        if group_size < math.prod(self.shape):
            return 1
        axes = zip(self.shape, self._rings, strict=True)
        links = sum(2 if is_ring else 1 for length, is_ring in axes if length > 1)
        return max(1, min(links, self.chip.num_links))

    @property
    def _rings(self) -> tuple[bool, ...]:
        """Which axes of a slice close to rings.

        v4, v5p and TPU7x are cubes of 4x4x4 chips; optical switches join the faces of slices of
        whole cubes, smaller slices are open (the pages of `CHIPS`). v5e and v6e are one torus of
        16x16 chips, and only an axis of all 16 has its ends in the slice
        (jax-ml.github.io/scaling-book/tpus).
        """
        if len(self.shape) == 3:
            return (all(length % 4 == 0 for length in self.shape),) * 3
        return tuple(length == 16 for length in self.shape)


def open_topology(name: str | None, *, num_slices: int = 1) -> Topology:
    """Queries libtpu for the chips of a topology.

    Example:
        `open_topology("v5e:4x4")` has 16 devices on 4 hosts.

    Args:
        name: "<generation>:<chips along each axis>".
        num_slices: slices of it.

    Raises:
        ConfigError: libtpu is missing, or there is no such topology.
    """
    generation, _, shape = (name or "").partition(":")
    if generation not in CHIPS or not all(size.isdecimal() for size in shape.split("x")):
        raise _unknown(name)
    if num_slices < 1:
        raise ConfigError(f"{num_slices} slices", where="num_slices", fix="give 1 or more")
    if importlib.util.find_spec("libtpu") is None:
        fix = f"pip install 'jax[tpu]=={jax.__version__}'; no TPU is needed"
        raise ConfigError("libtpu, the TPU compiler, is not installed", where="--topology", fix=fix)
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, object] = {}
    if generation in _MEGACORE:
        options["chip_config_name"] = "megacore"
    if set(shape.split("x")) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{generation}:{shape}", **options
        )
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise _unknown(name, reason=str(error).splitlines()[0]) from error
    return Topology(
        name=f"{generation}:{shape}",
        chip=CHIPS[generation],
        shape=tuple(int(size) for size in shape.split("x")),
        devices=description.devices,
        num_slices=num_slices,
    )


def _unknown(name: str | None, *, reason: str | None = None) -> ConfigError:
    names = [f"{chip.name}:{shape}" for chip in CHIPS.values() for shape in _SHAPES[chip.num_links]]
    nearest = difflib.get_close_matches(name or "", names, n=1, cutoff=0.4)
    meant = f"did you mean {nearest[0]}? " if nearest else ""
    problem = f"no topology {name!r}" + (f" ({reason})" if reason else "")
    return ConfigError(problem, where="--topology", fix=f"{meant}TPU VMs have {', '.join(names)}")
