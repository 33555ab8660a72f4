"""Where the time of a compiled program goes: a trace of one run, summed by kind of operation."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
from collections.abc import Callable, Mapping

import jax

from taser_jax.devices.collectives import instructions

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Their time is that of the instructions inside them, which have events of their own.
_CONTAINERS = ("call", "conditional", "while")


class Kind(enum.Enum):
    """What an operation is counted as. The first that fits: a fusion may be of several."""

    PRODUCTS = "matrix products"
    EXCHANGES = "exchanges between devices"
    LOOK_UPS = "look-ups and their gradients (gather, scatter)"
    GELU = "fusions with GELU (erf)"
    SOFTMAX = "fusions with softmax (exponentials)"
    UPDATES = "updates of parameters and moments (square roots)"
    REDUCTIONS = "other reductions"
    COPIES = "copies and transpositions"
    ELEMENTWISE = "other element-wise fusions"


_OPCODES: Mapping[Kind, frozenset[str]] = {
    Kind.PRODUCTS: frozenset({"dot", "convolution"}),
    Kind.EXCHANGES: frozenset(
        {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
    ),
    Kind.LOOK_UPS: frozenset({"gather", "scatter"}),
    Kind.GELU: frozenset({"erf", "tanh"}),
    Kind.SOFTMAX: frozenset({"exponential"}),
    Kind.UPDATES: frozenset({"sqrt"}),
    Kind.REDUCTIONS: frozenset({"reduce", "reduce-window"}),
}
# cuBLAS's products and cuDNN's attention are calls of theirs.
_PRODUCT_TARGETS = ("gemm", "matmul", "conv", "fmha", "dot")
# A fusion of these alone computes nothing.
_MOVES = frozenset(
    {
        *("bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice"),
        *("dynamic-update-slice", "pad", "parameter", "reshape", "reverse", "slice", "transpose"),
        *("get-tuple-element", "tuple"),
    }
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Operations of one kind.

    Attributes:
        kind: which.
        milliseconds: of all of them.
        operations: how many ran.
    """

    kind: Kind
    milliseconds: float
    operations: int


def time_by_kind(call: Callable[[], object], folder: pathlib.Path, program: str) -> list[Row]:
    """Traces one run of a program; the longest kind comes first.

    Args:
        call: runs it once, compiled and warm, and waits for its results.
        folder: the trace is written there; TensorBoard and Perfetto read it.
        program: `compiled.as_text()`, whose names the trace has.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    before = set(folder.rglob("*.xplane.pb"))
    with jax.profiler.trace(str(folder), profiler_options=options):
        call()
    (path,) = set(folder.rglob("*.xplane.pb")) - before
    kinds = kinds_of(program)
    durations: dict[Kind, list[float]] = {}
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    # With a GPU the host's plane has the launches of the same operations.
    on_device = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in on_device or planes:
        for line in plane.lines:
            for event in line.events:
                kind = kinds.get(str(dict(event.stats).get("hlo_op")))
                if kind is not None:
                    durations.setdefault(kind, []).append(event.duration_ns / 1e6)
    rows = [Row(kind, sum(times), len(times)) for kind, times in durations.items()]
    return sorted(rows, key=lambda row: -row.milliseconds)


def kinds_of(program: str) -> dict[str, Kind]:
    """The kind of every instruction of a compiled program, by name; containers have none."""
    opcodes: dict[str, set[str]] = {}
    lines: list[tuple[str, str, str]] = []
    for computation, line in instructions(program):
        if instruction := _INSTRUCTION.match(line):
            opcodes.setdefault(computation, set()).add(_opcode(instruction[2], line))
            lines.append((instruction[1], instruction[2], line))
    kinds = {}
    for name, opcode, line in lines:
        inside = {_opcode(opcode, line)}
        if opcode == "fusion":
            inside = set().union(*(opcodes.get(called, set()) for called in _CALLS.findall(line)))
        if opcode not in _CONTAINERS:
            kinds[name] = _kind(inside)
    return kinds


def _opcode(opcode: str, line: str) -> str:
    """The instruction's; `dot` for a library's product."""
    target = _TARGET.search(line)
    if target and any(word in target[1].lower() for word in _PRODUCT_TARGETS):
        return "dot"
    return opcode.removesuffix("-start").removesuffix("-done")


def _kind(opcodes: set[str]) -> Kind:
    for kind, of_kind in _OPCODES.items():
        if opcodes & of_kind:
            return kind
    return Kind.COPIES if opcodes <= _MOVES else Kind.ELEMENTWISE
