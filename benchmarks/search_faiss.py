"""Our exact and ScaNN search against FAISS (flat, IVF): recall, queries per second, build, memory.

    pip install "taser_jax[benchmarks]"
    python benchmarks/search_faiss.py --output_dir DIR

One million synthetic 768-d float32 vectors by default: points around centres (about 100 a centre),
in a space whose directions matter less and less, as in real embeddings; `--seed` names them. Each
system runs in a process of its own, so that its peak memory is its own, and appends its figures to
DIR/figures.jsonl, one JSON line each: a value, or the least, median and largest of some rounds, by
wall clock and by CPU time (which other jobs on the machine change less). Run again, what is there
is not measured again. Effort
(ScaNN's leaves and candidates, IVF's cells) is the least that finds `--recall_target` of the exact
top 100 for one half of the queries; all figures are of the other half.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

K = 100
SYSTEMS = ("exact", "faiss_flat", "faiss_ivf", "scann")
# FAISS asks for 39 training points a cell at least; more change little and cost much.
_TRAINING_POINTS_A_CELL = 128
_BLOCK = 65536
# Queries asked at once, beside all of them.
_BATCHES = (1, 64)

Search = Callable[[np.ndarray], np.ndarray]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--num_queries", type=int, default=1000, help="measured; as many tune")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recall_target", type=float, default=0.95)
    parser.add_argument("--cells", type=int, default=1024, help="of FAISS IVF")
    parser.add_argument("--training_passages", type=int, default=100_000, help="of ScaNN")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="measure one system in this process")
    return parser.parse_args()


def make_data(arguments: argparse.Namespace) -> None:
    """Writes passages.npy and queries.npy, block by block, where they are not there yet."""
    directory, dim = arguments.output_dir, arguments.dim
    if (directory / "queries.npy").exists():
        return
    rng = np.random.default_rng([arguments.seed, 768])
    scales = (1 / np.sqrt(1 + np.arange(dim) / 8)).astype(np.float32)
    num_centres = max(arguments.passages // 100, 1)
    centres = rng.standard_normal((num_centres, dim), np.float32)

    def near(count: int) -> np.ndarray:
        points = centres[rng.integers(0, num_centres, count)]
        return (points + 0.7 * rng.standard_normal((count, dim), np.float32)) * scales

    passages = np.lib.format.open_memmap(
        directory / "passages.npy", "w+", np.float32, (arguments.passages, dim)
    )
    for start in range(0, arguments.passages, _BLOCK):
        count = min(_BLOCK, arguments.passages - start)
        passages[start : start + count] = near(count)
    passages.flush()
    np.save(directory / "queries.npy", near(2 * arguments.num_queries))


def queries_per_second(
    search: Search, queries: np.ndarray, rounds: int
) -> dict[str, dict[str, float]]:
    """Unit -> least, median and largest number of queries a second, of so many rounds."""
    search(queries)
    rates: dict[str, list[float]] = {"queries/s": [], "queries/CPU s": []}
    for _ in range(rounds):
        began, cpu_began = time.perf_counter(), time.process_time()
        search(queries)
        rates["queries/s"].append(len(queries) / (time.perf_counter() - began))
        rates["queries/CPU s"].append(len(queries) / (time.process_time() - cpu_began))
    return {
        unit: {"min": min(each), "median": float(np.median(each)), "max": max(each)}
        for unit, each in rates.items()
    }


def peak_memory() -> int:
    """Bytes this process had resident at most, pages of the passages' file included."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    # Not `ru_maxrss`, which starts from that of the process which started this one.
    (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 2**10


def recall(retrieved: np.ndarray, expected: np.ndarray, k: int) -> float:
    """Share of the exact top k that is among the first k found."""
    pairs = zip(retrieved[:, :k].tolist(), expected[:, :k].tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / k for a, b in pairs]))


def build_exact(
    arguments: argparse.Namespace, vectors: np.ndarray
) -> tuple[Search, dict[str, Any]]:
    from taser_jax.retrieval.exact import ExactSearcher

    searcher = ExactSearcher(vectors)
    # Copies the passages to the device, where they stay.
    searcher.search(np.zeros((1, arguments.dim), np.float32), K)
    return lambda queries: searcher.search(queries, K).rows, {}


def scann_search(
    arguments: argparse.Namespace, vectors: np.ndarray
) -> tuple[Search, dict[str, Any]]:
    from taser_jax.retrieval.scann import ScannConfig, build_scann

    config = ScannConfig(
        recall_k=K,
        recall_target=arguments.recall_target,
        training_passages=arguments.training_passages,
        threads=arguments.threads,
    )
    searcher = build_scann(
        vectors,
        arguments.output_dir / "scann",
        fingerprints={},
        config=config,
        sample_queries=np.load(arguments.output_dir / "queries.npy")[arguments.num_queries :],
    )
    about = {
        "leaves": searcher.effort.leaves,
        "reorder": searcher.effort.reorder,
        "training_passages": arguments.training_passages,
    }
    return lambda queries: searcher.search(queries, K).rows, about


