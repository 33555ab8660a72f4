"""benchmarks/profile_table.py: instructions by kind, and a traced run summed by them."""

import json
import os
import subprocess
import sys

import pytest
from script_calls import BENCHMARKS, load_script

pytestmark = pytest.mark.slow

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused_gelu (param: f32[8]) -> f32[8] {
  %param = f32[8]{0} parameter(0)
  ROOT %erf.1 = f32[8]{0} erf(%param)
}

%fused_moves (param.1: f32[2,4]) -> f32[4,2] {
  %param.1 = f32[2,4]{1,0} parameter(0)
  ROOT %transpose.1 = f32[4,2]{1,0} transpose(%param.1), dimensions={1,0}
}

%fused_product (param.2: f32[8,8]) -> (f32[8,8], f32[8]) {
  %param.2 = f32[8,8]{1,0} parameter(0)
  %dot.7 = f32[8,8]{1,0} dot(%param.2, %param.2), lhs_contracting_dims={1}
  ROOT %exponential.1 = f32[8,8]{1,0} exponential(%dot.7)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %erf_fusion = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_gelu
  %moves_fusion = f32[4,2]{1,0} fusion(%x), kind=kLoop, calls=%fused_moves
  %product_fusion = (f32[8,8]{1,0}, /*index=1*/f32[8]{0}) fusion(%x), calls=%fused_product
  %gemm.1 = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %sort.1 = f32[8]{0} custom-call(%x), custom_call_target="TopK"
  %copy.1 = f32[8]{0} copy(%x)
  %copy-start.1 = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)
  %all-reduce-start.1 = f32[8]{0} all-reduce-start(%x), to_apply=%add
  %scatter.1 = f32[8]{0} scatter(%x, %x, %x), to_apply=%add
  %reduce.1 = f32[] reduce(%x, %x), dimensions={0}, to_apply=%add
  %while.1 = (s32[], f32[8]{0}) while(%x), condition=%c, body=%b
  ROOT %add.1 = f32[8]{0} add(%x, %x)
}
"""


@pytest.fixture
def table():
    return load_script("profile_table.py")


def test_kinds_of_instructions(table):
    kinds = table.kinds_of(PROGRAM)
    assert "while.1" not in kinds
    expected = {
        "erf_fusion": table.Kind.GELU,
        "moves_fusion": table.Kind.COPIES,
        "product_fusion": table.Kind.PRODUCTS,
        "gemm.1": table.Kind.PRODUCTS,
        "sort.1": table.Kind.ELEMENTWISE,
        "copy.1": table.Kind.COPIES,
        "copy-start.1": table.Kind.COPIES,
        "all-reduce-start.1": table.Kind.EXCHANGES,
        "scatter.1": table.Kind.LOOK_UPS,
        "reduce.1": table.Kind.REDUCTIONS,
        "add.1": table.Kind.ELEMENTWISE,
    }
    assert {name: kinds[name] for name in expected} == expected


# In a process of its own: beside the TPU compiler, which other tests load, a trace has no events of
# the CPU.
TRACED = """
import json, pathlib, sys
import jax, jax.numpy as jnp
import profile_table

def products_and_gelu(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.erf(x @ x), x).sum()

x = jnp.ones((256, 256))
compiled = jax.jit(products_and_gelu).lower(x).compile()
run = lambda: jax.block_until_ready(compiled(x))
rows = profile_table.time_by_kind(run, pathlib.Path(sys.argv[1]), compiled.as_text())
print(json.dumps([[row.kind.name, row.milliseconds, row.operations] for row in rows]))
"""


def test_a_run_summed_by_kind(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TRACED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    times = {kind: milliseconds for kind, milliseconds, _ in rows}
    counts = {kind: count for kind, _, count in rows}
    assert counts["PRODUCTS"] == counts["GELU"] == 3
    assert times["PRODUCTS"] > 0
    assert "REDUCTIONS" in counts
    assert list(times.values()) == sorted(times.values(), reverse=True)
    assert list(tmp_path.rglob("*.xplane.pb"))
