"""The table of parameters and the memory estimate that a dry run prints."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import parameter_path

_ADAM_MOMENTS = 2
_GIB = 2**30


def parameter_table(params: PyTree, *, logical_axes: PyTree, shardings: PyTree = None) -> str:
    """One line per parameter, and the total.

    Example:
        parameter                          shape       axes           sharding          count
        encoder/layers_0/mlp/wi/kernel     768 x 3072  embed, mlp     fsdp, model   2,359,296
        ...
        total                                                                     127,787,520

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`.
        logical_axes: the same tree of PartitionSpec of logical names.
        shardings: the same tree of NamedSharding; None leaves the column out.
    """
    specs = _by_path(logical_axes)
    places = {} if shardings is None else _by_path(shardings)
    header = ["parameter", "shape", "axes", "sharding", "count"]
    rows = []
    for name, leaf in _by_path(params).items():
        place = _spec_text(places[name].spec) if name in places else ""
        shape = " x ".join(str(size) for size in leaf.shape)
        rows.append([name, shape, _spec_text(specs[name]), place, f"{math.prod(leaf.shape):,}"])
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    lines = [header, *rows, ["total", "", "", "", f"{total:,}"]]
    if shardings is None:
        lines = [[*line[:3], line[4]] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == len(line) - 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device while training.

    Attributes:
        parameters: the device's part of the parameters.
        gradients: the same shapes again.
        optimizer: Adam's two moments.
        activations: the caller's estimate.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = [f"{f.name} {getattr(self, f.name) / _GIB:.2f}" for f in dataclasses.fields(self)]
        return f"GiB per device: {', '.join(parts)} (estimated), total {self.total / _GIB:.2f}"


def memory_estimate(
    params: PyTree, *, shardings: PyTree = None, activation_bytes: int = 0
) -> MemoryEstimate:
    """Memory per device of parameters, gradients and Adam's moments, from shapes and shardings.

    Example:
        1,000 float32 parameters split over 4 devices: 1,000 bytes of parameters, 1,000 of
        gradients, 2,000 of moments.

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`.
        shardings: the same tree of NamedSharding; None for a copy on every device.
        activation_bytes: per device, for example from `ModelConfig.activation_bytes`.
    """
    places = {} if shardings is None else _by_path(shardings)
    total = 0
    for name, leaf in _by_path(params).items():
        shape = places[name].shard_shape(leaf.shape) if name in places else leaf.shape
        total += math.prod(shape) * leaf.dtype.itemsize
    return MemoryEstimate(
        parameters=total,
        gradients=total,
        optimizer=_ADAM_MOMENTS * total,
        activations=activation_bytes,
    )


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec | NamedSharding)
    )
    return {parameter_path(path): leaf for path, leaf in leaves}


def _spec_text(spec: PartitionSpec) -> str:
    return ", ".join(
        "+".join(axis) if isinstance(axis, tuple) else str(axis or "-") for axis in spec
    )
