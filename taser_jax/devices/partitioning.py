"""The rules that assign array axes to mesh axes, and values to parameters by their paths.

Models name the axes of their parameters (`embed`, `mlp`, ...), and one table maps each name to mesh
axes. `jax.jit` with the resulting shardings does the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from taser_jax.devices.mesh import BATCH_AXES, HostShare
from taser_jax.storage.errors import ConfigError

T = TypeVar("T")

# Logical axis of parameters -> the mesh axis that splits it.
RULES: Mapping[str, str | None] = {
    "mlp": "model",
    "heads": "model",
    "vocab": "model",
    "embed": "fsdp",
    # Not split: a statically routed input needs only one expert, so the other devices would idle.
    "expert": None,
    "kv": None,
    "length": None,
    "task": None,
}


def mesh_spec(logical: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Mesh axes of an array whose logical axes are known.

    An axis is replicated if its length is not divisible by the mesh axis of `RULES`, or if an
    earlier axis of the array has it already.

    Example:
        P("embed", "mlp") of shape [768, 3072] -> P("fsdp", "model").

    Args:
        logical: name of each axis; None for a replicated axis.
        shape: shape of the array.
        mesh: the mesh, for the sizes of its axes.
    """
    spec: list[str | None] = []
    for name, size in zip(logical, shape, strict=True):
        axis = None if name is None else RULES[name]
        splits = axis is not None and axis not in spec and size % mesh.shape[axis] == 0
        spec.append(axis if splits else None)
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
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def replicated(self) -> NamedSharding:
        """Replicated on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """First axis split over the batch axes; a pytree prefix for all leaves of a `Batch`."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    @property
    def batch_devices(self) -> int:
        """Number of parts of a global batch."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    @property
    def host_share(self) -> HostShare:
        """This host's parts of the global batch, for `BatchStream`; hosts may share parts."""
        return self.share_of(jax.process_index())

    def share_of(self, process: int) -> HostShare:
        """The parts of the global batch on a host's devices."""
        parts = [
            part
            for part, devices in enumerate(self.mesh.devices.reshape(self.batch_devices, -1))
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
        """
        return jax.tree.map(
            lambda axes, array: NamedSharding(self.mesh, mesh_spec(axes, array.shape, self.mesh)),
            logical_axes,
            meta.unbox(shapes),
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def check_batch_size(self, batch_size: int) -> None:
        """Raises `ConfigError` if the devices cannot get equal parts of a global batch.

        If the B queries are divisible, so are their B·(1+N) passages.
        """
        parts = self.batch_devices
        mesh = ""
        if batch_size > 0 and (fits := math.gcd(batch_size, parts)) < parts:
            mesh = f"; or let {' · '.join(BATCH_AXES)} be {fits} and model the rest"
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


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of a sharded array on one device.

    Example:
        1,000 float32 numbers split over 4 devices: 1,000.
    """
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def copied_axes(mesh: Mesh, logical_axes: PyTree, shapes: PyTree) -> list[str]:
    """The axes that `Partitioner.param_shardings` copies as their length does not divide, in words.

    Example:
        Twelve heads over model = 8 -> ["heads of 12 cannot be split over model = 8: ..."]

    Args:
        mesh: the mesh.
        logical_axes: tree of PartitionSpec of logical axis names.
        shapes: the same tree of arrays or `jax.ShapeDtypeStruct`.
    """
    arrays = leaves_by_path(meta.unbox(shapes))
    copied: dict[str, list[str]] = {}
    for path, logical in leaves_by_path(logical_axes).items():
        array = arrays[path]
        split = mesh_spec(logical, array.shape, mesh)
        for name, size in zip(logical, array.shape, strict=True):
            axis = RULES.get(name)
            if axis is not None and axis not in split and mesh.shape[axis] > 1:
                problem = f"{name} of {size:,} cannot be split over {axis} = {mesh.shape[axis]}"
                copied.setdefault(problem, []).append(path)
    return [
        f"{problem}: each of these devices has whole copies of {len(paths)} parameters, and "
        f"replicates the computation that uses them: {paths[0]} first"
        for problem, paths in copied.items()
    ]


Value = TypeVar("Value")
Rules = Sequence[tuple[str, Value]]


def parameter_path(path: KeyPath) -> str:
    """A JAX key path as T5X writes it: "encoder/layers_0/attention/query/kernel"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaves_by_path(tree: PyTree) -> dict[str, PyTree]:
    """Parameter path -> leaf, in JAX's order; shardings and specs of axes are leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec | NamedSharding)
    )
    return {parameter_path(path): leaf for path, leaf in leaves}


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
            paths = ", ".join(list(leaves_by_path(params))[:3])
            problem = f"rule {regex.pattern!r} matches no parameter, such as {paths}"
            raise ConfigError(problem, where=table, fix="correct the expression or remove the rule")
    return values
