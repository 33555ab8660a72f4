"""Devices of a program: a mesh of those that are here, or of a TPU topology by its name.

A mesh says how many devices are along each axis, which are neighbours and what each has of a batch;
libtpu describes a topology without a TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Int, Shaped, UInt32

from taser_jax.storage.errors import ConfigError, did_you_mean

_GIB = 2**30
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
MESH_AXES = ("replica", "data", "fsdp", "model")
# Models split activations over these axes, whatever the rules for parameters.
BATCH_AXES = ("replica", "data", "fsdp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; -1, at most once, means all remaining devices.

    Attributes:
        replica: parts of the batch, with everything else copied. It spans the slices of a
            multi-slice TPU job, whose links are slow; every other axis stays inside a slice.
        data: parts of the batch; parameters are copied along it.
        fsdp: parts of the batch and of the parameters.
        model: parts of the parameters and of the matrix products with them.
    """

    replica: int = 1
    data: int = -1
    fsdp: int = 1
    model: int = 1

    def shape(self, num_devices: int) -> tuple[int, int, int, int]:
        """Devices along (replica, data, fsdp, model).

        Raises:
            ConfigError: the axes do not multiply to `num_devices`.
        """
        sizes = {name: getattr(self, name) for name in MESH_AXES}
        axes = ", ".join(f"{name} {size}" for name, size in sizes.items())
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            fix = "give each axis 1 or more, and -1 to one at most"
            raise ConfigError(f"a mesh of {axes}", where="mesh", fix=fix)
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free and num_devices % fixed == 0:
            sizes = {**sizes, free[0]: num_devices // fixed}
        if math.prod(sizes.values()) != num_devices:
            count = f"{fixed} devices{' or a multiple' if free else ''}"
            problem = f"a mesh of {count} ({axes}); there are {num_devices} devices"
            fix = f"let the axes multiply to {num_devices}; one of -1 takes the remaining devices"
            raise ConfigError(problem, where="mesh", fix=fix)
        return sizes["replica"], sizes["data"], sizes["fsdp"], sizes["model"]


def make_mesh(
    config: MeshConfig | None = None, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes (replica, data, fsdp, model), neighbours along the last.

    On several TPU slices, `replica` spans them and the other axes stay inside one.

    Args:
        config: devices along each axis; None puts all on `data`.
        devices: None means all of `jax.devices()`.

    Raises:
        ConfigError: the axes do not multiply to the number of devices, or do not fit its slices.
    """
    devices = jax.devices() if devices is None else devices
    grid = device_grid(config or MeshConfig(), devices)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def device_grid(config: MeshConfig, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of a mesh, [replica, data, fsdp, model]; see `make_mesh`."""
    shape: Sequence[int] = config.shape(len(devices))
    # GPUs and CPUs may report their hosts as slices, but have one network.
    on_tpu = devices[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if on_tpu else 1
    make: Callable[..., np.ndarray] = mesh_utils.create_device_mesh
    if slices > 1:
        replicas, *inside = shape
        if replicas % slices:
            problem = f"{replicas} devices along replica, which must span {slices} slices"
            fix = f"set MESH_REPLICA to a multiple of {slices}"
            raise ConfigError(problem, where="mesh", fix=fix)
        between = (slices, *(1 for _ in inside))
        make = functools.partial(mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=between)
        shape = (replicas // slices, *inside)
    try:
        return make(shape, devices=devices)
    except NotImplementedError:
        # Puts two mesh axes along one axis of the torus: fewer neighbours, but a valid mesh.
        return make(shape, devices=devices, allow_split_physical_axes=True)


@dataclasses.dataclass(frozen=True)
class HostShare:
    """The parts of a global batch that a host makes.

    On a pod the parts need not be contiguous: devices are ordered by their links, not by host.

    Example:
        >>> HostShare(parts=(0, 3), count=4).rows(8)
        array([0, 1, 6, 7])

    Attributes:
        parts: the host's parts, in ascending order; several hosts may make the same part.
        count: number of equal parts of the global batch.
    """

    parts: tuple[int, ...] = (0,)
    count: int = 1

    def rows(self, num_rows: int) -> Int[np.ndarray, " rows"]:
        """Rows of the host in a global batch of `num_rows`, a multiple of `count`."""
        size = num_rows // self.count
        return (np.array(self.parts)[:, None] * size + np.arange(size)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class BatchShard:
    """Which share of a batch a program sees.

    Attributes:
        index: the share's number, in the order of the batch's rows.
        count: number of equal shares.
    """

    index: Int[Array, ""]
    count: int

    def first_position(self, size: int) -> UInt32[Array, ""]:
        """Entries of the whole batch's array before those of the share, modulo 2**32.

        Args:
            size: entries of the share's array, whose first axis is the batch's rows.
        """
        return self.index.astype(jnp.uint32) * jnp.uint32(size % 2**32)


def current_shard() -> BatchShard | None:
    """The share of the batch that is being traced, inside `jax.shard_map`; None where it is whole.

    Inside `jax.shard_map` a model sees its device's rows alone. Dropout's masks and routing noise
    must still be those of the whole batch, or results would depend on the number of devices.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in BATCH_AXES if axis in manual)
    return BatchShard(jax.lax.axis_index(axes), jax.lax.axis_size(axes)) if axes else None


def rows_of_shard(
    draw: Callable[[tuple[int, ...]], Shaped[Array, "..."]], shape: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """Random numbers for this share's rows, as a draw for the whole batch gives them.

    Args:
        draw: shape -> random numbers.
        shape: shape of the result; its first axis has the share's rows.
    """
    shard = current_shard()
    if shard is None:
        return draw(shape)
    rows, *others = shape
    whole = draw((rows * shard.count, *others))
    return jax.lax.dynamic_slice_in_dim(whole, shard.index * rows, rows)


def shard_axes(rows: int, *, num_chunks: int) -> tuple[str, ...]:
    """Mesh axes over which a batch can be computed apart: devices there hold all parameters.

    Args:
        rows: rows of the batch.
        num_chunks: equal chunks into which each device divides its rows.

    Returns:
        Axes of more than one device; none without a mesh (`jax.set_mesh`), where another axis
        splits parameters, or where the rows cannot be shared out evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1}
    axes = tuple(axis for axis in BATCH_AXES if axis in split)
    count = math.prod(mesh.shape[axis] for axis in axes)
    is_alone = split == set(axes) and "fsdp" not in split and not mesh.manual_axes
    return axes if is_alone and rows % (count * num_chunks) == 0 else ()


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
        Chip("v6e", "TPU v6 lite", 32 * _GIB, 918e12, 1.638e12, 100e9, 4, 12.5e9, f"{_DOCS}/v6e"),
        # TPU7x: half a chip's 192 GiB, 2,307 TFLOP/s, 7,380 GB/s, 1,200 GB/s over six links and
        # 100 Gbit/s.
        Chip("tpu7x", "TPU7x", 96 * _GIB, 1153.5e12, 3.69e12, 50e9, 6, 6.25e9, f"{_DOCS}/tpu7x"),
    )
}
# Chip -> US dollars for an hour on demand, by the list of February 2025 (launch/_tables.py).
PRICES = {"v5e": 1.20, "v5p": 4.20}
# Dense bfloat16 FLOP/s of one device, by the vendors' data sheets; a prefix of device_kind.
PEAK_FLOPS = {
    **{chip.device_kind: chip.peak_flops for chip in CHIPS.values()},
    "NVIDIA A100": 312e12,
    **dict.fromkeys(("NVIDIA H100", "NVIDIA H200"), 989e12),
    **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), 835.5e12),
    "NVIDIA H100 PCIe": 756.5e12,
}


def peak_flops() -> float | None:
    """Peak of all devices together; None if the table lacks this kind of device."""
    kind = jax.devices()[0].device_kind
    matches = [prefix for prefix in PEAK_FLOPS if kind.startswith(prefix)]
    if not matches:
        return None
    return PEAK_FLOPS[max(matches, key=len)] * jax.device_count()


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
        if group_size < len(self.devices) // self.num_slices:
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
    meant = did_you_mean(name or "", names)
    problem = f"no topology {name!r}" + (f" ({reason})" if reason else "")
    fix = f"{f'{meant} ' if meant else ''}TPU VMs have {', '.join(names)}"
    return ConfigError(problem, where="--topology", fix=fix)
