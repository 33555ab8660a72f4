"""Sums over parameters where they live: each device adds up its own parts before any exchange.

Left to itself the compiler exchanges the sum of every parameter, and a reduction with several
results by gathering; hundreds of small messages a pass over a model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

Leaves = tuple[Sequence[Array], ...]


def total(
    function: Callable[..., Sequence[Array]],
    *,
    stacked: Leaves,
    plain: Leaves = (),
    shared: tuple[Any, ...] = (),
    shardings: Sequence[NamedSharding] | None = None,
) -> Array:
    """The sum, over all parameters and the devices that hold parts of them, of a function.

    Example:
        Two parameters on eight devices, both split over `fsdp`: each device calls `function` on its
        parts of both, adds the two results, and one all-reduce adds those of the devices.

    Args:
        function: called as `function(stacked, plain, *shared)`; a result a parameter, all of one
            shape, that may be added up over parts of the parameter.
        stacked: lists of arrays [task, ...], an array a parameter.
        plain: lists of arrays without the task axis.
        shared: arrays that every device has whole; None is passed on.
        shardings: of the parameters, on one mesh; no device splits the task axis. None: whole
            parameters, or what the compiler makes of it.
    """
    if shardings is None:
        results = function(stacked, plain, *shared)
        return _added(results, [()] * len(results))
    specs = tuple(sharding.spec for sharding in shardings)
    splits = [_mesh_axes(spec) for spec in specs]

    def of_a_device(stacked: Leaves, plain: Leaves, shared: tuple[Any, ...]) -> Array:
        return _added(function(stacked, plain, *shared), splits)

    mapped = jax.shard_map(
        of_a_device,
        mesh=shardings[0].mesh,
        in_specs=(
            (tuple(PartitionSpec(None, *spec) for spec in specs),) * len(stacked),
            (specs,) * len(plain),
            PartitionSpec(),
        ),
        out_specs=PartitionSpec(),
    )
    return mapped(tuple(map(tuple, stacked)), tuple(map(tuple, plain)), shared)


def _added(results: Sequence[Array], splits: Sequence[tuple[str, ...]]) -> Array:
    """Over parameters, and over the mesh axes that split each of them: one exchange a split."""
    by_split: dict[tuple[str, ...], Array] = {}
    for result, split in zip(results, splits, strict=True):
        by_split[split] = by_split[split] + result if split in by_split else result
    whole = [jax.lax.psum(part, split) if split else part for split, part in by_split.items()]
    return jnp.sum(jnp.stack(whole), axis=0, dtype=whole[0].dtype)


def _mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    return tuple(sorted(axis for entry in entries for axis in entry))
