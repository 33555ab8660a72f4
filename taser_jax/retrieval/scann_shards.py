"""The shards of a ScaNN index: their sizes, how each is built, and a search of all of them."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import itertools
import json
import math
import os
import pathlib
import sys
import threading
import types
from typing import Any

import numpy as np

from taser_jax.retrieval.runs import NO_ROW, SearchResult, merge
from taser_jax.storage import checksums
from taser_jax.storage.errors import ConfigError

_NAME = "scann.scann_ops.py.scann_ops_pybind"
_IMPORTING = threading.Lock()


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


# ScaNN's guide (docs/algorithms.md): brute force below 20,000, no tree below 100,000. Hashing pays
# earlier than that on few cores, and its quantiser needs some thousands to be trained.
_BRUTE_FORCE_BELOW = 5_000
_TREE_FROM = 100_000
# Dimensions of the embedding that share one 4-bit code.
_DIMENSIONS_PER_BLOCK = 2
# T of the paper, relative to the norm: errors along a passage's own direction weigh more.
_ANISOTROPIC_THRESHOLD = 0.2
RECALL_QUERIES = 500
"""Queries on which an index's recall is measured."""


class Structure(enum.Enum):
    """The structure of a shard; AUTO takes the first that suits its size."""

    AUTO = "auto"
    BRUTE_FORCE = "brute_force"
    HASHED = "hashed"
    TREE = "tree"


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """How the index is built; defaults depend on the number of passages.

    Attributes:
        structure: brute force, hashed passages, or a tree of hashed passages.
        num_leaves: leaves of each shard's tree; 0: the square root of its number of passages. Set
            it to trade time of the build for time of a search.
        training_passages: passages that leaves and codes are trained on.
        shard_passages: maximum passages per shard; one float32 shard is in memory during the build.
        recall_target: required share of the exact top k.
        recall_k: k of that target.
        threads: threads that build the index; 0: one per core.
    """

    structure: Structure = Structure.AUTO
    num_leaves: int = 0
    training_passages: int = 250_000
    shard_passages: int = 3_000_000
    recall_target: float = 0.99
    recall_k: int = 100
    threads: int = 0

    def __post_init__(self) -> None:
        wrong = [
            name
            for name in ("training_passages", "shard_passages", "recall_k")
            if getattr(self, name) < 1
        ]
        if wrong or not 0 < self.recall_target <= 1:
            fix = "take sizes of at least 1 and a recall target in (0, 1]"
            raise ConfigError(f"{self}", where="ScannConfig", fix=fix)


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


class Shards:
    """The serialised shards of one index, loaded as they are searched."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        num_passages: int,
        shard_passages: int,
        resident_bytes: int,
    ) -> None:
        self.bounds = shard_bounds(num_passages, shard_passages)
        count = len(self.bounds)
        self._paths = [directory / shard_name(shard, count) for shard in range(count)]
        for path in self._paths:
            checksums.check_directory(path, fix=f"delete {path} and search again")
        size = sum(file.stat().st_size for path in self._paths for file in path.iterdir())
        self._keep = size <= resident_bytes
        self._loaded: dict[int, Any] = {}

    def build_seconds(self) -> float:
        """Total time to build the shards, over all runs."""
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


def num_leaves_for(num_passages: int, config: ScannConfig) -> int:
    """Leaves of a shard's tree."""
    return min(config.num_leaves or math.isqrt(num_passages), num_passages)


def build_shard(rows: np.ndarray, structure: Structure, config: ScannConfig) -> Any:
    """A ScaNN searcher of these embeddings, [passages, dim] float32, in memory."""
    builder = scann_library().builder(rows, min(config.recall_k, len(rows)), "dot_product")
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
        _DIMENSIONS_PER_BLOCK,
        anisotropic_quantization_threshold=_ANISOTROPIC_THRESHOLD,
        training_sample_size=sample,
    )
    return builder.reorder(min(2 * config.recall_k, len(rows))).build()


def shard_name(shard: int, count: int) -> str:
    """The directory of one shard."""
    return f"shard-{shard:05d}-of-{count:05d}"


def largest(bounds: list[tuple[int, int]]) -> int:
    """Passages of the largest shard."""
    return max(stop - start for start, stop in bounds)


def shard_bounds(num_passages: int, shard_passages: int) -> list[tuple[int, int]]:
    """Shards of nearly equal size: an index of few passages is less accurate."""
    count = -(-num_passages // shard_passages)
    edges = [num_passages * shard // count for shard in range(count + 1)]
    return list(itertools.pairwise(edges))
