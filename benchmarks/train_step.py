r"""A training step of ours and of PyTorch: time, memory, DPR beside TASER.

    python benchmarks/train_step.py --preset cpu                  # MiniLM's size
    python benchmarks/train_step.py --preset cpu --dropout 0
    python benchmarks/train_step.py --preset gpu                  # BERT-base, bfloat16

Needs jax, flax, optax, numpy, and torch and transformers for the other side (`--sides ours` does
without). The same step on both sides: DPR's two encoders, queries and passages, in-batch negatives,
AdamW; shapes, batch, lengths, precision and dropout are equal. PyTorch runs transformers' BertModel
with scaled-dot-product attention, fused AdamW, and `torch.compile` in the gpu preset or with
`--torch_compile`. Prints one JSON line a figure:

    matmul peak   FLOPs per second of a large product in the step's precision
    <variant>     medians over rounds in which the variants take turns of two steps, the second of
                  which counts, and least, median and most of the rounds' ratios to PyTorch's;
                  bytes of parameters, gradients and moments, and peak memory: the compiler's for
                  ours (arguments and scratch), the allocator's for PyTorch (on a CPU, growth of
                  the process); of ours also the seconds of compiling. `mfu` is model FLOPs per
                  second over the matmul peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from side_by_side import (
    PeakResident,
    Times,
    bert_config,
    in_turns,
    machine,
    matmul_peak,
    parse_with_presets,
    show,
    spread,
)

from taser_jax.models.batch import Batch, Tokens
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.stack import Remat, Scan
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.training.state import init_state
from taser_jax.training.step import make_train_step

_LEARNING_RATE, _WEIGHT_DECAY = 1e-5, 0.01
# A warm-up outlasts both runs: the rate is that of the first steps, and PyTorch's is constant.
_TOTAL_STEPS = 10**6
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "layers": 6, "embed_dim": 384, "heads": 12, "mlp_dim": 1536, "vocab_size": 30522,
        "queries": 16, "query_length": 32, "passages": 32, "passage_length": 128,
        "dtype": "float32", "attention": "einsum", "dropout": 0.1, "repeats": 5,
        "matmul_size": 2048, "chunks": 4, "torch_compile": False,
    },
    "gpu": {
        "layers": 12, "embed_dim": 768, "heads": 12, "mlp_dim": 3072, "vocab_size": 30522,
        # Each side keeps the memory it has had: for 140 GB. Of 80, half the batch, or --sides.
        "queries": 256, "query_length": 32, "passages": 512, "passage_length": 256,
        "dtype": "bfloat16", "attention": "cudnn", "dropout": 0.0, "repeats": 10,
        "matmul_size": 8192, "chunks": 4, "torch_compile": True,
    },
}  # fmt: skip
VARIANTS = (
    *("dpr", "taser", "dpr_remat", "dpr_chunks", "taser_remat", "taser_chunks"),
    *("dpr_scan", "taser_scan"),
)


@dataclasses.dataclass
class Variant:
    """One side's step, compiled and warm.

    Attributes:
        step: does one step.
        parameters: number of trained numbers.
        peak_bytes: most memory taken, parameters and moments included.
        compile_seconds: of tracing, lowering and compiling; None for PyTorch.
        flops: of the model, a step; None for PyTorch, whose model is DPR's.
    """

    step: Callable[[], object]
    parameters: int
    peak_bytes: int
    compile_seconds: float | None = None
    flops: int | None = None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--torch_checkpointing", action="store_true", help="recomputes blocks")
    return parse_with_presets(parser, PRESETS)


def make_batch(arguments: argparse.Namespace) -> Batch:
    """Texts of half to full length; query i's positive is passage i·passages/queries."""
    rng = np.random.default_rng(0)

    def tokens(rows: int, length: int) -> Tokens:
        ids = rng.integers(2, arguments.vocab_size, (rows, length)).astype(np.int32)
        lengths = rng.integers(-(-length // 2), length + 1, (rows, 1))
        mask = np.arange(length) < lengths
        return Tokens(ids * mask, mask)

    queries, passages = arguments.queries, arguments.passages
    return Batch(
        queries=tokens(queries, arguments.query_length),
        passages=tokens(passages, arguments.passage_length),
        positive_index=np.arange(queries, dtype=np.int32) * (passages // queries),
        ignore=np.zeros((queries, passages), bool),
        query_rows=np.arange(queries, dtype=np.int32),
        passage_rows=np.arange(passages, dtype=np.int32),
    )


def model_config(name: str, arguments: argparse.Namespace) -> DualEncoderConfig:
    bert = bert_config(
        arguments,
        dropout_rate=arguments.dropout,
        attention_dropout_rate=arguments.dropout,
        remat=Remat.BLOCK if name.endswith("remat") else Remat.NONE,
        scan=Scan.BLOCKS if name.endswith("scan") else Scan.NONE,
    )
    if name.startswith("taser"):
        return DualEncoderConfig(bert=bert, experts=ExpertConfig(num_experts=2))
    return DualEncoderConfig(bert=bert, towers=Towers.SEPARATE)


def our_variant(name: str, arguments: argparse.Namespace, batch: Batch) -> Variant:
    """The step of `taser train`, compiled; state donated from step to step."""
    config = model_config(name, arguments)
    model = DualEncoder(config)
    initialise = functools.partial(init_params, model)
    shapes = jax.eval_shape(initialise, jax.random.key(0))
    adam = OptimizerConfig(learning_rate=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, clip_norm=None)
    optimizer = build_optimizer(adam, shapes, total_steps=_TOTAL_STEPS)
    chunks = arguments.chunks if name.endswith("chunks") else 1
    batch = jax.device_put(batch)
    state = init_state(initialise, optimizer, jax.random.key(0))
    step = make_train_step(model, optimizer, num_chunks=chunks)
    start = time.perf_counter()
    compiled = step.lower(state, {"nq": batch}).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    box = [state]

    def once() -> None:
        box[0], metrics = compiled(box[0], (batch,))
        if metrics["skipped"]:
            raise FloatingPointError(f"{name}: a loss or gradient is not finite")
        jax.block_until_ready(box[0])

    once()
    return Variant(
        step=once,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        peak_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        compile_seconds=compile_seconds,
        flops=config.training_flops(batch),
    )


def torch_variant(arguments: argparse.Namespace, batch: Batch) -> Variant:
    """Two BertModels, sdpa attention, fused AdamW, autocast where the precision is bfloat16."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.BertConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.embed_dim,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        intermediate_size=arguments.mlp_dim,
        hidden_dropout_prob=arguments.dropout,
        attention_probs_dropout_prob=arguments.dropout,
        attn_implementation="sdpa",
    )
    towers = torch.nn.ModuleList(
        transformers.BertModel(config, add_pooling_layer=False) for _ in range(2)
    )
    towers.train().to(device)
    if arguments.torch_checkpointing:
        for tower in towers:
            tower.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        towers.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, fused=True
    )
    encoders = [torch.compile(tower) if arguments.torch_compile else tower for tower in towers]

    def tensors(tokens: Tokens) -> dict[str, Any]:
        ids, mask = (torch.from_numpy(np.asarray(x)).long() for x in (tokens.ids, tokens.mask))
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    sides = [tensors(batch.queries), tensors(batch.passages)]
    labels = torch.from_numpy(np.asarray(batch.positive_index)).long().to(device)
    bfloat16 = arguments.dtype == "bfloat16"

    def once() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            queries, passages = (
                encoder(**side).last_hidden_state[:, 0].float()
                for encoder, side in zip(encoders, sides, strict=True)
            )
        loss = torch.nn.functional.cross_entropy(queries @ passages.T, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    parameters = sum(parameter.numel() for parameter in towers.parameters())
    with PeakResident() as peak:
        once()
        if device == "cuda":
            # The first step compiles, which takes memory of its own, and makes the moments.
            torch.cuda.reset_peak_memory_stats()
        once()
    peak_bytes = 4 * parameters + peak.bytes
    if device == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()
    return Variant(once, parameters, peak_bytes)


def main() -> None:
    arguments = parse()
    batch = make_batch(arguments)
    packages = ("flax", "optax", *(("torch", "transformers") if "torch" in arguments.sides else ()))
    about = {"benchmark": "train_step", "preset": arguments.preset}
    about |= {name: getattr(arguments, name) for name in PRESETS["cpu"]}
    about |= machine(*packages)
    peak = matmul_peak(arguments.matmul_size, arguments.dtype)
    show(about | {"figure": "matmul peak", "gigaflops": peak / 1e9})

    variants = {}
    if "torch" in arguments.sides:
        variants["torch"] = torch_variant(arguments, batch)
    if "ours" in arguments.sides:
        for name in arguments.variants:
            variants[name] = our_variant(name, arguments, batch)
    steps = {name: variant.step for name, variant in variants.items()}
    times = in_turns(steps, repeats=arguments.repeats, uncounted=1)
    for name in variants:
        show(about | {"figure": name} | figures(name, variants, times, peak))


def figures(
    name: str, variants: dict[str, Variant], times: dict[str, Times], peak: float
) -> dict[str, Any]:
    """What is said of one variant."""
    variant = variants[name]
    figure: dict[str, Any] = {
        "parameters": variant.parameters,
        # Float32 each: parameters, gradients and two moments.
        "state_bytes": 16 * variant.parameters,
        "peak_bytes": variant.peak_bytes,
        **times[name].figures(times.get("torch")),
    }
    if variant.flops is not None:
        figure["compile_seconds"] = variant.compile_seconds
        figure["mfu"] = variant.flops / (figure["milliseconds"] / 1e3) / peak
    dpr = name.replace("taser", "dpr")
    if dpr != name and dpr in variants:
        figure["state_ratio_to_dpr"] = variant.parameters / variants[dpr].parameters
        figure["ratio_to_dpr"] = spread(times[name].wall, times[dpr].wall)
        figure["cpu_ratio_to_dpr"] = spread(times[name].cpu, times[dpr].cpu)
    return figure


if __name__ == "__main__":
    main()
