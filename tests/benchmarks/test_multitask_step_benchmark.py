"""benchmarks/multitask_step.py runs at toy size and prints what it promises."""

import json
import sys

import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow


@pytest.mark.release
def test_it_prints_a_line_a_figure(monkeypatch, capsys):
    flags = (
        "--layers 1 --embed_dim 8 --heads 1 --head_dim 8 --mlp_dim 16 --vocab_size 64 --num_tasks 2"
    )
    flags += " --batch_share 0.1 --passage_length 6 --max_query_length 5 --steps 1"
    flags += " --bandwidth_megabytes 1 --methods plain tsage --parts"
    monkeypatch.setattr(sys, "argv", ["multitask_step.py", *flags.split()])
    load_script("multitask_step.py").main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines] == ["bandwidth", "plain", "tsage", "tsage alone"]
    _, plain, tsage, alone = lines
    assert plain["ratio_to_plain"] == 1
    parameters = plain["parameters"]
    # Adam has two moments; T-SAGE's average is two tasks more.
    assert plain["state_bytes"] == pytest.approx(8 * parameters, rel=0.02)
    assert tsage["state_bytes"] - plain["state_bytes"] == pytest.approx(8 * parameters, rel=0.02)
    assert tsage["median_passes"] >= 1
    assert tsage["traffic_milliseconds"] > 0
    assert alone["update_milliseconds"] > 0
    assert alone["median_milliseconds"] > 0


def test_traffic_by_hand():
    """10 parameters, 2 tasks: a stack of gradients is 80 bytes, a vector 40."""
    traffic = load_script("multitask_step.py").traffic_bytes
    sizes = {"tasks": 2, "parameters": 10}
    assert traffic("plain", passes=0, **sizes) == 0
    assert traffic("pcgrad", passes=0, **sizes) == 80 + 80 + 80 + 40
    # Stack, three passes of 120, then gradients, averages twice, parameters and the combined one.
    assert traffic("tsage", passes=3, **sizes) == 80 + 360 + (80 + 2 * 80 + 2 * 40)
