"""Compiles a step for devices that are not here, and keeps what the compiler says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from taser_jax.compilation.collectives import Collective, read_collectives
from taser_jax.compilation.hlo import read_module
from taser_jax.compilation.products import MatrixProduct, matrix_products
from taser_jax.progress import logger

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The compiler gives up before it has placed anything, or when it cannot place all.
_USED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)


class CompilerEffort(enum.Enum):
    """How hard the compiler tries; it decides how long it takes.

    FULL is what a training run gets. QUICK is XLA's level O1: the same products and collectives,
    sharded alike, in about a quarter of the time. Its temporaries are some percent off, and the
    traffic it counts is lower: it moves less ahead of time between memories.
    """

    FULL = "full"
    QUICK = "quick"


_LEVELS = {CompilerEffort.FULL: "UNKNOWN", CompilerEffort.QUICK: "O1"}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while a step runs.

    Attributes:
        arguments: what the step takes: state and batch, or parameters and tokens.
        outputs: what it returns, in memory of its own or in its arguments'.
        aliased: part of the outputs that lies where arguments lay (the donated state).
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
        """All of it, with what is aliased counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of a step.

    Attributes:
        memory: of one device.
        compiler_flops: of one device, by XLA's count: element-wise work too, and loop bodies once.
        compiler_bytes: read and written by one device, by XLA's count: what stays in on-chip
            memory too, and loop bodies once.
        products: matrix products of the whole program.
        collectives: of one device.
        warnings: of involuntary rematerialisation: arrays that are copied whole to every device
            because the compiler sees no other way from one sharding to another.
        effort: of the compiler.
        unknown_loops: loops of a length that the compiler does not know, such as the search for a
            median: all counts take them for one round.
    """

    memory: Memory
    compiler_flops: float
    compiler_bytes: float
    products: Sequence[MatrixProduct]
    collectives: Sequence[Collective]
    warnings: Sequence[str]
    effort: CompilerEffort = CompilerEffort.FULL
    unknown_loops: int = 0


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
    step: Callable[..., Any],
    *arguments: Any,
    mesh: Mesh,
    effort: CompilerEffort = CompilerEffort.FULL,
    **static: Any,
) -> CompiledStep:
    """Compiles a jitted function for the devices of a mesh.

    Args:
        step: from `jax.jit`.
        arguments: trees of `jax.ShapeDtypeStruct` with shardings on the mesh.
        mesh: devices, of a topology too.
        effort: of the compiler.
        static: static keyword arguments.

    Raises:
        OutOfMemory: it does not fit.
    """
    with jax.set_mesh(mesh), _at_level(_LEVELS[effort]):
        traced = step.trace(*arguments, **static)  # type: ignore[attr-defined]  # of jax.jit
        try:
            with _native_messages() as messages:
                compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            found = _out_of_memory(str(error))
            if found is None:
                raise
            raise found from error
    stats, cost = compiled.memory_analysis(), compiled.cost_analysis()
    hlo = compiled.as_text()
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
            hlo,
            num_devices=mesh.size,
            num_slices=_num_slices(mesh),
            coordinates=[device.coords for device in mesh.devices.flat],
        ),
        warnings=[line for line in messages if "nvoluntary full rematerialization" in line],
        effort=effort,
        unknown_loops=read_module(hlo).unknown_loops,
    )


def _num_slices(mesh: Mesh) -> int:
    return len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})


@contextlib.contextmanager
def _at_level(level: str) -> Iterator[None]:
    before = jax.config.values["jax_optimization_level"]
    jax.config.update("jax_optimization_level", level)
    try:
        yield
    finally:
        jax.config.update("jax_optimization_level", before)


def _out_of_memory(message: str) -> OutOfMemory | None:
    for pattern in _USED:
        used = pattern.search(message)
        if used is not None:
            needed, available = (
                int(float(used.group(i)) * _UNITS[used.group(i + 1)]) for i in (1, 3)
            )
            return OutOfMemory(needed=needed, available=available)
    return None


@contextlib.contextmanager
def _native_messages() -> Iterator[list[str]]:
    """Collects what libtpu writes to the process's standard error, which is not Python's.

    An exception gives it back. An abort in native code ends the process at once: the file that is
    named beforehand has the compiler's last words then, and is gone otherwise.
    """
    messages: list[str] = []
    kept = os.dup(2)
    with tempfile.NamedTemporaryFile(prefix="taser_compile_", suffix=".log") as file:
        logger.info("if the compiler aborts, its last words are in %s", file.name)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield messages
        except BaseException:
            os.dup2(kept, 2)
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            messages += file.read().decode(errors="replace").splitlines()
