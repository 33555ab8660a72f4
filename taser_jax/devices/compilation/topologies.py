"""TPU topologies by name, without a TPU: libtpu describes them and compiles for them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from taser_jax.devices.compilation.chips import CHIPS, Chip
from taser_jax.storage.errors import ConfigError

# Shapes of slices that TPU VMs offer; libtpu is queried for any other shape.
KNOWN_SHAPES: dict[str, tuple[str, ...]] = {
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v6e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "tpu7x": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
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
        num_slices: slices of this shape.
        devices: JAX's descriptions of all of them.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    num_slices: int
    devices: Sequence[jax.Device]

    @property
    def num_chips(self) -> int:
        """Chips of all slices; TPU7x has two devices on each."""
        return math.prod(self.shape) * self.num_slices

    def links(self, group_size: int, extent: Sequence[int] | None = None) -> int:
        """Links of a chip that a collective can use, by the axes that its groups span.

        Along an axis that closes to a ring a chip sends both ways. Elsewhere the chip at the end
        has one neighbour, and the others wait for it: one link. A part of an axis is no ring.

        Args:
            group_size: devices that take part.
            extent: chips of a group along each axis. Where it is None, a group as large as the
                slice spans all of it, and a smaller one is taken to have one link.
        """
        if extent is None:
            extent = self.shape if group_size >= math.prod(self.shape) else ()
        # Coordinates have three axes on two-dimensional tori too.
        spans = zip(extent, self.shape, self._rings, strict=False)
        links = sum(2 if ring and size == length else 1 for size, length, ring in spans if size > 1)
        return max(1, min(links, self.chip.num_links))

    @property
    def _rings(self) -> tuple[bool, ...]:
        """Which axes of a slice close to rings.

        v4, v5p and TPU7x are cubes of 4x4x4 chips; optical switches join the faces of slices of
        whole cubes, smaller slices are open (the pages of `chips.py`). v5e and v6e are one torus of
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
    if generation not in KNOWN_SHAPES or not all(size.isdecimal() for size in shape.split("x")):
        raise _unknown(name)
    if num_slices < 1:
        raise ConfigError(f"{num_slices} slices", where="num_slices", expected="1 or more")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "libtpu is not installed, and it has the TPU compiler",
            where="--topology",
            expected="the libtpu that this jax was made for; no TPU is needed",
            fix=f"pip install 'jax[tpu]=={jax.__version__}'",
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {}
    if generation in _MEGACORE:
        options["chip_config_name"] = "megacore"
    if set(shape.split("x")) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        found = topologies.get_topology_desc(
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
        num_slices=num_slices,
        devices=found.devices,
    )


# The first libtpu seen to compile for a chip; earlier ones end the process.
_OLDEST_COMPILER = {"tpu7x": (0, 0, 50)}


def require_compiler(topology: Topology) -> None:
    """Refuses a topology that this libtpu describes but cannot compile for.

    Raises:
        ConfigError: libtpu is too old for the chip.
    """
    found = importlib.metadata.version("libtpu")
    oldest = _OLDEST_COMPILER.get(topology.chip.name, ())
    if tuple(int(part) for part in found.split(".")[:3]) < oldest:
        raise ConfigError(
            f"libtpu {found} crashes when it compiles for {topology.chip.name}",
            where=topology.name,
            expected=f"libtpu {'.'.join(map(str, oldest))} or later, which comes with jax 0.12",
            fix="install with Python 3.12 or later; formulas need no compiler: taser plan "
            "--gin.plan_recipe.num_compiled=0",
        )


def one_host(topology: Topology) -> Topology:
    """The chips of one of its hosts, as a topology of their own."""
    hosts = len({device.process_index for device in topology.devices})
    if hosts == 1:
        return topology
    chips = tuple(min(size, 2) for size in topology.shape[:2])
    shape = (*chips, 1) if len(topology.shape) > 2 else chips
    return open_topology(f"{topology.chip.name}:{'x'.join(map(str, shape))}")


def _unknown(name: str | None, *, reason: str | None = None) -> ConfigError:
    known = [f"{chip}:{shape}" for chip, shapes in KNOWN_SHAPES.items() for shape in shapes]
    nearest = difflib.get_close_matches(name or "", known, n=1, cutoff=0.4)
    return ConfigError(
        f"no topology {name!r}" + (f" ({reason})" if reason else ""),
        where="--topology",
        expected="; ".join(f"{chip}: {', '.join(KNOWN_SHAPES[chip])}" for chip in KNOWN_SHAPES),
        fix=f"did you mean {nearest[0]}?" if nearest else "write, for example, --topology=v5e:4x4",
    )
