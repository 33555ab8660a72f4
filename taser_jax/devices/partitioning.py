"""The rules that assign array axes to mesh axes, and values to parameters by their paths.

Models name the axes of their parameters (`embed`, `mlp`, ...), and one table maps each name to mesh
axes. `jax.jit` with the resulting shardings does the rest.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from taser_jax.devices.mesh import BATCH_AXES, MESH_AXES, HostShare, axes_text
from taser_jax.storage.errors import ConfigError

BATCH = "batch"
# Parameters that a message names.
_NAMED_PARAMETERS = 2
_RULES = "logical rules"

MeshAxes = str | tuple[str, ...] | None
T = TypeVar("T")


DEFAULT_RULES: tuple[tuple[str, MeshAxes], ...] = (
    (BATCH, BATCH_AXES),
    ("mlp", "model"),
    ("heads", "model"),
    ("vocab", "model"),
    ("embed", "fsdp"),
    # Not split: a statically routed input needs only one expert, so the other devices would idle.
    ("expert", None),
    ("kv", None),
    ("length", None),
    ("task", None),
)


@dataclasses.dataclass(frozen=True)
class LogicalRules:
    """Logical axis -> mesh axes, or None to replicate.

    An array's axes get their mesh axes in the table's order. An axis is replicated if its length is
    not divisible by the mesh axis, or if another axis of the array already uses the mesh axis.

    Attributes:
        rules: (logical axis, mesh axis or axes or None), each logical axis once; flax's format.
            The batch stays along replica, data and fsdp.
    """

    rules: tuple[tuple[str, MeshAxes], ...] = DEFAULT_RULES

    def __post_init__(self) -> None:
        names = [name for name, _ in self.rules]
        for name, axes in self.rules:
            if names.count(name) > 1:
                problem = f"{names.count(name)} rules for {name!r}"
                raise ConfigError(problem, where=_RULES, fix="keep one of them")
            unknown = set(mesh_axes_of(axes)) - set(MESH_AXES)
            if unknown:
                problem = f"{name!r} has mesh axis {unknown.pop()!r}"
                raise ConfigError(problem, where=_RULES, fix=f"choose of {', '.join(MESH_AXES)}")

    def spec(
        self, logical: PartitionSpec, shape: Sequence[int], mesh: Mesh, *, name: str
    ) -> PartitionSpec:
        """Mesh axes of an array whose logical axes are known.

        Example:
            P("embed", "mlp") of shape [768, 3072] -> P("fsdp", "model").

        Args:
            logical: name of each axis; None for a replicated axis.
            shape: shape of the array.
            mesh: the mesh, for the sizes of its axes.
            name: name of the parameter, for errors.

        Raises:
            ConfigError: an axis without a rule, or a number of axes that differs from the shape's.
        """
        if len(logical) != len(shape):
            problem = f"{len(logical)} logical axes {tuple(logical)} for shape {tuple(shape)}"
            raise ConfigError(problem, where=f"parameter {name}", fix="name each axis")
        order = {rule: number for number, (rule, _) in enumerate(self.rules)}
        table = dict(self.rules)
        for axis in logical:
            if axis is not None and axis not in table:
                nearest = difflib.get_close_matches(str(axis), table, n=1)
                meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
                problem = f"no rule for logical axis {axis!r}, only for {', '.join(table)}"
                fix = f"add a rule to LogicalRules{meant}"
                raise ConfigError(problem, where=f"parameter {name}", fix=fix)
        spec: list[MeshAxes] = [None] * len(shape)
        used: set[str] = set()
        named = [place for place, axis in enumerate(logical) if axis is not None]
        for place in sorted(named, key=lambda place: order[logical[place]]):
            axes = mesh_axes_of(table[logical[place]])
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if axes and not used.intersection(axes) and shape[place] % parts == 0:
                spec[place] = axes[0] if len(axes) == 1 else axes
                used.update(axes)
        return PartitionSpec(*spec)


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
            fix = f"split it along {', '.join(BATCH_AXES)}"
            raise ConfigError(f"no mesh axis for {BATCH!r}", where=_RULES, fix=fix)
        self._batch_axes = mesh_axes_of(table[BATCH])
        of_rules, of_activations = (
            [axis for axis in axes if mesh.shape[axis] > 1]
            for axes in (self._batch_axes, BATCH_AXES)
        )
        if of_rules != of_activations:
            axes, split = ", ".join(self._batch_axes), ", ".join(BATCH_AXES)
            problem = f"{BATCH!r} along {axes}, on a mesh of {axes_text(dict(mesh.shape))}"
            fix = f"split it over {split}, as activations are; an axis of one device splits nothing"
            raise ConfigError(problem, where=_RULES, fix=fix)

    @property
    def replicated(self) -> NamedSharding:
        """Replicated on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """First axis split over the batch axes; a pytree prefix for all leaves of a `Batch`."""
        return NamedSharding(self.mesh, PartitionSpec(self._batch_axes))

    @property
    def batch_devices(self) -> int:
        """Number of parts of a global batch."""
        return math.prod(self.mesh.shape[axis] for axis in self._batch_axes)

    @property
    def host_share(self) -> HostShare:
        """This host's parts of the global batch, for `BatchStream`; hosts may share parts."""
        return self.share_of(jax.process_index())

    def share_of(self, process: int) -> HostShare:
        """The parts of the global batch on a host's devices."""
        batch_first = [*self._batch_axes, *(a for a in MESH_AXES if a not in self._batch_axes)]
        grid = self.mesh.devices.transpose([MESH_AXES.index(axis) for axis in batch_first])
        parts = [
            part
            for part, devices in enumerate(grid.reshape(self.batch_devices, -1))
            if any(device.process_index == process for device in devices)
        ]
        return HostShare(tuple(parts), self.batch_devices)

    def param_shardings(self, logical_axes: PyTree, shapes: PyTree) -> PyTree:
        """Sharding of each parameter.

        Args:
            logical_axes: tree of PartitionSpec of logical axis names.
            shapes: the same tree of arrays or `jax.ShapeDtypeStruct`.

        Returns:
            The same tree of NamedSharding.

        Raises:
            ConfigError: a parameter without logical axes, or with an axis without a rule.
        """
        specs, _ = jax.tree_util.tree_flatten_with_path(
            logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        by_path = {parameter_path(path): spec for path, spec in specs}

        def sharding(path: KeyPath, array: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
            name = parameter_path(path)
            if name not in by_path:
                fix = "name them where the model makes the parameter"
                raise ConfigError("no logical axes", where=f"parameter {name}", fix=fix)
            spec = self.rules.spec(by_path[name], array.shape, self.mesh, name=name)
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(sharding, meta.unbox(shapes))

    def check_batch_size(self, batch_size: int) -> None:
        """Raises `ConfigError` if the devices cannot get equal parts of a global batch.

        If the B queries are divisible, so are their B·(1+N) passages.
        """
        parts = self.batch_devices
        mesh = ""
        if batch_size > 0 and (fits := math.gcd(batch_size, parts)) < parts:
            mesh = f"; or let {' · '.join(self._batch_axes)} be {fits} and model the rest"
        _check_divisible("queries in a batch", batch_size, parts, otherwise=mesh)

    def put_batch(self, batch: T) -> T:
        """Puts the global batch on the devices, given this host's share.

        Args:
            batch: tree of NumPy arrays, this host's share along the first axis.

        Raises:
            ConfigError: an array whose first axis the devices cannot share equally.
        """
        share = self.host_share
        place = {part: number for number, part in enumerate(share.parts)}

        def put(path: KeyPath, array: np.ndarray) -> jax.Array:
            what = f"rows of {parameter_path(path)} on this host"
            _check_divisible(what, len(array), len(share.parts))
            size = len(array) // len(share.parts)

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                start = place[(index[0].start or 0) // size] * size
                return array[start : start + size]

            shape = (size * share.count, *array.shape[1:])
            return jax.make_array_from_callback(shape, self.batch_sharding, part)

        return jax.tree_util.tree_map_with_path(put, batch)


def _check_divisible(what: str, size: int, devices: int, *, otherwise: str = "") -> None:
    if size > 0 and size % devices == 0:
        return
    below, above = size // devices * devices, (size // devices + 1) * devices
    nearest = f"{below} or {above}" if below > 0 else str(above)
    problem = f"{size} {what} cannot be split evenly over {devices} devices"
    fix = f"give a multiple of {devices}, such as {nearest}{otherwise}"
    raise ConfigError(problem, where="batch", fix=fix)


def placed(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shapes and dtypes of a tree with their shardings: a tree like it, or one for all leaves."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def mesh_axes_of(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule (one, several or none) as a tuple."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


@dataclasses.dataclass(frozen=True)
class CopiedAxis:
    """A logical axis that is replicated because its length is not a multiple of the devices.

    Attributes:
        axis: its logical name.
        size: its length.
        mesh_axes: mesh axes along which it was to be split.
        parts: number of devices along them.
        parameters: parameters that have the axis.
    """

    axis: str
    size: int
    mesh_axes: tuple[str, ...]
    parts: int
    parameters: Sequence[str]

    def __str__(self) -> str:
        named = ", ".join(self.parameters[:_NAMED_PARAMETERS])
        more = len(self.parameters) - _NAMED_PARAMETERS
        return (
            f"{self.axis} of {self.size:,} cannot be split over {' x '.join(self.mesh_axes)} = "
            f"{self.parts}: each of these devices has whole copies of {len(self.parameters)} "
            f"parameters, and replicates the computation that uses them: {named}"
            + (f" and {more} more" if more > 0 else "")
        )


def copied_axes(partitioner: Partitioner, logical_axes: PyTree, shapes: PyTree) -> list[CopiedAxis]:
    """The axes that `Partitioner.param_shardings` copies because their length does not divide.

    Example:
        Twelve heads over model = 8 -> [CopiedAxis("heads", 12, ("model",), 8, (...))]

    Args:
        partitioner: mesh and rules.
        logical_axes: tree of PartitionSpec of logical axis names.
        shapes: the same tree of arrays or `jax.ShapeDtypeStruct`.
    """
    named, _ = jax.tree_util.tree_flatten_with_path(
        logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    arrays, _ = jax.tree_util.tree_flatten_with_path(meta.unbox(shapes))
    by_path = {parameter_path(path): array for path, array in arrays}
    table, mesh = dict(partitioner.rules.rules), partitioner.mesh
    copied: dict[tuple[str, int, tuple[str, ...], int], list[str]] = {}
    for path, logical in named:
        name, shape = parameter_path(path), by_path[parameter_path(path)].shape
        spec = partitioner.rules.spec(logical, shape, mesh, name=name)
        split = {each for axes in spec for each in mesh_axes_of(axes)}
        for axis, size in zip(logical, shape, strict=True):
            mesh_axes = mesh_axes_of(table.get(axis))
            parts = math.prod(mesh.shape[each] for each in mesh_axes)
            if size % parts and not split.intersection(mesh_axes):
                copied.setdefault((axis, size, mesh_axes, parts), []).append(name)
    return [CopiedAxis(*key, tuple(names)) for key, names in copied.items()]


Value = TypeVar("Value")
Rules = Sequence[tuple[str, Value]]


def parameter_path(path: KeyPath) -> str:
    """A JAX key path as T5X writes it: "encoder/layers_0/attention/query/kernel"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def parameter_paths(params: PyTree) -> list[str]:
    """Paths of all parameters, in tree order."""
    return [parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def assign(rules: Rules[Value], params: PyTree, *, table: str) -> PyTree:
    """Gives each parameter the value of the one rule that matches its whole path.

    Example:
        Rules ((".*/bias", 0.0), (".*/kernel", 0.1)) give {"mlp": {"bias": 0.0, "kernel": 0.1}}.

    Args:
        rules: (regular expression, value) pairs, matched against whole paths.
        params: parameters, arrays or abstract.
        table: the table's name, for error messages.

    Returns:
        A tree of values shaped as `params`.

    Raises:
        ConfigError: a parameter that no rule or several rules match, a rule that matches no
            parameter, or a malformed expression; each is named.
    """
    try:
        compiled = [(re.compile(pattern), value) for pattern, value in rules]
    except re.error as error:
        problem = f"{error.pattern!r} is no regular expression of Python's: {error}"
        raise ConfigError(problem, where=table, fix="correct the expression") from error
    used: set[str] = set()

    def value_of(path: KeyPath, _: object) -> Value:
        name = parameter_path(path)
        matching = [(regex, value) for regex, value in compiled if regex.fullmatch(name)]
        if len(matching) != 1:
            patterns = ", ".join(repr(regex.pattern) for regex, _ in matching)
            problem = f"parameter {name} matches {len(matching)} rules"
            if not matching:
                raise ConfigError(problem, where=table, fix="add a rule that covers it")
            fix = "narrow all but one of these rules"
            raise ConfigError(f"{problem}: {patterns}", where=table, fix=fix)
        used.add(matching[0][0].pattern)
        return matching[0][1]

    values = jax.tree_util.tree_map_with_path(value_of, params)
    for regex, _ in compiled:
        if regex.pattern not in used:
            paths = ", ".join(parameter_paths(params)[:3])
            problem = f"rule {regex.pattern!r} matches no parameter, such as {paths}"
            raise ConfigError(problem, where=table, fix="correct the expression or remove the rule")
    return values
