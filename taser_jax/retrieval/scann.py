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
import importlib
import itertools
import math
import os
import pathlib
import sys
import threading
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from taser_jax.retrieval.exact import (
    EmbeddingRows,
    ExactSearcher,
    check_finite,
    check_search,
    measure_recall,
)
from taser_jax.retrieval.runs import NO_ROW, SearchResult, merge
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.progress import logger, track
from taser_jax.storage.typed_files import Checked, Natural, Positive, PositiveShare, to_plain

KIND = "scann index"
REBUILD = "build the index from this model's embeddings, into another directory"
"""What a message about an index of other embeddings advises."""
RECALL_QUERIES = 500
"""Queries on which an index's recall is measured."""
_VERSION = 1
_SEED = 20221010
_RESIDENT_BYTES = 32 << 30
_NAME = "scann.scann_ops.py.scann_ops_pybind"
_IMPORTING = threading.Lock()
# ScaNN's guide (docs/algorithms.md): brute force below 20,000, no tree below 100,000. Hashing pays
# earlier than that on few cores, and its quantiser needs some thousands to be trained.
_BRUTE_FORCE_BELOW = 5_000
_TREE_FROM = 100_000
# Dimensions of the embedding that share one 4-bit code.
_DIMENSIONS_PER_BLOCK = 2
# T of the paper, relative to the norm: errors along a passage's own direction weigh more.
_ANISOTROPIC_THRESHOLD = 0.2


def scann_library() -> types.ModuleType:
    """The module of ScaNN that builds, loads and searches indexes of NumPy arrays.

    If TensorFlow is installed, `import scann` also loads operations for it. That takes seconds and
    memory, and fails with an undefined symbol for any release but the one they were built for. So
    TensorFlow is hidden during the import.
    """
    with _IMPORTING:
        if _NAME not in sys.modules:
            tensorflow = sys.modules.get("tensorflow")
            # None in sys.modules makes the import fail.
            sys.modules["tensorflow"] = None  # type: ignore[assignment]
            try:
                importlib.import_module(_NAME)
            finally:
                del sys.modules["tensorflow"]
                if tensorflow is not None:
                    sys.modules["tensorflow"] = tensorflow
        return sys.modules[_NAME]


class Structure(enum.Enum):
    """The structure of a shard; AUTO takes the first that suits its size."""

    AUTO = "auto"
    BRUTE_FORCE = "brute_force"
    HASHED = "hashed"
    TREE = "tree"


@dataclasses.dataclass(frozen=True)
class ScannConfig(Checked):
    """How the index is built; defaults depend on the number of passages.

    Attributes:
        structure: brute force, hashed passages, or a tree of hashed passages.
        training_passages: passages that leaves and codes are trained on.
        shard_passages: maximum passages per shard; one float32 shard is in memory during the build.
        recall_target: required share of the exact top k.
        recall_k: k of that target.
        threads: threads that build the index; 0: one per core.
    """

    structure: Structure = Structure.AUTO
    training_passages: Positive = 250_000
    shard_passages: Positive = 3_000_000
    recall_target: PositiveShare = 0.99
    recall_k: Positive = 100
    threads: Natural = 0


@dataclasses.dataclass(frozen=True)
class SearchEffort:
    """How much of an index a search reads.

    Attributes:
        leaves: leaves searched in each shard's tree; 0 without a tree.
        reorder: candidates of each shard that are scored exactly; 0 if all are.
        recall: share of the exact top `recall_k` found, measured when the index was built.
    """

    leaves: int
    reorder: int
    recall: float


class _Shards:
    """The serialised shards of one index, loaded as they are searched."""

    def __init__(self, directory: pathlib.Path, bounds: list[tuple[int, int]]) -> None:
        self.bounds, self._paths = bounds, _shard_paths(directory, len(bounds))
        for path in self._paths:
            checksums.check_directory(path, fix=f"delete {path} and search again")
        size = sum(file.stat().st_size for path in self._paths for file in path.iterdir())
        # A larger index is read shard by shard at each search.
        self._keep = size <= _RESIDENT_BYTES
        self._loaded: dict[int, Any] = {}

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
        loaded = scann_library().load_searcher(str(self._paths[shard]))
        if self._keep:
            self._loaded[shard] = loaded
        return loaded


def structure_for(num_passages: int, config: ScannConfig) -> Structure:
    """The structure of a shard of this many passages."""
    if config.structure is not Structure.AUTO:
        return config.structure
    if num_passages < _BRUTE_FORCE_BELOW:
        return Structure.BRUTE_FORCE
    return Structure.HASHED if num_passages < _TREE_FROM else Structure.TREE


