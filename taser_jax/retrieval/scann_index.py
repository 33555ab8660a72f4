"""ScaNN: approximate search with a tree, anisotropic quantisation and exact reordering.

An index of several shards is built and can be searched one shard at a time, so that neither step
holds all embeddings. How many leaves are searched and how many candidates reordered is chosen when
the index is built, as the least that reaches the recall target against exact search.

Source: Guo et al., "Accelerating large-scale inference with anisotropic vector quantization",
ICML 2020.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from taser_jax.retrieval.exact import (
    EmbeddingRows,
    ExactSearcher,
    check_finite,
    check_search,
    measure_recall,
)
from taser_jax.retrieval.runs import SearchResult
from taser_jax.retrieval.scann_shards import (
    RECALL_QUERIES,
    ScannConfig,
    SearchEffort,
    Shards,
    Structure,
    build_shard,
    largest,
    num_leaves_for,
    shard_bounds,
    shard_name,
    structure_for,
)
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, track
from taser_jax.storage.typed_files import Positive, to_plain

KIND = "scann index"
_VERSION = 1
_SEED = 20221010
_RESIDENT_BYTES = 32 << 30


class _Metadata(artifacts.Metadata, frozen=True):
    effort: SearchEffort
    num_passages: Positive
    dim: Positive
    config: ScannConfig


class ScannSearcher:
    """An opened index.

    Args:
        directory: the directory that `build_scann` wrote.
        resident_bytes: shards stay in memory between searches while all of them together take no
            more than this; a larger index is read shard by shard at each search.
    """

    def __init__(
        self, directory: artifacts.FilePath, *, resident_bytes: int = _RESIDENT_BYTES
    ) -> None:
        self.directory = pathlib.Path(directory)
        self.metadata = artifacts.read_metadata(directory, KIND, _VERSION, _Metadata)
        self.fingerprints: Mapping[str, str] = self.metadata.fingerprints
        self.effort = self.metadata.effort
        self._shards = Shards(
            self.directory,
            num_passages=self.metadata.num_passages,
            shard_passages=self.metadata.config.shard_passages,
            resident_bytes=resident_bytes,
        )

    @classmethod
    def open(
        cls,
        directory: artifacts.FilePath,
        *,
        fingerprints: Mapping[str, str] | None = None,
        resident_bytes: int = _RESIDENT_BYTES,
    ) -> ScannSearcher:
        """Opens an index and checks what it was made from.

        Raises:
            DataError: no finished index there.
            FingerprintError: it was built from another model's or collection's embeddings.
        """
        searcher = cls(directory, resident_bytes=resident_bytes)
        artifacts.require_equal(
            f"ScaNN index {os.fspath(directory)}",
            searcher.fingerprints,
            fingerprints or {},
            "build the index from this model's embeddings, into another directory",
        )
        return searcher

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query; row -1, score -inf where ScaNN found fewer.

        Raises:
            ConfigError: k below 1, or dimensions that differ from the passages'.
        """
        check_search(query_embeddings, k, dim=self.metadata.dim)
        # The effort was measured at recall_k; more results need more candidates.
        scale = max(1.0, k / self.metadata.config.recall_k)
        effort = dataclasses.replace(self.effort, reorder=math.ceil(self.effort.reorder * scale))
        return self._shards.search(query_embeddings, k, effort)


