"""What documents cost a query: MoMA's T5 on plain and fused queries, in turns, beside the formulas.

    python benchmarks/query_encoding.py [--documents 10] [--embed_dim 256] ...

Four sides: queries alone; each with K documents; each with the cached states of its documents,
which depend on no question; and the documents alone, as `taser encode` encodes them. Prints one
JSON line a figure: the machine, each side's milliseconds and FLOPs, and ratios beside what is
aimed for.
"""

from __future__ import annotations

import argparse
import statistics

import jax
import numpy as np
from side_by_side import in_turns, machine, show

from taser_jax.models.batch import Augmented, DocumentsShape, Role, States, Tokens
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.fusion import T5FusionConfig
from taser_jax.models.parameters import init_params
from taser_jax.models.t5 import T5Config


def main() -> None:
    """Measures and prints."""
    arguments = parse()
    show({"figure": "machine", **machine(), **vars(arguments)})
    config = T5FusionConfig(
        t5=T5Config(
            vocab_size=1000,
            embed_dim=arguments.embed_dim,
            num_layers=arguments.layers,
            num_decoder_layers=arguments.layers,
            num_heads=arguments.embed_dim // 64,
            head_dim=64,
            mlp_dim=4 * arguments.embed_dim,
            dropout_rate=0.0,
        )
    )
    batch, count, length = arguments.batch, arguments.documents, arguments.document_length
    model, cached_model = DualEncoder(config), DualEncoder(config, arguments.layers)
    params = init_params(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    queries = _tokens(rng, batch, arguments.query_length)
    documents = _tokens(rng, batch * count, length)
    present = np.ones((batch, count), bool)

    def by_query(texts: Tokens | States) -> Tokens | States:
        return jax.tree.map(lambda a: a.reshape(batch, count, *a.shape[1:]), texts)

    def encode(module: DualEncoder, role: Role):
        return jax.jit(
            lambda texts: module.apply({"params": params}, texts, role=role, method="encode")
        )

    states = jax.jit(
        lambda texts: cached_model.apply(
            {"params": params}, texts, role=Role.QUERY, method="states"
        )
    )(documents)
    query, passage = encode(model, Role.QUERY), encode(model, Role.PASSAGE)
    cached = encode(cached_model, Role.QUERY)
    fused_texts = Augmented(queries, by_query(documents), present)
    cached_texts = Augmented(queries, by_query(states), present)
    calls = {
        "plain queries": lambda: jax.block_until_ready(query(queries)),
        "fused queries": lambda: jax.block_until_ready(query(fused_texts)),
        "fused queries, cached states": lambda: jax.block_until_ready(cached(cached_texts)),
        "documents alone": lambda: jax.block_until_ready(passage(documents)),
    }
    agreement = np.abs(
        np.asarray(calls["fused queries"]().embeddings)
        - np.asarray(calls["fused queries, cached states"]().embeddings)
    ).max()
    show({"figure": "agreement of cached states", "largest_difference": float(agreement)})
    for call in calls.values():
        call()
    times = in_turns(calls, repeats=arguments.repeats)
    memory = DocumentsShape(count, length)
    flops = {
        "plain queries": batch * sum(config.block_flops(arguments.query_length)),
        "fused queries": batch * sum(config.query_flops(arguments.query_length, memory)),
        "documents alone": batch * count * sum(config.block_flops(length)),
    }
    milliseconds = {
        name: 1e3 * statistics.median(call_times.wall) for name, call_times in times.items()
    }
    for name, value in milliseconds.items():
        show({"figure": name, "milliseconds": value, "gigaflops": flops.get(name, 0) / 1e9})
    tokens = batch * (count * length + arguments.query_length)
    speeds = {
        "fused": tokens / milliseconds["fused queries"],
        "documents": batch * count * length / milliseconds["documents alone"],
    }
    plain = "plain queries"
    for figure, ratio, aim in (
        ("FLOPs of fused over plain", flops["fused queries"] / flops[plain], None),
        ("time of fused over plain", milliseconds["fused queries"] / milliseconds[plain], None),
        ("tokens per second of fused over documents", speeds["fused"] / speeds["documents"], 0.9),
        (
            "time of cached over plain",
            milliseconds["fused queries, cached states"] / milliseconds[plain],
            1.5,
        ),
    ):
        show({"figure": figure, "ratio": ratio, "aim": aim})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("batch", 8),
        ("documents", 10),
        ("query_length", 32),
        ("document_length", 128),
        ("layers", 4),
        ("embed_dim", 256),
        ("repeats", 9),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def _tokens(rng: np.random.Generator, count: int, length: int) -> Tokens:
    ids = rng.integers(1, 1000, (count, length)).astype(np.int32)
    return Tokens(ids, np.ones((count, length), bool))


if __name__ == "__main__":
    main()
