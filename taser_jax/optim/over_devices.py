"""Sums over parameters where they live: each device adds up its own parts before any exchange.

The compiler alone would exchange each parameter's sum separately, and gather for a reduction with
several results: hundreds of small messages per pass.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

Leaves = tuple[Sequence[Array], ...]


def total(
    function: Callable[..., Array],
    *,
    stacked: Leaves,
    plain: Leaves = (),
    shared: tuple[Array, ...] = (),
    shardings: Sequence[NamedSharding] | None = None,
) -> Array:
    """The sum of a function over all parameters and over the devices that hold parts of them.

    Example:
        Two parameters on eight devices, both split over `fsdp`: each device calls `function` on its
        parts of both, and one all-reduce adds up the results.

    Args:
        function: called as `function(stacked, plain, *shared)` with lists of parameters that are
            split over the same axes; its results add up over parameters and over parts of them.
        stacked: lists of arrays [task, ...], one array per parameter.
        plain: lists of arrays without the task axis.
        shared: arrays replicated on all devices.
        shardings: shardings of the parameters, on one mesh; the task axis is not split. None leaves
            the sum to the compiler.
    """
    if shardings is None:
        return function(stacked, plain, *shared)
    specs = tuple(sharding.spec for sharding in shardings)

    def of_a_device(stacked: Leaves, plain: Leaves, shared: tuple[Array, ...]) -> Array:
        results = []
        for axes, places in _by_split(specs).items():
            result = function(_picked(stacked, places), _picked(plain, places), *shared)
            results.append(jax.lax.psum(result, axes) if axes else result)
        return functools.reduce(operator.add, results)

    wide = tuple(PartitionSpec(None, *spec) for spec in specs)
    mapped = jax.shard_map(
        of_a_device,
        mesh=shardings[0].mesh,
        in_specs=((wide,) * len(stacked), (specs,) * len(plain), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    return mapped(_tuples(stacked), _tuples(plain), shared)


def _by_split(specs: Sequence[PartitionSpec]) -> dict[tuple[str, ...], list[int]]:
    """Mesh axes -> places of the parameters that are split over exactly these."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place, spec in enumerate(specs):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
        axes = tuple(sorted(axis for entry in entries for axis in entry))
        places.setdefault(axes, []).append(place)
    return places


def _picked(leaves: Leaves, places: Sequence[int]) -> Leaves:
    return tuple([arrays[place] for place in places] for arrays in leaves)


def _tuples(leaves: Leaves) -> Leaves:
    return tuple(map(tuple, leaves))
