"""benchmarks/train_step.py runs at toy size and prints what it promises."""

import json
import sys

import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow

TOY = (
    "--layers 3 --embed_dim 8 --heads 2 --mlp_dim 16 --vocab_size 20 --queries 4 --query_length 4"
    " --passages 8 --passage_length 6 --matmul_size 16 --repeats 1 --variants dpr taser"
    " --dropout 0 --torch_compile"
)


@pytest.fixture
def train_step():
    return load_script("train_step.py")


@pytest.mark.release
def test_it_prints_a_line_a_figure(train_step, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_step.py", *TOY.split(), "--profile", str(tmp_path)])
    compiled = []
    # PyTorch's compiler would take longer than all the rest.
    monkeypatch.setattr("torch.compile", lambda module: compiled.append(module) or module)
    traced = []

    def time_by_kind(step, folder, program):
        # test_profile_table.py traces, in a process of its own.
        step()
        traced.append((folder, "dot(" in program))
        return [Row(Kind.PRODUCTS, 3.0, 2), Row(Kind.GELU, 1.0, 1)]

    monkeypatch.setattr(train_step, "time_by_kind", time_by_kind)
    Row, Kind = sys.modules["profile_table"].Row, sys.modules["profile_table"].Kind
    train_step.main()
    assert traced == [(tmp_path / "dpr", True), (tmp_path / "taser", True)]
    assert len(compiled) == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines[:4]] == ["matmul peak", "torch", "dpr", "taser"]
    peak, torch, dpr, taser = lines[:4]
    assert peak["gigaflops"] > 0
    # The same model on both sides, to the last parameter.
    assert dpr["parameters"] == torch["parameters"]
    assert torch["ratio_to_torch"] == [1, 1, 1]
    assert dpr["ratio_to_torch"][1] == pytest.approx(
        dpr["milliseconds"] / torch["milliseconds"], rel=0.05
    )
    assert taser["state_ratio_to_dpr"] == pytest.approx(
        taser["parameters"] / dpr["parameters"], abs=1e-4
    )
    # Arguments alone: parameters and two moments.
    assert dpr["peak_bytes"] > 12 * dpr["parameters"]
    assert dpr["mfu"] > 0
    for variant in ("dpr", "taser"):
        profile = [line for line in lines[4:] if line["variant"] == variant]
        assert [line["kind"] for line in profile] == ["matrix products", "fusions with GELU (erf)"]
        assert [line["share"] for line in profile] == [0.75, 0.25]
