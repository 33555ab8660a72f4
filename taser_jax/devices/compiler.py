"""Compiles a step for devices that this machine lacks; reads the compiler's report."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from taser_jax.devices.collectives import Communication, read_communication
from taser_jax.devices.products import MatrixProduct, matrix_products
from taser_jax.storage.progress import logger

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The compiler fails before it has placed any buffer, or when it cannot place all.
_USED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)


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
class CompiledStep:
    """The compiler's report on a step.

    Attributes:
        memory: memory of one device.
        compiler_flops: FLOPs of one device by XLA's count, which includes element-wise work and
            counts loop bodies once.
        compiler_bytes: bytes that one device reads and writes by XLA's count, which includes
            on-chip memory and counts loop bodies once.
        products: matrix products of the whole program.
        communication: what the devices exchange. Of a loop of unknown length, such as the search
            for a median, all counts are those of one round.
        warnings: warnings of involuntary rematerialisation: arrays that are copied whole to every
            device because the compiler sees no other way from one sharding to another.
        effort: the compiler's effort.
    """

    memory: Memory
    compiler_flops: float
    compiler_bytes: float
    products: Sequence[MatrixProduct]
    communication: Communication
    warnings: Sequence[str]
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
    **static: Any,
) -> CompiledStep:
    """Compiles a jitted function for the devices of a mesh.

    Args:
        step: from `jax.jit`.
        arguments: trees of `jax.ShapeDtypeStruct` with shardings on the mesh.
        mesh: devices, of this machine or of a topology.
        effort: the compiler's effort.
        static: static keyword arguments.

    Raises:
        OutOfMemory: it does not fit.
    """
    options = {
        "jax_optimization_level": _LEVELS[effort],
        # Programs for absent devices could be written to the cache, but not read from it.
        "jax_enable_compilation_cache": False,
    }
    with jax.set_mesh(mesh), _configured(**options):
        traced = step.trace(*arguments, **static)
        try:
            with _native_messages() as messages:
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
        communication=read_communication(
            compiled.as_text(), num_devices=mesh.size, num_slices=_num_slices(mesh)
        ),
        warnings=[line for line in messages if "nvoluntary full rematerialization" in line],
        effort=effort,
    )


def _num_slices(mesh: Mesh) -> int:
    return len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})


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


@contextlib.contextmanager
def _native_messages() -> Iterator[list[str]]:
    """Collects what libtpu writes to the process's standard error, below Python's `sys.stderr`.

    If the block raises, the text is passed on. An abort in native code ends the process at once:
    then the compiler's last words are in the file that was named before; otherwise it is deleted.
    """
    messages: list[str] = []
    stderr = os.dup(2)
    with tempfile.NamedTemporaryFile(prefix="taser_compile_", suffix=".log") as file:
        logger.info("if the compiler aborts, its last words are in %s", file.name)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield messages
        except BaseException:
            os.dup2(stderr, 2)
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            messages += file.read().decode(errors="replace").splitlines()
