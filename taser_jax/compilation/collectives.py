"""Collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
# Between slices chips send through their hosts; the hosts' runtime is told what it is part of.
_CROSSING = re.compile(r' = \((.*?)\) send\(.*_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_CALLS = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_RECOMPUTED = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+\.remat[\w.\-]* = ")


class CollectiveKind(enum.Enum):
    """What devices do together, by XLA's names."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"


class Network(enum.Enum):
    """What carries it: links between the chips of a slice, or the data centre's network."""

    ICI = "ICI"
    DCN = "DCN"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: what it does.
        num_bytes: of the larger of its operand and result, on one device, each time.
        group_size: devices that take part in one.
        times: how often a step runs it: once, or as often as the loops it is in go round. A loop
            whose length the compiler does not know counts as one round.
        operation: where it comes from, by JAX's names.
        network: DCN for the part of a collective over several slices that crosses them.
    """

    kind: CollectiveKind
    num_bytes: int
    group_size: int
    times: int
    operation: str
    network: Network = Network.ICI

    @property
    def link_bytes(self) -> float:
        """Bytes that each device sends in a step, by the ring algorithms.

        With S bytes and n devices: S·(n−1)/n to gather, scatter or exchange, twice that to
        all-reduce (a scatter and a gather), S to permute.
        """
        share = (self.group_size - 1) / self.group_size
        factor = {CollectiveKind.ALL_REDUCE: 2 * share, CollectiveKind.COLLECTIVE_PERMUTE: 1.0}
        return self.times * self.num_bytes * factor.get(self.kind, share)


def read_collectives(hlo: str, *, num_devices: int, num_slices: int = 1) -> list[Collective]:
    """Collectives of a compiled module, in the order of its text.

    The TPU compiler writes a collective that it runs beside other work once for each piece of that
    work, under one channel: what is of one kind, size and channel counts once. One over several
    slices it splits into collectives within them and a transfer between.

    Example:
        >>> text = '''ENTRY %main (p: f32[8]) -> f32[8] {
        ...   ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4]
        ... }'''
        >>> read_collectives(text, num_devices=4)[0].num_bytes
        32

    Args:
        hlo: `compiled.as_text()`, after partitioning: shapes are those of one device.
        num_devices: of the program.
        num_slices: that they are spread over.
    """
    lines = list(_instructions(hlo))
    times = _times(lines)
    found: dict[str, Collective] = {}
    for number, (computation, line) in enumerate(lines):
        rounds = times.get(computation, 1)
        crossing = _CROSSING.search(line)
        if crossing is not None:
            collective = _between_slices(crossing, num_slices=num_slices, times=rounds)
            rendezvous = _RENDEZVOUS.search(line)
            key = f"rendezvous {rendezvous.group(1)}" if rendezvous else f"line {number}"
            if key not in found or found[key].times < rounds:
                found[key] = collective
            continue
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        kind, starts = CollectiveKind(match.group(2)), match.group(3) is not None
        group_size = _group_size(line, num_devices)
        channel = re.search(r"channel_id=(\d+)", line)
        source = re.search(r'op_name="([^"]*)"', line)
        collective = Collective(
            kind=kind,
            num_bytes=_num_bytes(match.group(1), kind, group_size=group_size, starts=starts),
            group_size=group_size,
            times=rounds,
            operation=source.group(1) if source else "",
        )
        key = f"line {number}"
        if channel:
            key = f"channel {channel.group(1)} {kind.value} {collective.num_bytes}"
        if key not in found or found[key].times < collective.times:
            found[key] = collective
    return [collective for collective in found.values() if collective.group_size > 1]


def recomputed_instructions(hlo: str) -> int:
    """Instructions that the compiler computes a second time to save memory, of its own accord."""
    return sum(bool(_RECOMPUTED.match(line)) for line in hlo.splitlines())


def _between_slices(crossing: re.Match[str], *, num_slices: int, times: int) -> Collective:
    kind = CollectiveKind(crossing.group(2).lower().replace("_", "-"))
    dtype, shape = next(iter(_ARRAY.findall(crossing.group(1))))
    return Collective(
        kind=kind,
        num_bytes=_array_bytes(dtype, shape),
        group_size=num_slices,
        times=times,
        operation="between slices",
        network=Network.DCN,
    )


def _instructions(hlo: str) -> Iterator[tuple[str, str]]:
    """(computation, line) of each instruction; the entry computation is ""."""
    computation = ""
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            computation = "" if header.group(1) else header.group(2)
        elif " = " in line:
            yield computation, line


def _times(lines: list[tuple[str, str]]) -> dict[str, int]:
    """How often each computation runs in a step."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for computation, line in lines:
        trips = _TRIPS.search(line)
        for attribute, callee in _CALLS.findall(line):
            rounds = int(trips.group(1)) if trips and attribute == "body" else 1
            calls.setdefault(computation, []).append((callee, rounds))
        for branches in _BRANCHES.findall(line):
            for callee in re.findall(r"[\w.\-]+", branches):
                calls.setdefault(computation, []).append((callee, 1))
    times = {"": 1}
    waiting = [""]
    while waiting:
        caller = waiting.pop()
        for callee, rounds in calls.get(caller, ()):
            if times[caller] * rounds > times.get(callee, 0):
                times[callee] = times[caller] * rounds
                waiting.append(callee)
    return times


def _num_bytes(types: str, kind: CollectiveKind, *, group_size: int, starts: bool) -> int:
    sizes = [_array_bytes(dtype, shape) for dtype, shape in _ARRAY.findall(types)]
    if starts and kind is not CollectiveKind.ALL_REDUCE:
        # An asynchronous start returns its operand beside its result.
        return max(sizes, default=0)
    total = sum(sizes)
    return total * group_size if kind is CollectiveKind.REDUCE_SCATTER else total


def _array_bytes(dtype: str, shape: str) -> int:
    bits = _BITS.get(dtype) or int(re.sub(r"\D.*", "", dtype[1:]))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def _group_size(line: str, num_devices: int) -> int:
    """Devices in one replica group, in any of the ways that XLA writes them."""
    if "source_target_pairs=" in line:
        return 2
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return listed.group(1).count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted.group(1))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named.group(2)))
    return num_devices
