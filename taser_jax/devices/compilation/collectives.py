"""Collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Sequence

import numpy as np

from taser_jax.devices.compilation.hlo import arrays, read_module

_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
# Between slices chips send through their hosts; an attribute names the collective it belongs to.
_CROSSING = re.compile(r' = \((.*?)\) send\(.*_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")


class CollectiveKind(enum.Enum):
    """Kinds of collectives, by XLA's names."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"


class Network(enum.Enum):
    """The network used: links between the chips of a slice, or the data centre's."""

    ICI = "ICI"
    DCN = "DCN"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a step.

    Attributes:
        kind: the operation.
        num_bytes: bytes of the larger of its operand and result, on one device, each time.
        group_size: devices in a group.
        times: how often a step runs it: once, or once per iteration of the loops around it. A loop
            of unknown length counts as one iteration.
        operation: its origin, by JAX's names.
        network: DCN for the part of a collective over several slices that crosses them.
        extent: chips that a group has along each axis of the torus; None if unknown.
    """

    kind: CollectiveKind
    num_bytes: int
    group_size: int
    times: int
    operation: str
    network: Network = Network.ICI
    extent: tuple[int, ...] | None = None

    @property
    def link_bytes(self) -> float:
        """Bytes that each device sends in a step, by the ring algorithms.

        With S bytes and n devices: S·(n−1)/n to gather, scatter or exchange, twice that to
        all-reduce (a scatter and a gather), S to permute.
        """
        share = (self.group_size - 1) / self.group_size
        factor = {CollectiveKind.ALL_REDUCE: 2 * share, CollectiveKind.COLLECTIVE_PERMUTE: 1.0}
        return self.times * self.num_bytes * factor.get(self.kind, share)


def read_collectives(
    hlo: str,
    *,
    num_devices: int,
    num_slices: int = 1,
    coordinates: Sequence[Sequence[int]] | None = None,
) -> list[Collective]:
    """Collectives of a compiled module, in the order of its text.

    The TPU compiler repeats a collective that overlaps other work once for each piece of that
    work, under one channel: equal kind, size and channel count once. It splits a collective over
    several slices into collectives within the slices and a transfer between them.

    Example:
        >>> text = '''ENTRY %main (p: f32[8]) -> f32[8] {
        ...   ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4]
        ... }'''
        >>> read_collectives(text, num_devices=4)[0].num_bytes
        32

    Args:
        hlo: `compiled.as_text()`, after partitioning: shapes are those of one device.
        num_devices: number of the program's devices.
        num_slices: number of slices.
        coordinates: each device's coordinates on the torus, in the program's order.
    """
    module = read_module(hlo)
    found: dict[str, Collective] = {}
    for number, (computation, line) in enumerate(module.instructions):
        times = module.rounds[computation]
        crossing, match = _CROSSING.search(line), _COLLECTIVE.search(line)
        key = None
        if crossing is not None:
            collective = _between_slices(crossing, num_slices=num_slices, times=times)
            if rendezvous := _RENDEZVOUS.search(line):
                key = f"rendezvous {rendezvous.group(1)}"
        elif match is not None:
            collective = _within_slice(
                match, line, num_devices=num_devices, times=times, coordinates=coordinates
            )
            if channel := _CHANNEL.search(line):
                kind = collective.kind.value
                key = f"channel {channel.group(1)} {kind} {collective.num_bytes}"
        else:
            continue
        key = key or f"line {number}"
        if key not in found or found[key].times < times:
            found[key] = collective
    return [collective for collective in found.values() if collective.group_size > 1]


def _between_slices(crossing: re.Match[str], *, num_slices: int, times: int) -> Collective:
    return Collective(
        kind=CollectiveKind(crossing.group(2).lower().replace("_", "-")),
        num_bytes=arrays(crossing.group(1))[0].num_bytes,
        group_size=num_slices,
        times=times,
        operation="between slices",
        network=Network.DCN,
    )


def _within_slice(
    match: re.Match[str],
    line: str,
    *,
    num_devices: int,
    times: int,
    coordinates: Sequence[Sequence[int]] | None,
) -> Collective:
    kind, starts = CollectiveKind(match.group(2)), match.group(3) is not None
    group = _group(line, num_devices)
    source = re.search(r'op_name="([^"]*)"', line)
    return Collective(
        kind=kind,
        num_bytes=_num_bytes(match.group(1), kind, group_size=len(group), starts=starts),
        group_size=len(group),
        times=times,
        operation=source.group(1) if source else "",
        extent=_extent([coordinates[device] for device in group]) if coordinates else None,
    )


def _num_bytes(types: str, kind: CollectiveKind, *, group_size: int, starts: bool) -> int:
    if starts and kind is not CollectiveKind.ALL_REDUCE:
        # An asynchronous start returns its operands beside its results: ((a, b), (A, B), ...).
        return max(_sum_of_bytes(part) for part in _parts(types)[:2])
    total = _sum_of_bytes(types)
    return total * group_size if kind is CollectiveKind.REDUCE_SCATTER else total


def _sum_of_bytes(types: str) -> int:
    return sum(array.num_bytes for array in arrays(types))


def _parts(types: str) -> list[str]:
    """The elements of a tuple's type, which may be tuples."""
    parts, depth = [""], 0
    for character in types[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _extent(coordinates: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(len(set(along)) for along in zip(*coordinates, strict=True))


def _group(line: str, num_devices: int) -> list[int]:
    """The devices of the first replica group, in any of XLA's notations."""
    listed = re.search(r"(?:source_target_pairs|replica_groups)=\{\{([\d,]*)\}", line)
    if listed:
        return [int(device) for device in listed.group(1).split(",")]
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if counted:
        size, sizes, order = counted.groups()
        shape = _numbers(sizes)
        grid = np.arange(math.prod(shape)).reshape(shape)
        grid = grid.transpose(_numbers(order)) if order else grid
        return grid.reshape(-1)[: int(size)].tolist()
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        return _along_axes(*named.groups())
    return list(range(num_devices))


def _along_axes(mesh: str, axes: str) -> list[int]:
    """The group of the first device along axes of a mesh: `'x'=2,'y'=4` and `'y'`.

    Of an axis `'y':(2)2` the group has the second factor only, of 2·2·rest.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    along = {name: [0] for name in sizes}
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        count = int(size or sizes[name])
        stride = sizes[name] // (int(before or 1) * count)
        along[name] = [start + step * stride for start in along[name] for step in range(count)]
    grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    return grid[np.ix_(*along.values())].reshape(-1).tolist()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
