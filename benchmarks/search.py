"""Exact search against ScaNN: recall, queries per second, build time and memory.

Run `python benchmarks/search.py --passages 200000 --dim 128`, or with `--embeddings DIR` and
`--queries FILE.npy` on embeddings of your own. Prints one JSON line a figure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import tempfile
import time

import jax
import numpy as np

from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import EmbeddingRows, ExactSearcher, Searcher, measure_recall
from taser_jax.retrieval.scann import ScannConfig, Structure, build_scann


class Synthetic:
    """Clustered points: neighbours differ in score as those of real embeddings do."""

    def __init__(self, num_passages: int, dim: int, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 1])
        self._centres = self._rng.standard_normal((max(num_passages // 100, 1), dim))
        self._array = self.near(num_passages)
        self.shape = (num_passages, dim)

    def near(self, count: int) -> np.ndarray:
        """Points near random centres: [count, dim]."""
        centres = self._centres[self._rng.integers(0, len(self._centres), count)]
        points = centres + 0.5 * self._rng.standard_normal((count, self._centres.shape[1]))
        return points.astype(np.float32)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Embeddings of consecutive rows."""
        return self._array[rows]


def machine() -> dict[str, object]:
    """The hardware and versions a figure belongs to."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "numpy", "scann")},
    }


def queries_per_second(searcher: Searcher, queries: np.ndarray, k: int) -> float:
    """Best of three runs, after one that compiles and loads."""
    searcher.search(queries, k)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        searcher.search(queries, k)
        times.append(time.perf_counter() - began)
    return len(queries) / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--num_queries", type=int, default=2000)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--recall_target", type=float, default=0.95)
    parser.add_argument(
        "--structure", default="auto", choices=[structure.value for structure in Structure]
    )
    parser.add_argument("--shard_passages", type=int, default=ScannConfig.shard_passages)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--embeddings", help="a directory that `taser encode` finished")
    parser.add_argument("--queries", help="a .npy file of query embeddings, with --embeddings")
    arguments = parser.parse_args()
    if bool(arguments.embeddings) != bool(arguments.queries):
        parser.error("--embeddings and --queries go together")

    embeddings: EmbeddingRows
    if arguments.embeddings:
        embeddings = Embeddings(arguments.embeddings)
        queries = np.load(arguments.queries).astype(np.float32)
    else:
        synthetic = Synthetic(arguments.passages, arguments.dim, arguments.seed)
        embeddings, queries = synthetic, synthetic.near(2 * arguments.num_queries)
    # Effort is chosen on one half of the queries and the figures come from the other.
    held_out, sample = np.array_split(queries, 2)
    setting = {
        "data": arguments.embeddings or "synthetic clusters",
        "passages": embeddings.shape[0],
        "dim": embeddings.shape[1],
        "queries": len(held_out),
        "k": arguments.k,
    }

    def figure(name: str, value: float, unit: str, **more: object) -> None:
        line = {"figure": name, "value": round(value, 4), "unit": unit, **more}
        print(json.dumps({**line, **setting, **machine()}), flush=True)

    exact = ExactSearcher(embeddings)
    figure("exact search", queries_per_second(exact, held_out, arguments.k), "queries/s")
    expected = exact.search(held_out, arguments.k)

    config = ScannConfig(
        structure=Structure(arguments.structure),
        recall_k=arguments.k,
        recall_target=arguments.recall_target,
        shard_passages=arguments.shard_passages,
    )
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        scann = build_scann(
            embeddings, directory, fingerprints={}, config=config, sample_queries=sample
        )
        build_seconds = time.perf_counter() - began
        effort = {"leaves": scann.effort.leaves, "reorder": scann.effort.reorder}
        size = sum(path.stat().st_size for path in pathlib.Path(directory).rglob("*.*"))
        figure("ScaNN build and choice of effort", build_seconds, "s")
        figure("ScaNN size on disk", size / 2**20, "MiB")
        speed = queries_per_second(scann, held_out, arguments.k)
        figure("ScaNN search", speed, "queries/s", **effort)
        recall = measure_recall(scann.search(held_out, arguments.k), expected)
        figure(f"ScaNN recall@{arguments.k}", recall, "share of exact", **effort)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    figure("peak memory of both", peak, "MiB")


if __name__ == "__main__":
    main()
