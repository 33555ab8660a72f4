"""Benchmarks that time steps and encoding run at toy size and print what they promise."""

import json
import sys

import pytest
from script_calls import load_script, run_python

pytestmark = pytest.mark.slow


@pytest.fixture
def printed(monkeypatch, capsys):
    """Runs a script in this process; what it prints, line by line."""

    def run(script, flags):
        monkeypatch.setattr(sys, "argv", [script, *flags.split()])
        module = load_script(script)
        module.main()
        return module, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def figures(lines):
    return [line["figure"] for line in lines]


@pytest.fixture
def compiled(monkeypatch):
    """What PyTorch's compiler is given, which would take longer than all the rest."""
    given = []
    monkeypatch.setattr("torch.compile", lambda module: given.append(module) or module)
    monkeypatch.setattr(
        "sentence_transformers.SentenceTransformer.compile",
        lambda model, **options: given.append(options),
    )
    return given


@pytest.mark.release
def test_a_train_step(printed, compiled):
    flags = (
        "--layers 3 --embed_dim 8 --heads 2 --mlp_dim 16 --vocab_size 20 --queries 4"
        " --query_length 4 --passages 8 --passage_length 6 --matmul_size 16 --repeats 1"
        " --variants dpr taser --dropout 0 --torch_compile"
    )
    _, lines = printed("train_step.py", flags)
    assert len(compiled) == 2
    assert figures(lines) == ["matmul peak", "torch", "dpr", "taser"]
    _, torch, dpr, _ = lines
    # The same model on both sides, to the last parameter.
    assert dpr["parameters"] == torch["parameters"]
    assert torch["ratio_to_torch"] == [1, 1, 1]
    # Arguments alone: parameters and two moments.
    assert dpr["peak_bytes"] > 12 * dpr["parameters"]


ENCODE = (
    "--layers 1 --embed_dim 8 --heads 2 --mlp_dim 16 --vocab_size 30 --passages 20"
    " --median_length 6 --max_length 16 --length_multiple 8 --batch_tokens 64"
    " --torch_batch_size 4 --repeats 1 --matmul_size 64 --torch_compile"
)


def test_both_sides_encode_the_same(printed, compiled):
    module, lines = printed("encode.py", ENCODE)
    assert compiled == [{"dynamic": True}]
    assert figures(lines) == ["agreement", "matmul peak", "torch", "ours"]
    agreement, peak, torch, ours = lines
    assert agreement["largest_difference"] < 1e-4
    # The same passages on both sides; padding is computed too.
    arguments = module.parse()
    config = module.model_config(arguments)
    lengths = module.make_passages(arguments).lengths.tolist()
    real = sum(sum(config.block_flops(length)) for length in lengths)
    for side in (ours, torch):
        seconds = side["milliseconds"] / 1e3
        assert side["mfu"] == pytest.approx(real / 1e9 / seconds / peak["gigaflops"], abs=1e-4)
        assert side["mfu"] <= side["mfu_padded"]
    assert 0.4 < ours["real_share_of_positions"] < torch["real_share_of_positions"] <= 1


def test_a_step_of_all_members(printed):
    flags = "--members 3 --dim 8 --hidden 4 --batch 4 --passages 50 --repeats 2"
    _, lines = printed("ensemble_step.py", flags)
    assert set(figures(lines)) == {"one", "members", "batches", "torch"}


@pytest.mark.release
def test_a_multitask_step(printed):
    flags = (
        "--layers 1 --embed_dim 8 --heads 1 --head_dim 8 --mlp_dim 16 --vocab_size 64 --num_tasks 2"
        " --batch_share 0.1 --passage_length 6 --max_query_length 5 --steps 1"
        " --bandwidth_megabytes 1 --methods plain tsage --parts"
    )
    _, lines = printed("multitask_step.py", flags)
    assert figures(lines) == ["bandwidth", "plain", "tsage", "tsage alone"]
    _, plain, tsage, _ = lines
    # Adam has two moments; T-SAGE's average is two tasks more.
    parameters = plain["parameters"]
    assert plain["state_bytes"] == pytest.approx(8 * parameters, rel=0.02)
    assert tsage["state_bytes"] - plain["state_bytes"] == pytest.approx(8 * parameters, rel=0.02)


def test_traffic_by_hand():
    """10 parameters, 2 tasks: a stack of gradients is 80 bytes, a vector 40."""
    traffic = load_script("multitask_step.py").traffic_bytes
    sizes = {"tasks": 2, "parameters": 10}
    assert traffic("plain", passes=0, **sizes) == 0
    assert traffic("pcgrad", passes=0, **sizes) == 80 + 80 + 80 + 40
    # Stack, three passes of 120, then gradients, averages twice, parameters and the combined one.
    assert traffic("tsage", passes=3, **sizes) == 80 + 360 + (80 + 2 * 80 + 2 * 40)


def test_cached_states_are_the_same_queries():
    sizes = ("--layers=1", "--embed_dim=64", "--query_length=8", "--document_length=16")
    out = run_python("query_encoding.py", *sizes, "--batch=2", "--documents=3", "--repeats=1")
    lines = {line.pop("figure"): line for line in map(json.loads, out.splitlines())}
    assert lines["agreement of cached states"]["largest_difference"] < 1e-4
    flops = [lines[name]["gigaflops"] for name in ("plain queries", "fused queries")]
    assert lines["FLOPs of fused over plain"]["ratio"] == pytest.approx(flops[1] / flops[0], 1e-3)
