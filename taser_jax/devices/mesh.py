"""A mesh of devices: how many along each axis, which are neighbours, what each has of a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Int, Shaped, UInt32

from taser_jax.storage.errors import ConfigError

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
    shape = config.shape(len(devices))
    # GPUs and CPUs may report their hosts as slices, but have one network.
    on_tpu = devices[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if on_tpu else 1
    if slices == 1:
        return _grid(mesh_utils.create_device_mesh, shape, devices)
    replicas, *inside = shape
    if replicas % slices:
        problem = f"{replicas} devices along replica, which must span {slices} slices"
        fix = f"set MESH_REPLICA to a multiple of {slices}"
        raise ConfigError(problem, where="mesh", fix=fix)
    between = [slices, *(1 for _ in inside)]
    return _grid(
        lambda inner, devices, **options: mesh_utils.create_hybrid_device_mesh(
            inner, between, devices, **options
        ),
        (replicas // slices, *inside),
        devices,
    )


def _grid(
    make: Callable[..., np.ndarray], shape: Sequence[int], devices: Sequence[jax.Device]
) -> np.ndarray:
    try:
        return make(shape, devices)
    except NotImplementedError:
        # Puts two mesh axes along one axis of the torus: fewer neighbours, but a valid mesh.
        return make(shape, devices, allow_split_physical_axes=True)


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
