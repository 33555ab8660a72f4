"""Matrix products of a program, counted in its jaxpr: loops and recomputation included."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

# Passes of the matrix unit over float32 operands, by jax.lax.Precision's names.
FLOAT32_PASSES = {"HIGHEST": 6, "HIGH": 3}


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """One product of the program.

    Attributes:
        dtype: dtype of its operands.
        precision: HIGHEST, HIGH or DEFAULT.
        flops: 2·(batch)·m·k·n, over all devices and all times.
        times: how often a step computes it.
        operation: path of modules and functions that compute it.
    """

    dtype: str
    precision: str
    flops: int
    times: int
    operation: str

    @property
    def passes(self) -> int:
        """Passes of the matrix unit, which multiplies bfloat16: more for exact float32."""
        return FLOAT32_PASSES.get(self.precision, 1) if self.dtype == "float32" else 1


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


def _product(equation: Any, *, times: int, devices: int) -> MatrixProduct:
    left, right = (variable.aval for variable in equation.invars)
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
        operation=str(equation.source_info.name_stack),
    )