def build_shard(rows: np.ndarray, structure: Structure, config: ScannConfig) -> Any:
    """A ScaNN searcher of these embeddings, [passages, dim] float32, in memory."""
    builder = scann_library().builder(rows, min(config.recall_k, len(rows)), "dot_product")
    builder = builder.set_n_training_threads(config.threads or os.cpu_count() or 1)
    if structure is Structure.BRUTE_FORCE:
        return builder.score_brute_force().build()
    sample = min(config.training_passages, len(rows))
    if structure is Structure.TREE:
        leaves = math.isqrt(len(rows))
        builder = builder.tree(
            num_leaves=leaves,
            num_leaves_to_search=max(1, leaves // 20),
            training_sample_size=sample,
        )
    builder = builder.score_ah(
        _DIMENSIONS_PER_BLOCK,
        anisotropic_quantization_threshold=_ANISOTROPIC_THRESHOLD,
        training_sample_size=sample,
    )
    return builder.reorder(min(2 * config.recall_k, len(rows))).build()


def _shard_paths(directory: pathlib.Path, count: int) -> list[pathlib.Path]:
    """The directory of each shard."""
    return [directory / f"shard-{shard:05d}-of-{count:05d}" for shard in range(count)]


def _largest(bounds: list[tuple[int, int]]) -> int:
    """Passages of the largest shard."""
    return max(stop - start for start, stop in bounds)


def _shard_bounds(num_passages: int, shard_passages: int) -> list[tuple[int, int]]:
    """Shards of nearly equal size: an index of few passages is less accurate."""
    count = -(-num_passages // shard_passages)
    edges = [num_passages * shard // count for shard in range(count + 1)]
    return list(itertools.pairwise(edges))


class _Metadata(artifacts.Metadata, frozen=True):
    effort: SearchEffort
    num_passages: Positive
    dim: Positive
    config: ScannConfig


class ScannSearcher:
    """An opened index.

    Args:
        directory: the directory that `build_scann` wrote.
        fingerprints: fingerprints that it must have.

    Raises:
        DataError: no finished index there.
        FingerprintError: it was built from another model's or collection's embeddings.
    """

    def __init__(
        self, directory: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
    ) -> None:
        self.metadata = artifacts.read_metadata(
            directory, KIND, _VERSION, _Metadata, fingerprints=fingerprints, fix=REBUILD
        )
        self.fingerprints: Mapping[str, str] = self.metadata.fingerprints
        self.effort = self.metadata.effort
        bounds = _shard_bounds(self.metadata.num_passages, self.metadata.config.shard_passages)
        self._shards = _Shards(pathlib.Path(directory), bounds)

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
    config: ScannConfig = ScannConfig(),
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
        FingerprintError: the directory holds an index of other embeddings or another config.
        StorageError: the directory cannot be written.
    """
    directory, (num_passages, dim) = pathlib.Path(directory), embeddings.shape
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

    bounds = _shard_bounds(num_passages, config.shard_passages)
    structure = structure_for(_largest(bounds), config)
    paths = _shard_paths(directory, len(bounds))
    shown = track(bounds, "ScaNN build", unit="shard")
    for path, (start, stop) in zip(paths, shown, strict=True):
        if path.exists():
            continue
        rows = np.asarray(embeddings[start:stop]).astype(np.float32)
        check_finite(rows, start, what="passage")
        built = build_shard(rows, structure, config)
        with artifacts.replacing(path) as scratch:
            scratch.mkdir()
            built.serialize(str(scratch), relative_path=True)
            checksums.seal(scratch)
        del rows, built

    shards = _Shards(directory, bounds)
    queries, measured_on = recall_queries(embeddings, sample_queries)
    effort = _choose_effort(embeddings, shards, config, queries)
    artifacts.write_json(
        directory / artifacts.METADATA,
        {**plan, "effort": dataclasses.asdict(effort), "measured_on": measured_on},
    )
    return ScannSearcher(directory)


def recall_queries(
    embeddings: EmbeddingRows, queries: Float[np.ndarray, "queries dim"] | None
) -> tuple[Float[np.ndarray, "sampled dim"], str]:
    """What recall is measured on: some queries or, without any, passages; and which they are."""
    source, what = embeddings, "passages"
    if queries is not None and len(queries):
        source, what = queries, "queries"
    count = source.shape[0]
    rng = np.random.default_rng([_SEED, count])
    chosen = rng.permutation(count)[:RECALL_QUERIES].tolist()
    rows = [np.asarray(source[row : row + 1]) for row in chosen]
    return np.concatenate(rows).astype(np.float32), what


def _choose_effort(
    embeddings: EmbeddingRows, shards: _Shards, config: ScannConfig, queries: np.ndarray
) -> SearchEffort:
    """The least effort that reaches the recall target."""
    k = min(config.recall_k, embeddings.shape[0])
    exact = ExactSearcher(embeddings).search(queries, k)

    effort = SearchEffort(0, 0, 0.0)
    for leaves, reorder in _ladder(shards, config, k):
        result = shards.search(queries, k, SearchEffort(leaves, reorder, 0.0))
        recall = measure_recall(result, exact)
        effort = SearchEffort(leaves, reorder, recall)
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
    return effort


def _ladder(shards: _Shards, config: ScannConfig, k: int) -> list[tuple[int, int]]:
    """Efforts to try, rising: (leaves, reordered), both doubling from step to step."""
    most = _largest(shards.bounds)
    structure = structure_for(most, config)
    if structure is Structure.BRUTE_FORCE:
        return [(0, 0)]
    leaves = math.isqrt(most) if structure is Structure.TREE else 0
    steps = []
    searched, reorder = max(1, leaves // 64) if leaves else 0, 2 * k
    while True:
        steps.append((min(searched, leaves), min(reorder, most)))
        if searched >= leaves and (reorder >= most or reorder >= 64 * k):
            return steps
        searched, reorder = 2 * searched, min(2 * reorder, 64 * k)
