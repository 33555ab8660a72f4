r"""What length buckets, frozen blocks and their cached states save of a training step.

    python benchmarks/affordable_step.py --buckets 32 64 128 256 --train_from_block 3

A token store of random words is made, with lengths spread as kilt_mini's passages are (median 50
tokens, 5% above 230), and a TASER of MiniLM's size trains on its batches. Prints one JSON line a
figure: `states` is what making the states of all texts took; each variant's line has the medians of
rounds in which the variants take turns, their ratio to full padding, and the share of padding:

    padded      all texts to the token store's length
    buckets     length_buckets
    frozen      with train_from_block
    states      with states_dir
    bfloat16    buckets, with ACTIVATION_DTYPE=bfloat16
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from side_by_side import in_turns, machine, show

from taser_jax.assembly.text_sources import frozen_texts
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig, Padding
from taser_jax.data.token_store.store import TokenStore, TokenStoreMetadata
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.models.batch import Batch
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.optim.optimizers import OptimizerConfig, Update, build_optimizer, trainable
from taser_jax.retrieval.embeddings import EmbeddingDtype
from taser_jax.training.state import init_state
from taser_jax.training.step import make_train_step

VARIANTS = ("padded", "buckets", "frozen", "states", "bfloat16")
_VOCAB, _TASK = 30522, "task"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 6), ("embed_dim", 384), ("heads", 12), ("mlp_dim", 1536), ("queries", 16),
        ("negatives", 1), ("query_length", 32), ("passage_length", 256), ("passages", 512),
        ("train_from_block", 3), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--buckets", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    return parser.parse_args()


def write_store(directory: pathlib.Path, arguments: argparse.Namespace) -> TokenStore:
    """Random words; a query has a random positive and five hard negatives."""
    rng = np.random.default_rng(0)
    count = arguments.passages

    def texts(median: int, longest: int) -> list[list[int]]:
        lengths = np.clip(median * rng.lognormal(0, 0.95, count), 3, longest).astype(int)
        return [rng.integers(5, _VOCAB, length).tolist() for length in lengths]

    about = TokenStoreMetadata(
        collection="random words",
        collection_fingerprint="random words",
        vocabulary_fingerprint="random words",
        vocabulary_size=_VOCAB,
        query_length=arguments.query_length,
        passage_length=arguments.passage_length,
    )
    writer = TokenStoreWriter(directory, about)
    writer.write_passages(texts(50, arguments.passage_length), count=count)
    writer.write_queries(
        _TASK,
        "train",
        query_ids=[str(i) for i in range(count)],
        tokens=texts(12, arguments.query_length),
        positives=[[row] for row in rng.permutation(count).tolist()],
        hard_negatives=rng.integers(0, count, (count, 5)).tolist(),
    )
    return writer.finish()


def make_step(
    name: str, arguments: argparse.Namespace, store: TokenStore, states_dir: str
) -> tuple[Callable[[], object], Batch]:
    """A step of one variant, compiled and warm, and its batch."""
    bert = BertConfig(
        vocab_size=_VOCAB, embed_dim=arguments.embed_dim, num_layers=arguments.layers,
        num_heads=arguments.heads, head_dim=arguments.embed_dim // arguments.heads,
        mlp_dim=arguments.mlp_dim, dtype="bfloat16" if name == "bfloat16" else "float32",
    )  # fmt: skip
    config = DualEncoderConfig(bert, ExpertConfig(num_experts=2), pooling=Pooling.MEAN)
    blocks = arguments.train_from_block if name in ("frozen", "states") else 0
    model = DualEncoder(config, frozen_blocks=blocks)
    initialise = functools.partial(init_params, model)
    shapes = jax.eval_shape(initialise, jax.random.key(0))
    frozen = config.frozen_parameters(blocks) if blocks else "none"
    updates = ((frozen, Update.FREEZE), (f"(?!{frozen}$).*", Update.TRAIN)) if blocks else None
    adam = OptimizerConfig(learning_rate=1e-5, updates=updates)
    optimizer = build_optimizer(adam, shapes, total_steps=10**6)
    state = init_state(initialise, optimizer, jax.random.key(0))

    queries = {_TASK: store.queries(_TASK, "train")}
    batching = BatchingConfig(arguments.queries, num_negatives=arguments.negatives)
    padding = Padding(() if name == "padded" else tuple(arguments.buckets))
    stream = BatchStream(store, queries, batching, padding=padding)
    if name == "states":
        began = time.monotonic()
        cached = frozen_texts(
            states_dir, dtype=EmbeddingDtype.BFLOAT16, model=model, params=state.params,
            store=store, queries=list(queries.values()),
        )  # fmt: skip
        seconds = time.monotonic() - began
        tokens = int(store.passages.lengths.sum() + queries[_TASK].lengths.sum())
        show({"figure": "states", "seconds": seconds, "tokens": tokens})
        stream = stream.on_texts(cached)
    batch = stream.batch(0)
    step = make_train_step(model, optimizer, trainable=trainable(adam, shapes))
    box, placed = [state], {_TASK: jax.device_put(batch)}

    def once() -> None:
        box[0], metrics = step(box[0], placed)
        if metrics["skipped"]:
            raise FloatingPointError(f"{name}: the loss is not finite")
        jax.block_until_ready(box[0])

    began = time.monotonic()
    once()
    show({"figure": "first step, with compilation", "variant": name,
          "seconds": time.monotonic() - began})  # fmt: skip
    return once, batch


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(pathlib.Path(directory) / "tokens", arguments)
        made = {
            name: make_step(name, arguments, store, f"{directory}/states")
            for name in arguments.variants
        }
        show({"figure": "machine", **machine("flax", "optax")})
        times = in_turns(
            {name: once for name, (once, _) in made.items()}, repeats=arguments.repeats
        )
    first = times[arguments.variants[0]]
    for name, variant_times in times.items():
        batch = made[name][1]
        tokens = sum(int(np.sum(texts.mask)) for texts in batch.texts)
        show({
            "figure": "step", "variant": name,
            "seconds": statistics.median(variant_times.wall),
            "cpu_seconds": statistics.median(variant_times.cpu),
            "ratio": statistics.median(variant_times.wall) / statistics.median(first.wall),
            "cpu_ratio": statistics.median(variant_times.cpu) / statistics.median(first.cpu),
            "padding": 1 - tokens / batch.tokens,
        })  # fmt: skip


if __name__ == "__main__":
    main()
