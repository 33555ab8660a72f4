"""How often computations run, from texts of both ways in which loops are written."""

from __future__ import annotations

import pytest

from taser_jax.devices.compilation.hlo import read_module

# As the TPU compiler writes a scan: nothing beside the loop says how often it goes round.
COUNTED = """
%body (b: (bf16[3,3], s32[])) -> (bf16[3,3], s32[]) {
  %b = (bf16[3,3]{1,0}, s32[]{:T(128)}) parameter(0)
  %x = bf16[3,3]{1,0} get-tuple-element(%b), index=0
  %i = s32[]{:T(128)} get-tuple-element(%b), index=1
  %step = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%i, %step)
  %product = bf16[3,3]{1,0} convolution(%x, %x), dim_labels=bf_io->bf
  ROOT %t = (bf16[3,3]{1,0}, s32[]{:T(128)}) tuple(%product, %next)
}

%condition (c: (bf16[3,3], s32[])) -> pred[] {
  %c = (bf16[3,3]{1,0}, s32[]{:T(128)}) parameter(0)
  %limit = s32[]{:T(128)} constant(7)
  %i.1 = s32[]{:T(128)} get-tuple-element(%c), index=1
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: bf16[3,3]) -> bf16[3,3] {
  %p = bf16[3,3]{1,0} parameter(0)
  %start = s32[]{:T(128)} constant(1)
  %copy = s32[]{:T(128)} copy(%start)
  %all = (bf16[3,3]{1,0}, s32[]{:T(128)}) tuple(%p, %copy)
  %w = (bf16[3,3]{1,0}, s32[]{:T(128)}) while(%all), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("old", "new", "rounds", "unknown"),
    [
        ("constant(STEP)", "constant(1)", 6, 0),
        # Two rounds unrolled into one.
        ("constant(STEP)", "constant(2)", 3, 0),
        ("constant(STEP)", "constant(4)", 2, 0),
        # What is not understood counts once and is told.
        ("constant(STEP)", "parameter(1)", 1, 1),
        ("direction=LT", "direction=NE", 1, 1),
        ("= s32[]{:T(128)} constant(1)\n  %copy", "= s32[]{:T(128)} parameter(1)\n  %copy", 1, 1),
    ],
)
def test_loops_that_count(old, new, rounds, unknown):
    module = read_module(COUNTED.replace(old, new).replace("STEP", "1"))
    assert module.rounds["body"] == rounds
    assert module.unknown_loops == unknown


def test_a_length_beside_the_loop():
    line = 'body=%body, backend_config={"known_trip_count":{"n":"4"}}'
    module = read_module(
        COUNTED.replace("direction=LT", "direction=NE").replace("body=%body", line)
    )
    assert (module.rounds["body"], module.unknown_loops) == (4, 0)
