"""Compiles a step for devices that this machine lacks; reads the compiler's report.

Matrix products are counted in the traced program, with the rounds of loops and recomputation: the
compiler's own count takes the body of a loop once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import re
from collections.abc import Iterator, Sequence
from typing import cast

import jax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import PyTree

from taser_jax.devices.collectives import Collective, read_collectives

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The compiler fails before it has placed any buffer, or when it cannot place all.
_USED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)

# Passes of the matrix unit over float32 operands, by jax.lax.Precision's names.
FLOAT32_PASSES = {"HIGHEST": 6, "HIGH": 3}


class CompilerEffort(enum.Enum):
    """The compiler's level of optimisation, which decides its time.

    FULL is that of a training run. QUICK is XLA's level O1: the same products and collectives,
    sharded alike, in about a quarter of the time. Its temporaries differ by some percent, and it
    counts less traffic, since it prefetches less between memories.
    """

    FULL = "full"
    QUICK = "quick"


_LEVELS = {CompilerEffort.FULL: "UNKNOWN", CompilerEffort.QUICK: "O1"}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a step runs.

    Attributes:
        arguments: the step's arguments: state and batch, or parameters and tokens.
        outputs: its results, in separate memory or in that of its arguments.
        aliased: part of the outputs in the memory of arguments (the donated state).
        temporaries: activations, gradients, buffers of collectives.
        program: the code.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int

    @property
    def peak(self) -> int:
        """Sum of all, aliased bytes counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """One product of the program.

    Attributes:
        dtype: dtype of its operands.
        precision: HIGHEST, HIGH or DEFAULT.
        flops: 2·(batch)·m·k·n, over all devices and all times.
        times: how often a step computes it.
    """

    dtype: str
    precision: str
    flops: int
    times: int

    @property
    def passes(self) -> int:
        """Passes of the matrix unit, which multiplies bfloat16: more for exact float32."""
        return FLOAT32_PASSES.get(self.precision, 1) if self.dtype == "float32" else 1


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiler's report on a step.

    Attributes:
        memory: memory of one device.
        compiler_flops: FLOPs of one device by XLA's count, which includes element-wise work and
            counts loop bodies once.
        compiler_bytes: bytes that one device reads and writes by XLA's count, which includes
            on-chip memory and counts loop bodies once.
        products: matrix products of the whole program.
        collectives: what the devices exchange. Of a loop of unknown length, such as the search for
            a median, all counts are those of one round.
        effort: the compiler's effort.
    """

    memory: Memory
    compiler_flops: float
    compiler_bytes: float
    products: Sequence[MatrixProduct]
    collectives: Sequence[Collective]
    effort: CompilerEffort = CompilerEffort.FULL


class OutOfMemory(Exception):
    """The compiler could not place a step in a device's memory.

    Attributes:
        needed: bytes.
        available: bytes.
    """

    def __init__(self, *, needed: int, available: int) -> None:
        self.needed, self.available = needed, available
        super().__init__(f"{needed / 2**30:.2f} of {available / 2**30:.2f} GiB")


def compile_step(
    step: jax.stages.Wrapped,
    *arguments: PyTree,
    mesh: Mesh,
    effort: CompilerEffort = CompilerEffort.FULL,
) -> CompiledStep:
    """Compiles a jitted function for the devices of a mesh.

    Args:
        step: from `jax.jit`.
        arguments: trees of `jax.ShapeDtypeStruct` with shardings on the mesh.
        mesh: devices, of this machine or of a topology.
        effort: the compiler's effort.

    Raises:
        OutOfMemory: it does not fit.
    """
    options = {
        "jax_optimization_level": _LEVELS[effort],
        # Programs for absent devices could be written to the cache, but not read from it.
        "jax_enable_compilation_cache": False,
    }
    with jax.set_mesh(mesh), _configured(**options):
        traced = step.trace(*arguments)
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            _raise_out_of_memory(error)
            raise
    stats, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return CompiledStep(
        memory=Memory(
            arguments=stats.argument_size_in_bytes,
            outputs=stats.output_size_in_bytes,
            aliased=stats.alias_size_in_bytes,
            temporaries=stats.temp_size_in_bytes,
            program=stats.generated_code_size_in_bytes,
        ),
        compiler_flops=cost["flops"],
        compiler_bytes=cost["bytes accessed"],
        products=matrix_products(traced.jaxpr),
        collectives=read_collectives(
            compiled.as_text(),
            num_devices=mesh.size,
            num_slices=len({getattr(each, "slice_index", 0) for each in mesh.devices.flat}),
        ),
        effort=effort,
    )


@contextlib.contextmanager
def _configured(**options: object) -> Iterator[None]:
    """Sets JAX's options within the block."""
    before = {name: jax.config.values[name] for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _raise_out_of_memory(error: Exception) -> None:
    for pattern in _USED:
        if used := pattern.search(str(error)):
            needed, available = (
                int(float(used.group(i)) * _UNITS[used.group(i + 1)]) for i in (1, 3)
            )
            raise OutOfMemory(needed=needed, available=available) from error


def matrix_products(jaxpr: core.ClosedJaxpr) -> list[MatrixProduct]:
    """Every `dot_general` of a traced program.

    A scan counts once per iteration; a while loop, whose length is unknown, counts once. Of the
    branches of a condition, the one with the most arithmetic counts. What `jax.shard_map` lets each
    device compute counts for all of them.

    Example:
        >>> jaxpr = jax.make_jaxpr(jax.numpy.matmul)(*(jax.numpy.ones((4, 4)),) * 2)
        >>> [product.flops for product in matrix_products(jaxpr)]
        [128]
    """
    return list(_products(jaxpr.jaxpr, times=1, devices=1))


def _products(jaxpr: core.Jaxpr, *, times: int, devices: int) -> Iterator[MatrixProduct]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            yield _product(equation, times=times, devices=devices)
        elif name == "cond":
            branches = [
                list(_products(branch.jaxpr, times=times, devices=devices))
                for branch in equation.params["branches"]
            ]
            yield from max(branches, key=lambda products: sum(each.flops for each in products))
        else:
            rounds = equation.params["length"] if name == "scan" else 1
            parts = _devices_apart(equation) if name == "shard_map" else 1
            for value in equation.params.values():
                for inner in _jaxprs(value):
                    yield from _products(inner, times=times * rounds, devices=devices * parts)


def _jaxprs(value: object) -> Iterator[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _jaxprs(part)


def _devices_apart(equation: core.JaxprEqn) -> int:
    """Devices whose programs a shard_map holds once, with the shapes of one device."""
    mesh = equation.params["mesh"]
    return math.prod(mesh.shape[axis] for axis in equation.params["newly_manual_axes"])


def _product(equation: core.JaxprEqn, *, times: int, devices: int) -> MatrixProduct:
    left, right = (cast(jax.core.ShapedArray, variable.aval) for variable in equation.invars)
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    shared = math.prod(left.shape[axis] for axis in (*contracted, *batched))
    rows = left.size // shared
    columns = right.size // shared
    precision = equation.params["precision"]
    precision = precision[0] if isinstance(precision, tuple) else precision
    named = isinstance(precision, jax.lax.Precision)
    return MatrixProduct(
        dtype=str(max((left.dtype, right.dtype), key=lambda dtype: dtype.itemsize)),
        precision=precision.name if named else "DEFAULT",
        flops=devices * times * 2 * shared * rows * columns,
        times=times,
    )
