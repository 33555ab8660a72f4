"""How fast batches are made: prints one JSON line a figure, with the machine it ran on.

    python benchmarks/input_pipeline.py                      # a synthetic token store
    python benchmarks/input_pipeline.py --token_store DIR    # the training queries of a real one

`rows` is the drawing of rows with the false-negative mask, `batch` adds the gathering of tokens,
`prefetched` is what a training loop sees: batches put on the device by the prefetching thread.
Tokens are counted with their padding.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np

from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives, PositiveChoice, prefetch
from taser_jax.data.token_store.store import TokenStore, TokenStoreMetadata
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.storage.progress import track


def write_synthetic_store(directory: pathlib.Path, *, passages: int, queries: int) -> TokenStore:
    """Passages of 256 tokens, queries of 32 with up to 5 positives and 50 hard negatives."""
    rng = np.random.default_rng(0)
    about = TokenStoreMetadata(
        collection="synthetic",
        collection_fingerprint="synthetic",
        vocabulary_fingerprint="synthetic",
        vocabulary_size=30522,
        query_length=32,
        passage_length=256,
    )
    writer = TokenStoreWriter(directory, about)
    lengths = rng.integers(100, 257, passages)
    token_lists = (rng.integers(1, 30522, length) for length in lengths)
    writer.write_passages(track(token_lists, "passages", total=passages), count=passages)
    writer.write_queries(
        "synthetic",
        "train",
        query_ids=[str(i) for i in range(queries)],
        tokens=[rng.integers(1, 30522, length) for length in rng.integers(5, 33, queries)],
        positives=[rng.integers(0, passages, count) for count in rng.integers(1, 6, queries)],
        hard_negatives=[rng.integers(0, passages, 50) for _ in range(queries)],
    )
    return writer.finish()


def report(name: str, run: Callable[[int], int], *, steps: int, config: BatchingConfig) -> None:
    """Times `run(steps)`, which returns the tokens it made."""
    run(2)
    start = time.perf_counter()
    tokens = run(steps)
    seconds = time.perf_counter() - start
    figure = {
        "benchmark": "input_pipeline",
        "figure": name,
        "queries": config.batch_size,
        "passages": config.batch_size * (1 + config.num_negatives),
        "false_negatives": config.false_negatives.value,
        "batches_per_second": round(steps / seconds, 1),
        "milliseconds_per_batch": round(1000 * seconds / steps, 3),
        **({"tokens_per_second": round(tokens / seconds)} if tokens else {}),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }
    print(json.dumps(figure), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--token_store", help="measure this store instead of a synthetic one")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--num_negatives", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--passages", type=int, default=100_000, help="of the synthetic store")
    parser.add_argument("--queries", type=int, default=20_000, help="of the synthetic store")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.token_store:
            store = TokenStore.open(arguments.token_store)
        else:
            store = write_synthetic_store(
                pathlib.Path(directory), passages=arguments.passages, queries=arguments.queries
            )
        tasks = {t: store.queries(t, "train") for t, s in store.tasks.items() if "train" in s}
        partitioner = Partitioner(make_mesh(MeshConfig()))
        for false_negatives in FalseNegatives:
            config = BatchingConfig(
                arguments.batch_size,
                arguments.num_negatives,
                false_negatives=false_negatives,
                positives=PositiveChoice.FIRST,
            )
            measure(BatchStream(store, tasks, config), partitioner, arguments.steps)


def measure(stream: BatchStream, partitioner: Partitioner, steps: int) -> None:
    """All figures of one stream."""

    def rows(count: int) -> int:
        for step in range(count):
            stream.rows(step)
        return 0

    def batches(count: int) -> int:
        made = (stream.batch(step) for step in range(count))
        return sum(batch.queries.ids.size + batch.passages.ids.size for batch in made)

    def prefetched(count: int) -> int:
        tokens = 0
        for _, batch in prefetch(stream.batch, 0, count, partitioner.put_batch):
            jax.block_until_ready(batch)
            tokens += batch.queries.ids.size + batch.passages.ids.size
        return tokens

    for name, run in (("rows", rows), ("batch", batches), ("prefetched", prefetched)):
        report(name, run, steps=steps, config=stream.config)


if __name__ == "__main__":
    main()
