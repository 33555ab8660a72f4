"""FAISS: a flat index, or inverted lists of which a search reads some, where ScaNN has no wheels.

Source: Douze et al., "The Faiss library", arXiv 2401.08281.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping

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
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import Checked, Natural, Positive, to_plain

KIND = "faiss index"
_VERSION = 1
_FILE = "index.faiss"
_BLOCK = 1 << 16
# FAISS trains lists on at most so many passages of each.
_TRAINED_ON = 256
_RECALL_K, _RECALL_QUERIES = 100, 500


@dataclasses.dataclass(frozen=True)
class FaissConfig(Checked):
    """How the index is built and searched.

    Attributes:
        lists: inverted lists; 0 searches all passages. FAISS advises 4 to 16 times the root of
            their number.
        probes: lists that a search reads.
    """

    lists: Natural = 0
    probes: Positive = 16


class _Metadata(artifacts.Metadata, frozen=True):
    dim: Positive


class FaissSearcher:
    """An opened index, in memory.

    Args:
        directory: the directory that `build_faiss` wrote.
        fingerprints: fingerprints that it must have.

    Raises:
        DataError: no finished index there.
        FingerprintError: it was built from another model's or collection's embeddings.
    """

    def __init__(
        self, directory: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
    ) -> None:
        import faiss

        metadata = artifacts.read_metadata(directory, KIND, _VERSION, _Metadata)
        self.fingerprints: Mapping[str, str] = metadata.fingerprints
        fix = "build the index from this model's embeddings, into another directory"
        what = f"FAISS index {os.fspath(directory)}"
        artifacts.require_equal(what, self.fingerprints, fingerprints or {}, fix)
        path = pathlib.Path(directory) / _FILE
        checksums.check_file(path, fix=f"delete {os.fspath(directory)} and search again")
        self._index, self._dim = faiss.read_index(os.fspath(path)), metadata.dim

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query; row -1, score -inf where the lists read have fewer.

        Raises:
            ConfigError: k below 1, or dimensions that differ from the passages'.
        """
        check_search(query_embeddings, k, dim=self._dim)
        queries = np.ascontiguousarray(query_embeddings, np.float32)
        scores, rows = self._index.search(queries, k)
        return SearchResult(rows.astype(np.int32), np.where(rows < 0, np.float32(-np.inf), scores))


def build_faiss(
    embeddings: EmbeddingRows,
    directory: artifacts.FilePath,
    *,
    fingerprints: Mapping[str, str],
    config: FaissConfig,
    sample_queries: Float[np.ndarray, "queries dim"] | None = None,
) -> FaissSearcher:
    """Builds an index in memory, or opens a finished one; lists print their recall.

    Args:
        embeddings: row-aligned embeddings of the passages.
        directory: where the index goes.
        fingerprints: fingerprints of the embeddings, recorded in the index.
        config: how it is built and searched.
        sample_queries: queries that recall is measured on; without any, on passages.

    Raises:
        ConfigError: more lists than passages.
        DataError: an embedding is not finite.
        FingerprintError: the directory holds an index of other embeddings or another config.
        StorageError: the directory cannot be written.
    """
    import faiss

    directory, (count, dim) = pathlib.Path(directory), embeddings.shape
    plan = {
        "format_version": _VERSION,
        "kind": KIND,
        "fingerprints": dict(fingerprints),
        "config": to_plain(config),
        "dim": dim,
    }
    if config.lists > count:
        fix = "FAISS advises 4 to 16 times the root of the number of passages; 0 has no lists"
        problem = f"{config.lists} lists of {count} passages"
        raise ConfigError(problem, where="FaissConfig.lists", fix=fix)
    artifacts.follow_plan(directory, plan)
    if (directory / artifacts.METADATA).exists():
        return FaissSearcher(directory)
    index: faiss.Index = faiss.IndexFlatIP(dim)
    if config.lists:
        lists = faiss.IndexIVFFlat(index, dim, config.lists, faiss.METRIC_INNER_PRODUCT)
        lists.nprobe = config.probes
        step = max(1, count // (_TRAINED_ON * config.lists))
        lists.train(np.concatenate([block[::step] for block in _blocks(embeddings)]))
        index = lists
    for block in _blocks(embeddings):
        index.add(block)
    with artifacts.replacing(directory / _FILE) as scratch:
        faiss.write_index(index, os.fspath(scratch))
    artifacts.write_json(directory / artifacts.METADATA, plan)
    searcher = FaissSearcher(directory)
    if config.lists:
        queries = embeddings.rows(0, _RECALL_QUERIES) if sample_queries is None else sample_queries
        queries, k = queries[:_RECALL_QUERIES].astype(np.float32), min(_RECALL_K, count)
        exact = ExactSearcher(embeddings).search(queries, k)
        recall = measure_recall(searcher.search(queries, k), exact)
        message = "FAISS: recall@%d %.4f against exact search (%d queries)"
        logger.info(message, k, recall, len(queries))
    return searcher


def _blocks(embeddings: EmbeddingRows) -> Iterator[Float[np.ndarray, "rows dim"]]:
    for start in range(0, embeddings.shape[0], _BLOCK):
        rows = np.ascontiguousarray(embeddings.rows(start, start + _BLOCK), np.float32)
        check_finite(rows, start, what="passage")
        yield rows
