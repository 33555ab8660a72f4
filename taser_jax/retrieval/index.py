"""Builds and opens indexes of every kind, of whole or truncated embeddings; those of FAISS.

FAISS searches a flat index, or inverted lists of which a search reads some, where ScaNN has no
wheels (Douze et al., "The Faiss library", arXiv 2401.08281).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from taser_jax.models.batch import Normalization
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import (
    EmbeddingRows,
    ExactSearcher,
    Searcher,
    check_finite,
    check_search,
    measure_recall,
)
from taser_jax.retrieval.runs import SearchResult, top_k
from taser_jax.retrieval.scann import KIND as SCANN_KIND
from taser_jax.retrieval.scann import (
    REBUILD,
    ScannConfig,
    ScannSearcher,
    build_scann,
    recall_queries,
)
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import Checked, Natural, Positive, to_plain

EXACT_KIND, FAISS_KIND = "exact index", "faiss index"
INDEX_KINDS = (EXACT_KIND, SCANN_KIND, FAISS_KIND)
_VERSION = 1
_BLOCK = 1 << 16
_FAISS_FILE = "index.faiss"
# FAISS trains lists on at most so many passages of each.
_TRAINED_ON = 256
_RECALL_K = 100


def truncate(
    embeddings: Float[np.ndarray, "texts whole"], dim: int, normalization: Normalization
) -> Float[np.ndarray, "texts dim"]:
    """The first dimensions, normalised again where the whole embeddings are.

    Example:
        >>> truncate(np.array([[3.0, 4.0, 12.0]]), 2, Normalization.L2).tolist()
        [[0.6, 0.8]]
    """
    cut = embeddings[:, :dim].astype(np.float32)
    if normalization is Normalization.NONE:
        return cut
    return cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)


class TruncatedEmbeddings:
    """Embeddings cut to their first dimensions as they are read; see `truncate`.

    Args:
        whole: the embeddings on disk.
        dim: number of dimensions.

    Raises:
        ConfigError: more dimensions than there are.
        DataError: embeddings without a record of their normalisation.
    """

    def __init__(self, whole: Embeddings, dim: int) -> None:
        if not 1 <= dim <= whole.shape[1]:
            problem = f"the first {dim} dimensions of {whole.shape[1]}"
            fix = "take one of the model's Matryoshka dimensions"
            raise ConfigError(problem, where="IndexConfig.dim", fix=fix)
        if whole.metadata.normalization is None:
            problem = "it is not recorded how the embeddings are normalised"
            fix = "encode again, into another directory"
            raise DataError(problem, where=str(whole.directory), fix=fix)
        self.whole = whole
        self.shape = (whole.shape[0], dim)
        self.normalization = Normalization(whole.metadata.normalization)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Embeddings of consecutive rows. [rows, dim], float32."""
        return truncate(self.whole[rows], self.shape[1], self.normalization)


