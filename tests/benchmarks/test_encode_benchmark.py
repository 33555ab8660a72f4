"""benchmarks/encode.py runs at toy size, and its two sides compute the same embeddings."""

import json
import sys

import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow

TOY = (
    "--layers 1 --embed_dim 8 --heads 2 --mlp_dim 16 --vocab_size 30 --passages 20"
    " --median_length 6 --max_length 16 --length_multiple 8 --batch_tokens 64"
    " --torch_batch_size 4 --repeats 1 --matmul_size 64 --torch_compile"
)


def real_flops(module) -> int:
    arguments = module.parse()
    lengths = module.make_passages(arguments).lengths.tolist()
    config = module.model_config(arguments)
    return sum(config.forward_flops(batch_size=1, length=length) for length in lengths)


@pytest.fixture
def benchmark():
    return load_script("encode.py")


def test_both_sides_compute_the_same(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["encode.py", *TOY.split()])
    compiled = []
    # PyTorch's compiler would take longer than all the rest.
    monkeypatch.setattr(
        "sentence_transformers.SentenceTransformer.compile",
        lambda model, **options: compiled.append(options),
    )
    benchmark.main()
    assert compiled == [{"dynamic": True}]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["figure"] for line in lines] == ["agreement", "matmul peak", "torch", "ours"]
    agreement, peak, torch, ours = lines
    assert agreement["largest_difference"] < 1e-4
    assert torch["ratio_to_torch"] == [1, 1, 1]
    assert ours["ratio_to_torch"][1] == pytest.approx(
        ours["milliseconds"] / torch["milliseconds"], rel=0.05
    )
    # The same passages on both sides; padding is computed too.
    for side in (ours, torch):
        seconds = side["milliseconds"] / 1e3
        gigaflops = real_flops(benchmark) / 1e9
        assert side["mfu"] == pytest.approx(gigaflops / seconds / peak["gigaflops"], abs=1e-4)
        assert side["mfu"] <= side["mfu_padded"]
    assert ours["mfu_padded"] > ours["mfu"]
    assert 0.4 < ours["real_share_of_positions"] < torch["real_share_of_positions"] <= 1
