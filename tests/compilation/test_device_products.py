"""Products of one device in HLO texts in the ways XLA writes them, by hand."""

from __future__ import annotations

import pytest

from taser_jax.compilation.device_products import device_products
from taser_jax.compilation.hlo import read_module


def module(left: str, right: str, line: str):
    return read_module(
        "\n".join(
            [
                *("HloModule m", "", "ENTRY %main (p: f32[8]) -> f32[8] {"),
                *(f"  %l = {left} parameter(0)", f"  %r = {right} parameter(1)", f"  {line}", "}"),
            ]
        )
    )


@pytest.mark.parametrize(
    ("left", "right", "line", "flops"),
    [
        ("bf16[2,3]{1,0}", "bf16[3,5]{1,0}", "dim_labels=bf_io->bf", 60),
        ("bf16[3,2]{1,0}", "bf16[5,3]{1,0}", "dim_labels=fb_oi->bf", 60),
        # Rows of texts: [7, 2, 3] by [3, 5] under a window of one.
        ("bf16[7,2,3]", "bf16[3,5]{1,0}", "window={size=1}, dim_labels=0bf_io->0bf", 7 * 60),
        # The gradient of the same contracts the texts, a window as long as they are many.
        ("bf16[7,2,3]", "bf16[7,2,5]", "window={size=7}, dim_labels=0fb_0io->bf0", 7 * 60),
        # Attention: 64 texts and 12 heads are places with gaps in between, both ways of writing it.
        (
            "bf16[64,12,2,3]",
            "bf16[64,12,5,3]",
            "window={size=64x12 stride=63x11 lhs_dilate=64x12}, dim_labels=01bf_01oi->01bf",
            64 * 12 * 60,
        ),
        (
            "bf16[64,12,3,2]",
            "bf16[64,12,5,3]",
            "window={size=64x12 stride=64x12 pad=63_63x11_11 lhs_dilate=63x11 rhs_reversal=1x1}, "
            "dim_labels=01fb_01oi->01fb",
            64 * 12 * 60,
        ),
        # Heads of the kernel are outputs that slide over one place between paddings.
        (
            "bf16[7,2,3,1]",
            "bf16[12,5,3,1]",
            "window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            12 * 7 * 60,
        ),
    ],
)
def test_convolutions(left, right, line, flops):
    shapes = {
        "bf": "bf16[2,5]",
        "0bf": "bf16[7,2,5]",
        "bf0": "bf16[3,5,1]",
        "01bf": "bf16[64,12,2,5]",
        "01fb": "bf16[64,12,5,2]",
        "0b1f": "bf16[7,2,12,5]",
    }
    result = shapes[line.rpartition("->")[2]]
    line = f"ROOT %c = {result}{{1,0:T(8,128)}} convolution(%l, %r), {line}"
    found = device_products(module(left, right, line))
    assert (found.flops, found.passes) == (flops, flops)


def test_a_dot():
    line = (
        "ROOT %d = f32[4,2,5]{2,1,0} dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}, operand_precision={highest,highest}"
    )
    found = device_products(module("f32[4,2,3]{2,1,0}", "f32[4,3,5]{2,1,0}", line))
    assert (found.flops, found.passes) == (4 * 60, 6 * 4 * 60)


def test_bfloat16_takes_one_pass_whatever_the_precision():
    line = "ROOT %c = f32[2,5] convolution(%l, %r), dim_labels=bf_io->bf, operand_precision={}"
    line = line.replace("={}", "={highest,highest}")
    assert device_products(module("bf16[2,3]", "bf16[3,5]", line)).passes == 60