def build_faiss_flat(
    arguments: argparse.Namespace, vectors: np.ndarray
) -> tuple[Search, dict[str, Any]]:
    import faiss

    faiss.omp_set_num_threads(arguments.threads)
    index = faiss.IndexFlatIP(arguments.dim)
    for start in range(0, len(vectors), _BLOCK):
        index.add(vectors[start : start + _BLOCK])
    return lambda queries: index.search(queries, K)[1], {}


def build_faiss_ivf(
    arguments: argparse.Namespace, vectors: np.ndarray
) -> tuple[Search, dict[str, Any]]:
    import faiss

    faiss.omp_set_num_threads(arguments.threads)
    began = time.perf_counter()
    quantizer = faiss.IndexFlatIP(arguments.dim)
    index = faiss.IndexIVFFlat(
        quantizer, arguments.dim, arguments.cells, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.seed = arguments.seed + 1
    points = min(_TRAINING_POINTS_A_CELL * arguments.cells, len(vectors))
    rows = np.random.default_rng(arguments.seed).permutation(len(vectors))[:points]
    index.train(vectors[np.sort(rows)])
    for start in range(0, len(vectors), _BLOCK):
        index.add(vectors[start : start + _BLOCK])
    seconds = time.perf_counter() - began

    sample = np.load(arguments.output_dir / "queries.npy")[arguments.num_queries :]
    expected = np.load(arguments.output_dir / "expected.npy")[arguments.num_queries :]
    index.nprobe = 1
    while index.nprobe < arguments.cells:
        if recall(index.search(sample, K)[1], expected, K) >= arguments.recall_target:
            break
        index.nprobe *= 2
    about = {
        "build_seconds": seconds,
        "cells": arguments.cells,
        "probes": index.nprobe,
        "training_passages": points,
    }
    return lambda queries: index.search(queries, K)[1], about


BUILDERS = {
    "exact": build_exact,
    "scann": scann_search,
    "faiss_flat": build_faiss_flat,
    "faiss_ivf": build_faiss_ivf,
}


def versions() -> dict[str, str]:
    """Installed versions of what is compared."""
    installed = {}
    for name in ("jax", "numpy", "scann", "faiss-cpu"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def measure(system: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Builds one system and returns its figures."""
    vectors = np.load(arguments.output_dir / "passages.npy", mmap_mode="r")
    queries = np.load(arguments.output_dir / "queries.npy")
    began, cpu_began = time.perf_counter(), time.process_time()
    search, about = BUILDERS[system](arguments, vectors)
    build_seconds = about.pop("build_seconds", time.perf_counter() - began)
    build_cpu_seconds = time.process_time() - cpu_began
    if system == "exact":
        np.save(arguments.output_dir / "expected.npy", search(queries))
    expected = np.load(arguments.output_dir / "expected.npy")
    queries, expected = queries[: arguments.num_queries], expected[: arguments.num_queries]

    retrieved = search(queries)
    figures = [
        ("build", "s", {"value": build_seconds}),
        ("build and choice of effort", "CPU s", {"value": build_cpu_seconds}),
        ("recall@10", "share of exact", {"value": recall(retrieved, expected, 10)}),
        ("recall@100", "share of exact", {"value": recall(retrieved, expected, 100)}),
        *(
            (f"{size} at once", unit, rates)
            for size in (*_BATCHES, len(queries))
            for unit, rates in queries_per_second(search, queries[:size], arguments.rounds).items()
        ),
        ("peak memory", "MiB", {"value": peak_memory() / 2**20}),
    ]
    setting = {
        **about,
        "passages": len(vectors),
        "dim": arguments.dim,
        "queries": len(queries),
        "threads": arguments.threads,
        "seed": arguments.seed,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions(),
    }
    return [
        {
            "system": system,
            "figure": name,
            "unit": unit,
            **{part: round(value, 4) for part, value in values.items()},
            **setting,
        }
        for name, unit, values in figures
    ]


def main() -> None:
    arguments = parse()
    figures = arguments.output_dir / "figures.jsonl"
    if arguments.here:
        (system,) = arguments.systems
        lines = "".join(json.dumps(line) + "\n" for line in measure(system, arguments))
        with open(figures, "a") as file:
            file.write(lines)
        print(lines, end="", flush=True)
        return

    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    make_data(arguments)
    done = set()
    if figures.exists():
        done = {json.loads(line)["system"] for line in figures.read_text().splitlines()}
    # The others' recall is against what exact search found.
    for system in sorted(arguments.systems, key=SYSTEMS.index):
        if system in done:
            continue
        own = [sys.executable, *sys.argv, "--here", "--systems", system]
        # Waiting threads must not count as work when other jobs run at the same time.
        subprocess.run(own, check=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"})


if __name__ == "__main__":
    main()
