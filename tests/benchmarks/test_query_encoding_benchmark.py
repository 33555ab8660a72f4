"""benchmarks/query_encoding.py at toy size: its figures, and cached states that change nothing."""

import json
import subprocess
import sys

import pytest
from script_calls import REPOSITORY

pytestmark = pytest.mark.slow


def test_cached_states_are_the_same_queries():
    command = [sys.executable, REPOSITORY / "benchmarks/query_encoding.py", "--layers=1"]
    command += ["--embed_dim=64", "--batch=2", "--documents=3", "--repeats=1"]
    command += ["--query_length=8", "--document_length=16"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = {line.pop("figure"): line for line in map(json.loads, printed.splitlines())}
    assert lines["agreement of cached states"]["largest_difference"] < 1e-4
    flops = [lines[name]["gigaflops"] for name in ("plain queries", "fused queries")]
    assert lines["FLOPs of fused over plain"]["ratio"] == pytest.approx(flops[1] / flops[0], 1e-3)
    assert lines["time of cached over plain"]["aim"] == 1.5
    assert lines["tokens per second of fused over documents"]["aim"] == 0.9