def build_scann(
    embeddings: EmbeddingRows,
    directory: artifacts.FilePath,
    *,
    fingerprints: Mapping[str, str],
    config: ScannConfig | None = None,
    sample_queries: Float[np.ndarray, "queries dim"] | None = None,
) -> ScannSearcher:
    """Builds an index shard by shard, or opens a finished one.

    Args:
        embeddings: row-aligned embeddings of the passages.
        directory: where the index goes.
        fingerprints: fingerprints of the embeddings, recorded in the index.
        config: how it is built.
        sample_queries: queries that recall is measured on; without any, it is measured on passages,
            which are distributed differently.

    Raises:
        ConfigError: no passages.
        FingerprintError: the directory holds an index of other embeddings or another config.
        StorageError: the directory cannot be written.
    """
    config, directory = config or ScannConfig(), pathlib.Path(directory)
    num_passages, dim = embeddings.shape
    if not num_passages:
        raise ConfigError("no passages", where=str(directory), expected="at least one")
    plan = {
        "format_version": _VERSION,
        "kind": KIND,
        "fingerprints": dict(fingerprints),
        "config": to_plain(config),
        "num_passages": num_passages,
        "dim": dim,
    }
    artifacts.follow_plan(directory, plan)
    if (directory / artifacts.METADATA).exists():
        return ScannSearcher(directory)

    bounds = shard_bounds(num_passages, config.shard_passages)
    structure = structure_for(largest(bounds), config)
    for shard, (start, stop) in enumerate(track(bounds, "ScaNN build", unit="shard")):
        path = directory / shard_name(shard, len(bounds))
        if path.exists():
            continue
        began = time.monotonic()
        rows = np.asarray(embeddings.rows(start, stop)).astype(np.float32)
        check_finite(rows, start, what="passage")
        built = build_shard(rows, structure, config)
        with artifacts.replacing(path) as scratch:
            scratch.mkdir()
            built.serialize(str(scratch), relative_path=True)
            seconds = time.monotonic() - began
            artifacts.write_json(
                scratch / "shard.json", {"start": start, "stop": stop, "seconds": seconds}
            )
            checksums.seal(scratch)
        del rows, built

    shards = Shards(
        directory,
        num_passages=num_passages,
        shard_passages=config.shard_passages,
        resident_bytes=_RESIDENT_BYTES,
    )
    if sample_queries is not None and len(sample_queries):
        queries, measured_on = sample_queries, "queries"
    else:
        queries, measured_on = _some_passages(embeddings, config), "passages"
    effort, measured = _choose_effort(embeddings, shards, config, queries)
    artifacts.write_json(
        directory / artifacts.METADATA,
        {
            **plan,
            "effort": dataclasses.asdict(effort),
            "measured": measured,
            "measured_on": measured_on,
            "build_seconds": round(shards.build_seconds(), 3),
        },
    )
    return ScannSearcher(directory)


def _some_passages(embeddings: EmbeddingRows, config: ScannConfig) -> np.ndarray:
    rows = np.random.default_rng([_SEED, embeddings.shape[0]]).integers(
        0, embeddings.shape[0], RECALL_QUERIES
    )
    return np.concatenate([np.asarray(embeddings.rows(row, row + 1)) for row in rows.tolist()])


def _choose_effort(
    embeddings: EmbeddingRows,
    shards: Shards,
    config: ScannConfig,
    queries: np.ndarray,
) -> tuple[SearchEffort, list[dict[str, int | float]]]:
    """The least effort that reaches the recall target, and everything measured on the way."""
    rng = np.random.default_rng([_SEED, len(queries)])
    chosen = rng.permutation(len(queries))[:RECALL_QUERIES]
    queries = np.asarray(queries)[chosen].astype(np.float32)
    k = min(config.recall_k, embeddings.shape[0])
    exact = ExactSearcher(embeddings).search(queries, k)

    measured = []
    effort = SearchEffort(0, 0, 0.0)
    for leaves, reorder in _ladder(shards, config, k):
        began = time.monotonic()
        found = shards.search(queries, k, SearchEffort(leaves, reorder, 0.0))
        seconds = time.monotonic() - began
        recall = measure_recall(found, exact)
        effort = SearchEffort(leaves, reorder, recall)
        speed = {"queries_per_second": round(len(queries) / seconds, 1)}
        measured.append({**dataclasses.asdict(effort), **speed})
        if recall >= config.recall_target:
            break
    else:
        logger.warning(
            "ScaNN: recall@%d %.4f at the highest effort is below the target %.4f",
            k, effort.recall, config.recall_target,
        )  # fmt: skip
    logger.info(
        "ScaNN: recall@%d against exact search %.4f with %d leaves, %d reordered (%d queries)",
        k, effort.recall, effort.leaves, effort.reorder, len(queries),
    )  # fmt: skip
    return effort, measured


def _ladder(shards: Shards, config: ScannConfig, k: int) -> list[tuple[int, int]]:
    """Efforts to try, rising: (leaves, reordered), both doubling from step to step."""
    most = largest(shards.bounds)
    structure = structure_for(most, config)
    if structure is Structure.BRUTE_FORCE:
        return [(0, 0)]
    leaves = num_leaves_for(most, config) if structure is Structure.TREE else 0
    steps = []
    searched, reorder = max(1, leaves // 64) if leaves else 0, 2 * k
    while True:
        steps.append((min(searched, leaves), min(reorder, most)))
        if searched >= leaves and (reorder >= most or reorder >= 64 * k):
            return steps
        searched, reorder = 2 * searched, min(2 * reorder, 64 * k)
