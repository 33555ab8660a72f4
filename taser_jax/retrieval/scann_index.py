"""ScaNN: approximate search with a tree, anisotropic quantisation and exact reordering.

An index of several shards is built and can be searched one shard at a time, so that neither step
holds all embeddings. How many leaves are searched and how many candidates reordered is chosen when
the index is built, as the least that reaches the recall target against exact search.

Source: Guo et al., "Accelerating large-scale inference with anisotropic vector quantization",
ICML 2020.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from taser_jax.errors import ConfigError
from taser_jax.fingerprint import require_equal
from taser_jax.progress import logger, track
from taser_jax.retrieval.artifacts import (
    METADATA,
    follow_plan,
    read_metadata,
    replacing,
    write_json,
)
from taser_jax.retrieval.exact import ExactSearcher
from taser_jax.retrieval.runs import NO_ROW, SearchResult, merge
from taser_jax.retrieval.searcher import EmbeddingRows, check_search, measure_recall

KIND = "scann index"
_VERSION = 1
_SEED = 20221010
# ScaNN's guide (docs/algorithms.md): brute force below 20,000, no tree below 100,000. Hashing pays
# earlier than that on few cores, and its quantiser needs some thousands to be trained.
_BRUTE_FORCE_BELOW = 5_000
_TREE_FROM = 100_000


class Structure(enum.Enum):
    """What a shard is made of; AUTO takes the first that its size needs."""

    AUTO = "auto"
    BRUTE_FORCE = "brute_force"
    HASHED = "hashed"
    TREE = "tree"


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """How the index is built; everything has a default from the number of passages.

    Attributes:
        structure: brute force, hashed passages, or a tree of hashed passages.
        num_leaves: of each shard's tree; 0: the square root of its passages.
        dimensions_per_block: dimensions of the embedding that share one 4-bit code.
        anisotropic_threshold: T of the paper, relative to the norm; errors along a passage's own
            direction weigh more the higher it is.
        training_passages: passages that leaves and codes are trained on.
        shard_passages: most passages a shard; one float32 shard is in memory while it is built.
        recall_target: share of the exact top k that shall be found.
        recall_k: k of that share.
        recall_queries: queries it is measured on.
        threads: for building; 0: all cores.
    """

    structure: Structure = Structure.AUTO
    num_leaves: int = 0
    dimensions_per_block: int = 2
    anisotropic_threshold: float = 0.2
    training_passages: int = 250_000
    shard_passages: int = 3_000_000
    recall_target: float = 0.95
    recall_k: int = 100
    recall_queries: int = 500
    threads: int = 0

    def __post_init__(self) -> None:
        wrong = [
            name
            for name in ("dimensions_per_block", "training_passages", "shard_passages", "recall_k")
            if getattr(self, name) < 1
        ]
        if wrong or not 0 < self.recall_target <= 1 or self.recall_queries < 1:
            raise ConfigError(
                f"{self}",
                where="ScannConfig",
                expected="sizes of at least 1 and a recall target in (0, 1]",
            )

    def to_json(self) -> dict[str, Any]:
        """As written to the index's plan."""
        return {**vars(self), "structure": self.structure.value}


@dataclasses.dataclass(frozen=True)
class SearchEffort:
    """How much of an index a search looks at.

    Attributes:
        leaves: leaves searched in each shard's tree; 0 where there is none.
        reorder: candidates of each shard scored exactly; 0 where all are.
        recall: share of the exact top `recall_k` found, measured when the index was built.
    """

    leaves: int
    reorder: int
    recall: float


