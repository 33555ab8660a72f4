"""benchmarks/ensemble_step.py and confidence.py run at toy size and print what they promise."""

import json
import sys

import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow


def figures(monkeypatch, capsys, name, flags):
    module = load_script(f"{name}.py")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags.split()])
    module.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["figure"]: line for line in lines}


def test_a_step_of_all_members(monkeypatch, capsys):
    flags = "--members 3 --dim 8 --hidden 4 --batch 4 --passages 50 --repeats 2"
    found = figures(monkeypatch, capsys, "ensemble_step", flags)
    assert set(found) == {"one", "members", "batches", "torch"}
    assert found["members"]["ratio_to_one"] > 0
    assert found["batches"]["ratio_to_members"] > 0
    assert found["torch"]["ratio_to_members"] > 0


def test_what_confidence_adds(monkeypatch, capsys):
    flags = "--dim 32 --layers 1 --queries 8 --passages 200 --k 20 --members 3 --hidden 8"
    found = figures(monkeypatch, capsys, "confidence", flags + " --vocab_size 50 --repeats 2")
    assert set(found) == {"encode", "search", "confidence"}
    assert found["confidence"]["share_of_the_others"] > 0
