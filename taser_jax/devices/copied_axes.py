"""Parameter axes that are replicated because the devices cannot divide them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from flax.core import meta
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import parameter_path
from taser_jax.devices.partitioning import Partitioner, mesh_axes_of

_NAMED = 2


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
        named = ", ".join(self.parameters[:_NAMED])
        more = len(self.parameters) - _NAMED
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
    found: dict[tuple[str, int, tuple[str, ...], int], list[str]] = {}
    for path, logical in named:
        name, shape = parameter_path(path), by_path[parameter_path(path)].shape
        spec = partitioner.rules.spec(logical, shape, mesh, name=name)
        split = {each for axes in spec for each in mesh_axes_of(axes)}
        for axis, size in zip(logical, shape, strict=True):
            mesh_axes = mesh_axes_of(table.get(axis))
            parts = math.prod(mesh.shape[each] for each in mesh_axes)
            if size % parts and not split.intersection(mesh_axes):
                found.setdefault((axis, size, mesh_axes, parts), []).append(name)
    return [CopiedAxis(*key, tuple(names)) for key, names in found.items()]