class ScannSearcher:
    """An opened index.

    Args:
        directory: where `build_scann` put it.
        resident_bytes: shards stay in memory between searches while all of them together take no
            more than this; a larger index is read shard by shard at each search.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, resident_bytes: int = 32 << 30
    ) -> None:
        self.directory = pathlib.Path(directory)
        self.metadata = read_metadata(directory, KIND, _VERSION)
        self.fingerprints: dict[str, str] = self.metadata["fingerprints"]
        self.effort = SearchEffort(**self.metadata["effort"])
        self._shards = _Shards(
            self.directory,
            num_passages=self.metadata["num_passages"],
            shard_passages=self.metadata["config"]["shard_passages"],
            resident_bytes=resident_bytes,
        )

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        fingerprints: Mapping[str, str] | None = None,
        resident_bytes: int = 32 << 30,
    ) -> ScannSearcher:
        """Opens an index and checks what it was made from.

        Raises:
            DataError: no finished index there.
            FingerprintError: it was built from another model's or collection's embeddings.
        """
        searcher = cls(directory, resident_bytes=resident_bytes)
        require_equal(
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
        check_search(query_embeddings, k, dim=self.metadata["dim"])
        # The effort was measured at recall_k; more results need more candidates.
        scale = max(1.0, k / self.metadata["config"]["recall_k"])
        effort = dataclasses.replace(self.effort, reorder=math.ceil(self.effort.reorder * scale))
        return self._shards.search(query_embeddings, k, effort)


def build_scann(
    embeddings: EmbeddingRows,
    directory: str | os.PathLike[str],
    *,
    fingerprints: Mapping[str, str],
    config: ScannConfig | None = None,
    sample_queries: Float[np.ndarray, "queries dim"] | None = None,
) -> ScannSearcher:
    """Builds an index shard by shard, or opens it where it is built already.

    Args:
        embeddings: of the passages, row-aligned.
        directory: where the index goes.
        fingerprints: of the embeddings, recorded in the index.
        config: how it is built.
        sample_queries: queries that recall is measured on; without them, passages, which are
            distributed differently: give queries where there are some.

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
        "config": config.to_json(),
        "num_passages": num_passages,
        "dim": dim,
    }
    follow_plan(directory, plan)
    if (directory / METADATA).exists():
        return ScannSearcher(directory)

    bounds = _shard_bounds(num_passages, config.shard_passages)
    structure = structure_for(_largest(bounds), config)
    for shard, (start, stop) in enumerate(track(bounds, "ScaNN build", unit="shard")):
        path = directory / _shard_name(shard, len(bounds))
        if path.exists():
            continue
        began = time.monotonic()
        rows = np.asarray(embeddings.rows(start, stop)).astype(np.float32)
        built = _build_shard(rows, structure, config)
        with replacing(path) as scratch:
            scratch.mkdir()
            built.serialize(str(scratch), relative_path=True)
            seconds = time.monotonic() - began
            write_json(scratch / "shard.json", {"start": start, "stop": stop, "seconds": seconds})
        del rows, built

    shards = _Shards(
        directory,
        num_passages=num_passages,
        shard_passages=config.shard_passages,
        resident_bytes=32 << 30,
    )
    if sample_queries is not None and len(sample_queries):
        queries, measured_on = sample_queries, "queries"
    else:
        queries, measured_on = _some_passages(embeddings, config), "passages"
    effort, measured = _choose_effort(embeddings, shards, config, queries)
    write_json(
        directory / METADATA,
        {
            **plan,
            "effort": dataclasses.asdict(effort),
            "measured": measured,
            "measured_on": measured_on,
            "build_seconds": round(shards.build_seconds(), 3),
        },
    )
    return ScannSearcher(directory)


