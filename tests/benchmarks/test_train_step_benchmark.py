"""benchmarks/train_step.py runs at toy size and prints what it promises."""

import importlib.util
import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
TOY = (
    "--layers 3 --embed_dim 8 --heads 2 --mlp_dim 16 --vocab_size 20 --queries 4 --query_length 4"
    " --passages 8 --passage_length 6 --matmul_size 16 --repeats 1 --variants dpr taser"
)


@pytest.fixture
def train_step(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("train_step", FOLDER / "train_step.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, "train_step", module)
    spec.loader.exec_module(module)
    return module


def test_it_prints_a_line_a_figure(train_step, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_step.py", *TOY.split()])
    train_step.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines] == ["matmul peak", "torch", "dpr", "taser"]
    peak, torch, dpr, taser = lines
    assert peak["gigaflops"] > 0
    # The same model on both sides, to the last parameter.
    assert dpr["parameters"] == torch["parameters"]
    assert torch["ratio_to_torch"] == 1
    assert dpr["ratio_to_torch"] == pytest.approx(
        dpr["milliseconds"] / torch["milliseconds"], rel=0.05
    )
    assert taser["state_ratio_to_dpr"] == pytest.approx(
        taser["parameters"] / dpr["parameters"], abs=1e-4
    )
    # Arguments alone: parameters and two moments.
    assert dpr["peak_bytes"] > 12 * dpr["parameters"]
    assert dpr["mfu"] > 0


def test_presets_name_the_same_settings(train_step):
    assert train_step.PRESETS["cpu"].keys() == train_step.PRESETS["gpu"].keys()
