"""Matrix products that one device computes, counted in a compiled program."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from taser_jax.compilation.hlo import Array, Module, arrays
from taser_jax.compilation.products import FLOAT32_PASSES

_PRODUCT = re.compile(r" (convolution|dot)\(%?([\w.\-]+), %?([\w.\-]+)\)")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_PRECISION = re.compile(r"operand_precision=\{(\w+),")


@dataclasses.dataclass(frozen=True)
class DeviceProducts:
    """All matrix products of one device in a step.

    Attributes:
        flops: 2·m·k·n of each, on one device, rounds of loops of known length included.
        passes: the same with float32 products of high precision as often as the matrix unit
            goes over them.
    """

    flops: int
    passes: int


def device_products(module: Module) -> DeviceProducts:
    """Products of a compiled module: the TPU compiler writes them as convolutions.

    Unlike a count of FLOPs this knows no element-wise work, so what it finds beyond a device's
    part of the program's products is computed on several devices, or more than once.
    """
    flops = passes = 0
    for computation, line in module.instructions:
        product = _PRODUCT.search(line)
        if product is None:
            continue
        kind, left_name, right_name = product.groups()
        left, right = (_result(module.lines[computation, name]) for name in (left_name, right_name))
        count = _convolution if kind == "convolution" else _dot
        each = module.rounds[computation] * count(
            line, left=left, right=right, result=_result(line)
        )
        flops += each
        passes += each * _passes(line, left, right)
    return DeviceProducts(flops=flops, passes=passes)


def _result(line: str) -> Array:
    return arrays(line.partition(" = ")[2])[0]


def _passes(line: str, left: Array, right: Array) -> int:
    precision = _PRECISION.search(line)
    if precision is None or "f32" not in (left.dtype, right.dtype):
        return 1
    return FLOAT32_PASSES.get(precision.group(1).upper(), 1)


def _dot(line: str, *, left: Array, right: Array, result: Array) -> int:
    del right
    contracted = _CONTRACTED.search(line)
    axes = [int(axis) for axis in contracted.group(1).split(",") if axis] if contracted else []
    return 2 * math.prod(result.shape) * math.prod(left.shape[axis] for axis in axes)


def _convolution(line: str, *, left: Array, right: Array, result: Array) -> int:
    labels = _LABELS.search(line)
    assert labels is not None, line
    left_axes, right_axes, result_axes = labels.groups()
    window = _WINDOW.search(line)
    options = dict(each.split("=") for each in window.group(1).split()) if window else {}
    flops = 2 * right.shape[right_axes.index("i")]
    flops *= math.prod(result.shape[result_axes.index(axis)] for axis in "bf")
    for number in range(len(left_axes) - 2):
        flops *= _taps(
            inputs=left.shape[left_axes.index(str(number))],
            outputs=result.shape[result_axes.index(str(number))],
            size=_option(options, "size", number),
            stride=_option(options, "stride", number),
            before=int(options["pad"].split("x")[number].split("_")[0]) if "pad" in options else 0,
            spread=_option(options, "lhs_dilate", number),
            step=_option(options, "rhs_dilate", number),
        )
    return flops


def _option(options: Mapping[str, str], name: str, number: int) -> int:
    return int(options[name].split("x")[number]) if name in options else 1


@functools.cache
def _taps(
    *, inputs: int, outputs: int, size: int, stride: int, before: int, spread: int, step: int
) -> int:
    """Pairs of an output and a place of the window that read an input, not padding or a gap.

    A batch axis of a product becomes a spatial axis with gaps as wide as the window: each output
    reads one input.
    """
    starts = np.arange(outputs) * stride - before
    pairs = 0
    for place in range(size):
        reads = starts + place * step
        found = (reads % spread == 0) & (reads >= 0) & (reads < inputs * spread)
        pairs += int(np.count_nonzero(found))
    return pairs