class _Shards:
    """The serialised shards of one index, loaded as they are searched."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        num_passages: int,
        shard_passages: int,
        resident_bytes: int,
    ) -> None:
        self.bounds = _shard_bounds(num_passages, shard_passages)
        count = len(self.bounds)
        self._paths = [directory / _shard_name(shard, count) for shard in range(count)]
        size = sum(file.stat().st_size for path in self._paths for file in path.iterdir())
        self._keep = size <= resident_bytes
        self._loaded: dict[int, Any] = {}

    def build_seconds(self) -> float:
        """Time all shards took to build, over all runs that did."""
        return sum(json.loads((path / "shard.json").read_text())["seconds"] for path in self._paths)

    def search(self, queries: np.ndarray, k: int, effort: SearchEffort) -> SearchResult:
        """Top k of all shards; ScaNN's padding, id 0 with a NaN score, becomes row -1."""
        queries = np.ascontiguousarray(queries, np.float32)
        if not len(queries):
            return SearchResult(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
        results = []
        for shard, (start, stop) in enumerate(self.bounds):
            limit = min(k, stop - start)
            ids, scores = self._load(shard).search_batched_parallel(
                queries,
                final_num_neighbors=limit,
                pre_reorder_num_neighbors=(
                    min(max(effort.reorder, limit), stop - start) if effort.reorder else None
                ),
                leaves_to_search=effort.leaves or None,
            )
            rows = np.where(np.isnan(scores), NO_ROW, ids.astype(np.int64) + start)
            results.append(SearchResult(rows.astype(np.int32), scores.astype(np.float32)))
        return merge(results, k)

    def _load(self, shard: int) -> Any:
        if shard in self._loaded:
            return self._loaded[shard]
        from scann.scann_ops.py import scann_ops_pybind

        loaded = scann_ops_pybind.load_searcher(str(self._paths[shard]))
        if self._keep:
            self._loaded[shard] = loaded
        return loaded


def structure_for(num_passages: int, config: ScannConfig) -> Structure:
    """What a shard of this many passages is made of."""
    if config.structure is not Structure.AUTO:
        return config.structure
    if num_passages < _BRUTE_FORCE_BELOW:
        return Structure.BRUTE_FORCE
    return Structure.HASHED if num_passages < _TREE_FROM else Structure.TREE


def num_leaves_for(num_passages: int, config: ScannConfig) -> int:
    """Leaves of a shard's tree."""
    return min(config.num_leaves or math.isqrt(num_passages), num_passages)


def _build_shard(rows: np.ndarray, structure: Structure, config: ScannConfig) -> Any:
    # Imported where it is used: it loads TensorFlow, which exact search does not need.
    from scann.scann_ops.py import scann_ops_pybind

    builder = scann_ops_pybind.builder(rows, min(config.recall_k, len(rows)), "dot_product")
    builder = builder.set_n_training_threads(config.threads or os.cpu_count() or 1)
    if structure is Structure.BRUTE_FORCE:
        return builder.score_brute_force().build()
    sample = min(config.training_passages, len(rows))
    if structure is Structure.TREE:
        leaves = num_leaves_for(len(rows), config)
        builder = builder.tree(
            num_leaves=leaves,
            num_leaves_to_search=max(1, leaves // 20),
            training_sample_size=sample,
        )
    builder = builder.score_ah(
        config.dimensions_per_block,
        anisotropic_quantization_threshold=config.anisotropic_threshold,
        training_sample_size=sample,
    )
    return builder.reorder(min(2 * config.recall_k, len(rows))).build()


def _some_passages(embeddings: EmbeddingRows, config: ScannConfig) -> np.ndarray:
    rows = np.random.default_rng([_SEED, embeddings.shape[0]]).integers(
        0, embeddings.shape[0], config.recall_queries
    )
    return np.concatenate([np.asarray(embeddings.rows(row, row + 1)) for row in rows.tolist()])


def _choose_effort(
    embeddings: EmbeddingRows,
    shards: _Shards,
    config: ScannConfig,
    queries: np.ndarray,
) -> tuple[SearchEffort, list[dict[str, Any]]]:
    """The least effort that reaches the recall target, and everything measured on the way."""
    rng = np.random.default_rng([_SEED, len(queries)])
    chosen = rng.permutation(len(queries))[: config.recall_queries]
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


def _ladder(shards: _Shards, config: ScannConfig, k: int) -> list[tuple[int, int]]:
    """Efforts to try, rising: (leaves, reordered), both doubling from step to step."""
    largest = _largest(shards.bounds)
    structure = structure_for(largest, config)
    if structure is Structure.BRUTE_FORCE:
        return [(0, 0)]
    leaves = num_leaves_for(largest, config) if structure is Structure.TREE else 0
    steps = []
    searched, reorder = max(1, leaves // 64) if leaves else 0, 2 * k
    while True:
        steps.append((min(searched, leaves), min(reorder, largest)))
        if searched >= leaves and (reorder >= largest or reorder >= 64 * k):
            return steps
        searched, reorder = 2 * searched, min(2 * reorder, 64 * k)


def _shard_name(shard: int, count: int) -> str:
    return f"shard-{shard:05d}-of-{count:05d}"


def _largest(bounds: list[tuple[int, int]]) -> int:
    return max(stop - start for start, stop in bounds)


def _shard_bounds(num_passages: int, shard_passages: int) -> list[tuple[int, int]]:
    """Shards of nearly equal size: a small last one would be a poorer index."""
    count = -(-num_passages // shard_passages)
    edges = [num_passages * shard // count for shard in range(count + 1)]
    return list(itertools.pairwise(edges))
