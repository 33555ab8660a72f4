"""Parses a compiled module's text: its instructions, and how often a step runs each."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLS = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
# The later halves of an asynchronous call name the computation that its start has called.
_LATER = re.compile(r" async-(?:update|done)\(")
_NAMED = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_WHILE = re.compile(r" while\(%?([\w.\-]+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LESS = re.compile(r" compare\(%([\w.\-]+), %([\w.\-]+)\), direction=LT")
_ELEMENT = re.compile(r" get-tuple-element\(.*\), index=(\d+)")
_TUPLE = re.compile(r" tuple\(([^)]*)\)")
_ADD = re.compile(r" add\(%([\w.\-]+), %([\w.\-]+)\)")
_CONSTANT = re.compile(r" s32\[\]\S* constant\((-?\d+)\)")
_COPY = re.compile(r" copy\(%([\w.\-]+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An operand or result of an instruction.

    Attributes:
        dtype: XLA's name of its dtype.
        shape: its shape on one device.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its bytes, without the padding of its tiles."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D.*", "", self.dtype[1:]))
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Module:
    """The instructions of a step's program.

    Attributes:
        instructions: (computation, line) of each; the entry computation is "".
        lines: (computation, name) -> the instruction's line; the name of a computation's result
            is "" too.
        rounds: how often a step runs each computation. A loop of unknown length counts as one
            round, and so does each branch of a condition.
        unknown_loops: number of loops of unknown length.
    """

    instructions: Sequence[tuple[str, str]]
    lines: Mapping[tuple[str, str], str]
    rounds: Mapping[str, int]
    unknown_loops: int


def read_module(hlo: str) -> Module:
    """The instructions of `compiled.as_text()`."""
    instructions: list[tuple[str, str]] = []
    lines: dict[tuple[str, str], str] = {}
    computation = ""
    for line in hlo.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            computation = "" if header.group(1) else header.group(2)
        elif named := _NAMED.match(line):
            instructions.append((computation, line))
            lines[computation, named.group(2)] = line
            if named.group(1):
                lines[computation, ""] = line
    trips = {
        line: _trips(computation, line, lines)
        for computation, line in instructions
        if _WHILE.search(line)
    }
    return Module(
        instructions=instructions,
        lines=lines,
        rounds=_rounds(instructions, trips),
        unknown_loops=sum(count is None for count in trips.values()),
    )


def arrays(types: str) -> list[Array]:
    """The arrays of a type, such as `f32[8,4]{1,0}`, or of a tuple of types.

    Example:
        >>> [array.num_bytes for array in arrays("(bf16[4,2]{1,0}, f32[])")]
        [16, 4]
    """
    return [
        Array(dtype, tuple(int(size) for size in shape.split(",") if size))
        for dtype, shape in _ARRAY.findall(types)
    ]


def _trips(computation: str, line: str, lines: Mapping[tuple[str, str], str]) -> int | None:
    """Rounds of a loop that counts up to a constant, as scans do.

    The CPU's compiler writes their number beside the loop, the TPU's does not.
    """
    if known := _TRIPS.search(line):
        return int(known.group(1))
    called, start = dict(_CALLS.findall(line)), _WHILE.search(line)
    less = _LESS.search(lines.get((called["condition"], ""), ""))
    if less is None or start is None:
        return None
    element = _ELEMENT.search(lines.get((called["condition"], less.group(1)), ""))
    if element is None:
        return None

    def counter(place: str, name: str) -> str:
        """The name at the counter's position of a tuple."""
        members = _TUPLE.search(lines.get((place, name), ""))
        names = re.findall(r"%([\w.\-]+)", members.group(1)) if members else []
        return names[int(element.group(1))] if names else ""

    def constant(place: str, name: str) -> int | None:
        text = lines.get((place, name), "") if name else ""
        if copied := _COPY.search(text):
            return constant(place, copied.group(1))
        found = _CONSTANT.search(text)
        return int(found.group(1)) if found else None

    first = constant(computation, counter(computation, start.group(1)))
    limit = constant(called["condition"], less.group(2))
    body = called["body"]
    added = _ADD.search(lines.get((body, counter(body, "")), ""))
    step = constant(body, added.group(2)) if added else None
    if first is None or limit is None or not step:
        return None
    return max(0, -(-(limit - first) // step))


def _rounds(
    instructions: Sequence[tuple[str, str]], trips: Mapping[str, int | None]
) -> dict[str, int]:
    callers: dict[str, list[tuple[str, int]]] = {}
    for caller, line in instructions:
        if _LATER.search(line):
            continue
        for attribute, callee in _CALLS.findall(line):
            known = trips.get(line) if attribute == "body" else None
            callers.setdefault(callee, []).append((caller, 1 if known is None else known))
        for branches in _BRANCHES.findall(line):
            for callee in re.findall(r"[\w.\-]+", branches):
                callers.setdefault(callee, []).append((caller, 1))

    @functools.cache
    def rounds(computation: str) -> int:
        # Nothing calls the entry.
        if computation not in callers:
            return 1
        return sum(rounds(caller) * repeats for caller, repeats in callers[computation])

    return {computation: rounds(computation) for computation, _ in instructions}
