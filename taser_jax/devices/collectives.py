"""Collectives of a compiled program, read from its HLO text: XLA's own analyses leave them out."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?[\w.\-]+ = ")
# The computations that an instruction calls: `body=%a`, `branch_computations={%a, %b}`.
_CALLS = re.compile(r"(\w+)=\{?%([\w.\-]+(?:, %[\w.\-]+)*)")
# The later halves of an asynchronous call name the computation that its start has called.
_LATER = re.compile(r" async-(?:update|done)\(")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIMIT = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
# Between slices chips send through their hosts; an attribute names the collective it belongs to.
_CROSSING = re.compile(r' = \((.*?)\) send\(.*_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
ICI, DCN = "ICI", "DCN"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a step.

    Attributes:
        kind: the operation, by XLA's name: all-reduce, all-gather, reduce-scatter, all-to-all or
            collective-permute.
        num_bytes: bytes of the larger of its operand and result, on one device, each time.
        group_size: devices in a group.
        times: how often a step runs it: once, or once per iteration of the loops around it. A loop
            of unknown length counts as one iteration.
        network: ICI, the links of a slice, or DCN, the data centre's, for what crosses slices.
    """

    kind: str
    num_bytes: int
    group_size: int
    times: int
    network: str = ICI

    @property
    def link_bytes(self) -> float:
        """Bytes that each device sends in a step, by the ring algorithms.

        With S bytes and n devices: S·(n−1)/n to gather, scatter or exchange, twice that to
        all-reduce (a scatter and a gather), S to permute.
        """
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}
        return self.times * self.num_bytes * factor.get(self.kind, share)


def read_collectives(hlo: str, *, num_devices: int, num_slices: int = 1) -> list[Collective]:
    """The collectives of a compiled module on one device, in the order of its text.

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
    """
    lines = instructions(hlo)
    times_of = _times(lines, _loop_lengths(lines))
    collectives: dict[str, Collective] = {}
    for number, (computation, line) in enumerate(lines):
        times, key = times_of[computation], f"line {number}"
        if crossing := _CROSSING.search(line):
            collective = _between_slices(crossing, num_slices=num_slices, times=times)
            if rendezvous := _RENDEZVOUS.search(line):
                key = rendezvous.group()
        elif match := _COLLECTIVE.search(line):
            collective = _collective(match, line, num_devices=num_devices, times=times)
            if channel := _CHANNEL.search(line):
                key = f"channel {channel.group(1)} {match.group(2)} {collective.num_bytes}"
        else:
            continue
        if key not in collectives or collectives[key].times < times:
            collectives[key] = collective
    return [each for each in collectives.values() if each.group_size > 1]


def instructions(hlo: str) -> list[tuple[str, str]]:
    """(computation, line) of each instruction of a module; the entry computation is ""."""
    lines, computation = [], ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = "" if header.group(1) else header.group(2)
        elif _INSTRUCTION.match(line):
            lines.append((computation, line))
    return lines


def _loop_lengths(lines: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Body of each loop -> its iterations, where they are known.

    The CPU's compiler writes the number beside the loop. The TPU's does not, but the condition of a
    scan compares the counter, which starts at 0, with a constant.
    """
    limits: dict[str, list[int]] = {}
    less = set()
    for computation, line in lines:
        limits.setdefault(computation, []).extend(map(int, _LIMIT.findall(line)))
        if " compare(" in line and "direction=LT" in line:
            less.add(computation)
    lengths: dict[str, int] = {}
    for _, line in lines:
        if " while(" not in line:
            continue
        called = dict(_CALLS.findall(line))
        condition = called["condition"]
        if written := _ROUNDS.search(line):
            lengths[called["body"]] = int(written.group(1))
        elif condition in less and len(limits[condition]) == 1:
            lengths[called["body"]] = limits[condition][0]
    return lengths


def _times(lines: Sequence[tuple[str, str]], lengths: dict[str, int]) -> dict[str, int]:
    """How often a step runs each computation; each branch of a condition counts once."""
    callers: dict[str, list[str]] = {}
    for caller, line in lines:
        if not _LATER.search(line):
            for _, called in _CALLS.findall(line):
                for computation in called.split(", %"):
                    callers.setdefault(computation, []).append(caller)

    @functools.cache
    def times(computation: str) -> int:
        # Nothing calls the entry.
        each = sum(map(times, callers[computation])) if computation in callers else 1
        return each * lengths.get(computation, 1)

    return {computation: times(computation) for computation, _ in lines}


def _between_slices(crossing: re.Match[str], *, num_slices: int, times: int) -> Collective:
    first_array = _ARRAY.search(crossing.group(1))
    assert first_array is not None
    kind = crossing.group(2).lower().replace("_", "-")
    num_bytes = _num_bytes(first_array.group())
    return Collective(kind, num_bytes, num_slices, times, DCN)


def _collective(match: re.Match[str], line: str, *, num_devices: int, times: int) -> Collective:
    types, kind = match.group(1), match.group(2)
    group_size = _group_size(line, num_devices)
    num_bytes = _num_bytes(types)
    if match.group(3) and kind != "all-reduce":
        num_bytes = _larger_part(types)
    elif kind == "reduce-scatter":
        num_bytes *= group_size
    return Collective(kind, num_bytes, group_size, times)


def _num_bytes(types: str) -> int:
    """Bytes of a type, such as `f32[8,4]{1,0}`, or of a tuple of types, without padding.

    Example:
        `(bf16[4,2]{1,0}, f32[])` has 16 + 4.
    """
    total = 0
    for dtype, shape in _ARRAY.findall(types):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
        total += math.prod(int(size) for size in shape.split(",") if size) * bits // 8
    return total


def _larger_part(types: str) -> int:
    """Bytes of operands or results of an asynchronous start, which returns both.

    They are `(operand, result, ...)` or, where there are several, `((a, b), (A, B), ...)`.
    """
    bare = re.sub(r"\{[^}]*\}", "", types)
    parts = re.findall(r"\(([^()]*)\)", bare[1:-1]) or re.findall(r"\w+\[[\d,]*\]", bare)
    return max(map(_num_bytes, parts[:2]))


def _group_size(line: str, num_devices: int) -> int:
    """Devices of a replica group, in any of XLA's notations."""
    if listed := re.search(r"(?:source_target_pairs|replica_groups)=\{\{([\d,]*)\}", line):
        return listed.group(1).count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(counted.group(1))
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
        # Of an axis `'y':(2)4` the group has one factor of its size, 4.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named.group(2))
        return math.prod(int(size or sizes[axis]) for axis, size in axes)
    return num_devices