class TruncatedSearcher:
    """Truncates query embeddings before it searches among truncated passages.

    Args:
        searcher: searches the truncated passages.
        passages: the truncated passages.
    """

    def __init__(self, searcher: Searcher, passages: TruncatedEmbeddings) -> None:
        self._searcher, self._passages = searcher, passages
        self.fingerprints: Mapping[str, str] = searcher.fingerprints

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query, by the first dimensions."""
        check_search(query_embeddings, k, dim=self._passages.whole.shape[1])
        dim, normalization = self._passages.shape[1], self._passages.normalization
        return self._searcher.search(truncate(query_embeddings, dim, normalization), k)


@dataclasses.dataclass(frozen=True)
class FaissConfig(Checked):
    """How a FAISS index is built and searched.

    Attributes:
        lists: inverted lists; 0 searches all passages. FAISS advises 4 to 16 times the root of
            their number.
        probes: lists that a search reads.
    """

    lists: Natural = 0
    probes: Positive = 16


class _FaissMetadata(artifacts.Metadata, frozen=True):
    dim: Positive


class FaissSearcher:
    """An opened FAISS index, in memory.

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

        metadata = artifacts.read_metadata(
            directory, FAISS_KIND, _VERSION, _FaissMetadata, fingerprints=fingerprints, fix=REBUILD
        )
        self.fingerprints: Mapping[str, str] = metadata.fingerprints
        path = pathlib.Path(directory) / _FAISS_FILE
        self._index, self._dim = faiss.read_index(os.fspath(path)), metadata.dim

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query; row -1, score -inf where the lists read have fewer.

        Raises:
            ConfigError: k below 1, or dimensions that differ from the passages'.
        """
        check_search(query_embeddings, k, dim=self._dim)
        queries = np.ascontiguousarray(query_embeddings, np.float32)
        scores, rows = self._index.search(queries, k)
        # FAISS orders equal scores in its own way.
        return top_k(rows, scores, k)


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
        "kind": FAISS_KIND,
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
        # Copied: a view would hold all of its block.
        trained_on = [block[::step].copy() for block in _blocks(embeddings)]
        lists.train(np.concatenate(trained_on))
        index = lists
    for block in _blocks(embeddings):
        index.add(block)
    with artifacts.replacing(directory / _FAISS_FILE) as scratch:
        faiss.write_index(index, os.fspath(scratch))
    artifacts.write_json(directory / artifacts.METADATA, plan)
    searcher = FaissSearcher(directory)
    if config.lists:
        (queries, what), k = recall_queries(embeddings, sample_queries), min(_RECALL_K, count)
        exact = ExactSearcher(embeddings).search(queries, k)
        recall = measure_recall(searcher.search(queries, k), exact)
        message = "FAISS: recall@%d %.4f against exact search (%d %s)"
        logger.info(message, k, recall, len(queries), what)
    return searcher


def _blocks(embeddings: EmbeddingRows) -> Iterator[Float[np.ndarray, "rows dim"]]:
    for start in range(0, embeddings.shape[0], _BLOCK):
        rows = np.ascontiguousarray(embeddings[start : start + _BLOCK], np.float32)
        check_finite(rows, start, what="passage")
        yield rows


class _Metadata(artifacts.Metadata, frozen=True):
    embeddings: str
    dim: Positive | None = None


class IndexKind(enum.Enum):
    """Exact search on device, or search by a library on the host."""

    EXACT = "exact"
    SCANN = "scann"
    FAISS = "faiss"


@dataclasses.dataclass(frozen=True)
class IndexConfig:
    """The kind of index, and how it is built and searched.

    Attributes:
        kind: exact, ScaNN or FAISS.
        dim: number of first dimensions to search by, for models trained with Matryoshka dimensions;
            None searches by all. Exact indexes alone.
        scann: how a ScaNN index is built.
        faiss: how a FAISS index is built.
    """

    kind: IndexKind = IndexKind.EXACT
    dim: int | None = None
    scann: ScannConfig = dataclasses.field(default_factory=ScannConfig)
    faiss: FaissConfig = dataclasses.field(default_factory=FaissConfig)

    def __post_init__(self) -> None:
        if self.dim is not None and self.kind is not IndexKind.EXACT:
            problem = f"a {self.kind.value} index of the first {self.dim} dimensions"
            fix = "set IndexConfig.kind = 'exact', or leave out IndexConfig.dim"
            raise ConfigError(problem, where="IndexConfig.dim", fix=fix)
        if self.kind is not IndexKind.EXACT:
            _require(self.kind.value, "IndexConfig.kind")


def _require(library: str, where: str) -> None:
    # Not imported, which takes a second.
    if importlib.util.find_spec(library) is None:
        wheels = " (Linux, Python 3.11 to 3.13)" if library == "scann" else ""
        fix = f"{how_to_install(library)}{wheels}, or take an exact index"
        raise ConfigError(f"the package {library} is not installed", where=where, fix=fix)


def build_index(
    embeddings_dir: artifacts.FilePath,
    index_dir: artifacts.FilePath,
    *,
    config: IndexConfig = IndexConfig(),
    sample_queries: Float[np.ndarray, "queries dim"] | None = None,
) -> Searcher:
    """Builds an index of finished embeddings, or opens a finished one.

    An exact index is a pointer to the embeddings with their fingerprints.

    Args:
        embeddings_dir: a directory that `encode_texts` has finished.
        index_dir: where the index goes.
        config: kind and sizes.
        sample_queries: query embeddings that a library's recall is measured on.

    Raises:
        DataError: the embeddings are not finished, or some are not finite.
        FingerprintError: the directory holds an index of other embeddings or another config.
    """
    embeddings = Embeddings(embeddings_dir)
    fingerprints = embeddings.fingerprints
    given: dict[str, Any] = {"fingerprints": fingerprints, "sample_queries": sample_queries}
    if config.kind is IndexKind.SCANN:
        return build_scann(embeddings, index_dir, config=config.scann, **given)
    if config.kind is IndexKind.FAISS:
        return build_faiss(embeddings, index_dir, config=config.faiss, **given)
    plan: dict[str, object] = {
        "format_version": _VERSION,
        "kind": EXACT_KIND,
        "fingerprints": fingerprints,
        "embeddings": artifacts.path_from(index_dir, embeddings_dir),
    }
    if config.dim is not None:
        plan["dim"] = TruncatedEmbeddings(embeddings, config.dim).shape[1]
    for start in range(0, len(embeddings), _BLOCK):
        check_finite(embeddings[start : start + _BLOCK], start, what="passage")
    artifacts.follow_plan(index_dir, plan)
    artifacts.write_json(pathlib.Path(index_dir) / artifacts.METADATA, plan)
    return open_index(index_dir)


def open_index(
    index_dir: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
) -> Searcher:
    """Opens an index of any kind.

    Args:
        index_dir: where `build_index` put it.
        fingerprints: {"model": ..., "collection": ...}, the model and collection that it must have
            been built from.

    Raises:
        ConfigError: it is of a library that is not installed.
        DataError: no finished index there, or its embeddings are gone.
        FingerprintError: it was built from another model or collection, or the embeddings it
            points to have since been replaced.
    """
    directory = pathlib.Path(index_dir)
    kind = artifacts.kind_of(directory)
    if kind == SCANN_KIND:
        _require("scann", os.fspath(directory))
        return ScannSearcher(directory, fingerprints=fingerprints)
    if kind == FAISS_KIND:
        _require("faiss", os.fspath(directory))
        return FaissSearcher(directory, fingerprints=fingerprints)
    metadata = artifacts.read_metadata(
        directory, EXACT_KIND, _VERSION, _Metadata, fingerprints=fingerprints, fix=REBUILD
    )
    embeddings = Embeddings(directory / metadata.embeddings, fingerprints=metadata.fingerprints)
    fingerprints = embeddings.fingerprints
    if metadata.dim is None:
        return ExactSearcher(embeddings, fingerprints=fingerprints)
    passages = TruncatedEmbeddings(embeddings, metadata.dim)
    return TruncatedSearcher(ExactSearcher(passages, fingerprints=fingerprints), passages)
