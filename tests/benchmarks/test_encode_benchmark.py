"""benchmarks/encode.py runs at toy size, and its two sides compute the same embeddings."""

import importlib.util
import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
TOY = (
    "--layers 1 --embed_dim 8 --heads 2 --mlp_dim 16 --vocab_size 30 --passages 20"
    " --median_length 6 --max_length 16 --length_multiple 8 --batch_tokens 64"
    " --torch_batch_size 4 --repeats 1"
)


def test_both_sides_compute_the_same(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("encode_benchmark", FOLDER / "encode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["encode.py", *TOY.split()])
    module.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines] == ["agreement", "torch", "ours"]
    agreement, torch, ours = lines
    assert agreement["largest_difference"] < 1e-4
    assert torch["ratio_to_torch"] == 1
    assert ours["ratio_to_torch"] == pytest.approx(
        ours["milliseconds"] / torch["milliseconds"], rel=0.05
    )
    assert 0.4 < ours["real_share_of_positions"] < torch["real_share_of_positions"] <= 1
