"""Devices as a mesh, and which array axis lies along which mesh axis.

Models name the axes of their parameters (`embed`, `mlp`, ...); one table says where each name goes.
`jax.jit` with the shardings made here does the rest.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax.core import meta
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from taser_jax.errors import ConfigError

MESH_AXES = ("replica", "data", "fsdp", "model")
BATCH = "batch"

MeshAxes = str | tuple[str, ...] | None
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1, at most once, is what is left.

    Attributes:
        replica: copies of everything, for links slower than the others (slices of a multi-slice
            job).
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
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ConfigError(
                    f"{size} devices along {name}", where="mesh", expected="1 or more, or -1"
                )
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ConfigError(
                f"-1 for {' and '.join(free)}", where="mesh", expected="-1 for one axis at most"
            )
        known = math.prod(size for size in sizes.values() if size != -1)
        if free and num_devices % known == 0:
            sizes[free[0]] = num_devices // known
        if math.prod(sizes.values()) != num_devices:
            axes = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"a mesh of {known} devices{' or a multiple' if free else ''} ({axes})",
                where="mesh",
                expected=f"a mesh of the {num_devices} devices there are",
                fix=f"let the axes multiply to {num_devices}; an axis of -1 takes what is left",
            )
        return sizes["replica"], sizes["data"], sizes["fsdp"], sizes["model"]


def make_mesh(
    config: MeshConfig | None = None, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with axes (replica, data, fsdp, model), neighbours along the last.

    Args:
        config: devices along each axis; None puts all on `data`.
        devices: all of `jax.devices()` where None.

    Raises:
        ConfigError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = (config or MeshConfig()).shape(len(devices))
    grid = mesh_utils.create_device_mesh(shape, devices)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


DEFAULT_RULES: tuple[tuple[str, MeshAxes], ...] = (
    (BATCH, ("replica", "data", "fsdp")),
    ("mlp", "model"),
    ("heads", "model"),
    ("vocab", "model"),
    ("embed", "fsdp"),
    # A statically routed input needs one expert of all: split along it, devices would idle.
    ("expert", None),
    ("kv", None),
    ("length", None),
    ("task", None),
)


@dataclasses.dataclass(frozen=True)
class LogicalRules:
    """Logical axis -> mesh axes, or None for a copy on each device.

    An array's axes get their mesh axes in the table's order. An axis whose length the mesh axis
    does not divide is copied, and so is one whose mesh axis another axis of the array has already.

    Attributes:
        rules: (logical axis, mesh axis or axes or None), each logical axis once; flax's format.
    """

    rules: tuple[tuple[str, MeshAxes], ...] = DEFAULT_RULES

    def __post_init__(self) -> None:
        names = [name for name, _ in self.rules]
        for name, axes in self.rules:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{names.count(name)} rules for {name!r}", where="logical rules", expected="one"
                )
            for axis in _as_tuple(axes):
                if axis not in MESH_AXES:
                    raise ConfigError(
                        f"mesh axis {axis!r} for {name!r}",
                        where="logical rules",
                        expected=f"one of {', '.join(MESH_AXES)}",
                    )

    def spec(
        self, logical: PartitionSpec, shape: Sequence[int], mesh: Mesh, *, name: str
    ) -> PartitionSpec:
        """Mesh axes of an array whose logical axes are known.

        Example:
            P("embed", "mlp") of shape [768, 3072] -> P("fsdp", "model").

        Args:
            logical: name of each axis; None for an axis that is copied.
            shape: of the array.
            mesh: gives the mesh axes' sizes.
            name: of the parameter, for errors.

        Raises:
            ConfigError: an axis that no rule covers, or a number of axes other than the shape's.
        """
        if len(logical) != len(shape):
            raise ConfigError(
                f"{len(logical)} logical axes {tuple(logical)} for shape {tuple(shape)}",
                where=f"parameter {name}",
                expected="a name for each axis",
            )
        order = {rule: number for number, (rule, _) in enumerate(self.rules)}
        table = dict(self.rules)
        for axis in logical:
            if axis is not None and axis not in table:
                nearest = difflib.get_close_matches(str(axis), table, n=1)
                raise ConfigError(
                    f"no rule for logical axis {axis!r}",
                    where=f"parameter {name}",
                    expected=f"one of {', '.join(table)}",
                    fix=f"did you mean {nearest[0]!r}? Otherwise add a rule"
                    if nearest
                    else "add a rule to LogicalRules",
                )
        spec: list[MeshAxes] = [None] * len(shape)
        used: set[str] = set()
        named = [place for place, axis in enumerate(logical) if axis is not None]
        for place in sorted(named, key=lambda place: order[logical[place]]):
            axes = _as_tuple(table[logical[place]])
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if axes and not used.intersection(axes) and shape[place] % parts == 0:
                spec[place] = axes[0] if len(axes) == 1 else axes
                used.update(axes)
        return PartitionSpec(*spec)


@dataclasses.dataclass(frozen=True)
class HostShare:
    """Which contiguous part of each global batch a host makes: part `index` of `count`."""

    index: int
    count: int


class Partitioner:
    """Shardings of parameters, state and batches on one mesh.

    Example:
        partitioner = Partitioner(make_mesh(MeshConfig(fsdp=4)))
        shardings = partitioner.param_shardings(logical_axes(model), abstract_params(model))
        params = jax.jit(init, out_shardings=shardings)(key)
        batch = partitioner.put_batch(stream.batch(step))

    Args:
        mesh: from `make_mesh`.
        rules: the logical-axis table.
    """

    def __init__(self, mesh: Mesh, rules: LogicalRules | None = None) -> None:
        self.mesh = mesh
        self.rules = rules or LogicalRules()
        table = dict(self.rules.rules)
        if table.get(BATCH) is None:
            raise ConfigError(f"no mesh axis for {BATCH!r}", where="logical rules")
        self._batch_axes = _as_tuple(table[BATCH])

    @property
    def replicated(self) -> NamedSharding:
        """A copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """First axis split over the batch axes: all of a `Batch`'s leaves, as a pytree prefix."""
        return NamedSharding(self.mesh, PartitionSpec(self._batch_axes))

    @property
    def batch_devices(self) -> int:
        """Parts a global batch is split into."""
        return math.prod(self.mesh.shape[axis] for axis in self._batch_axes)

    @property
    def host_share(self) -> HostShare:
        """This host's part of the global batch, for `BatchStream`; hosts may share a part.

        Raises:
            ConfigError: the host's devices hold no contiguous part.
        """
        batch_first = [*self._batch_axes, *(a for a in MESH_AXES if a not in self._batch_axes)]
        grid = self.mesh.devices.transpose([MESH_AXES.index(axis) for axis in batch_first])
        processes = np.array([device.process_index for device in grid.flat])
        return _host_share(processes.reshape(self.batch_devices, -1), jax.process_index())

    def param_shardings(self, logical_axes: Any, shapes: Any) -> Any:
        """Sharding of each parameter.

        Args:
            logical_axes: tree of PartitionSpec of logical axis names.
            shapes: the same tree of arrays or `jax.ShapeDtypeStruct`.

        Returns:
            The same tree of NamedSharding.

        Raises:
            ConfigError: a parameter with an axis that no rule covers, or with no logical axes.
        """
        specs, _ = jax.tree_util.tree_flatten_with_path(
            logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        by_path = {_path_name(path): spec for path, spec in specs}

        def sharding(path: tuple[Any, ...], array: Any) -> NamedSharding:
            name = _path_name(path)
            if name not in by_path:
                raise ConfigError("no logical axes", where=f"parameter {name}")
            spec = self.rules.spec(by_path[name], array.shape, self.mesh, name=name)
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(sharding, meta.unbox(shapes))

    def check_batch_size(self, batch_size: int) -> None:
        """Raises `ConfigError` where the devices cannot get equal parts of a global batch.

        With B queries divisible, so are their B·(1+N) passages.
        """
        _check_divisible("queries in a batch", batch_size, self.batch_devices)

    def put_batch(self, batch: T) -> T:
        """The global batch, on the devices, from this host's share of it.

        Args:
            batch: tree of NumPy arrays, this host's share along the first axis.

        Raises:
            ConfigError: an array whose first axis the devices cannot share equally.
        """
        share = self.host_share
        devices = self.batch_devices // share.count

        def put(path: tuple[Any, ...], array: np.ndarray) -> jax.Array:
            _check_divisible(f"rows of {_path_name(path)} on this host", len(array), devices)
            shape = (len(array) * share.count, *array.shape[1:])
            return jax.make_array_from_process_local_data(self.batch_sharding, array, shape)

        return jax.tree_util.tree_map_with_path(put, batch)


def _check_divisible(what: str, size: int, devices: int) -> None:
    if size > 0 and size % devices == 0:
        return
    below, above = size // devices * devices, (size // devices + 1) * devices
    nearest = f"{below} or {above}" if below > 0 else str(above)
    raise ConfigError(
        f"{size} {what} cannot be split evenly over {devices} devices",
        where="batch",
        expected=f"a multiple of {devices}",
        fix=f"the nearest are {nearest}",
    )


def _host_share(parts: np.ndarray, process: int) -> HostShare:
    """A process's share, from which process holds each part of the batch. [parts, devices]."""
    owned: dict[int, tuple[int, ...]] = {}
    for owner in np.unique(parts):
        owned[int(owner)] = tuple(np.flatnonzero((parts == owner).any(axis=1)).tolist())
    shares = sorted(set(owned.values()))
    size = len(shares[0])
    expected = [tuple(range(i, i + size)) for i in range(0, len(parts), size)]
    if shares != expected:
        raise ConfigError(
            f"host {process} holds parts {owned[process]} of the batch's {len(parts)}",
            where="mesh",
            expected="equal, contiguous parts for all hosts",
            fix="let replica · data · fsdp be a multiple or a divisor of the number of hosts",
        )
    return HostShare(shares.index(owned[process]), len(shares))


def _as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _path_name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
