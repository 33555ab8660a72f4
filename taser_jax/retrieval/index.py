"""Builds and opens indexes of every kind, of whole, truncated or coded embeddings.

Codes hold embeddings in fewer bits, as vector stores do. int8: c_d = round(x_d / s) with one scale
s = max |x| / 127 for all numbers, so that dot products of codes have the order of s times theirs.
binary: the sign of each number as one bit, compared by the Hamming distance.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float, Float32, Num

from taser_jax.models.batch import Normalization
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import (
    ExactSearcher,
    Searcher,
    check_finite,
    check_search,
    measure_recall,
)
from taser_jax.retrieval.faiss_index import KIND as FAISS_KIND
from taser_jax.retrieval.faiss_index import FaissConfig, FaissSearcher, build_faiss
from taser_jax.retrieval.runs import SearchResult, top_k
from taser_jax.retrieval.scann import KIND as SCANN_KIND
from taser_jax.retrieval.scann import ScannConfig, ScannSearcher, build_scann
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.typed_files import Positive

_BLOCK = 1 << 16
# Candidates that are scored again by whole embeddings, as a multiple of k.
RESCORED = 4


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

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Embeddings of rows start..stop. [stop-start, dim], float32."""
        return truncate(self.whole.rows(start, stop), self.shape[1], self.normalization)


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


class Codes(enum.Enum):
    """How an exported number is written; int8 takes a quarter of float32, binary a 32nd."""

    FLOAT32 = "float32"
    INT8 = "int8"
    BINARY = "binary"


@dataclasses.dataclass(frozen=True)
class Coding:
    """Codes of embeddings.

    Example:
        >>> coding = Coding(Codes.INT8, scale=0.5)
        >>> coding.encode(np.array([[1.0, -0.3]])).tolist()
        [[2, -1]]
        >>> Coding(Codes.BINARY).decode(np.array([[0b10100000]], np.uint8)).tolist()
        [[1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0]]

    Attributes:
        codes: how numbers are written.
        scale: what int8 codes are multiplied by.
    """

    codes: Codes = Codes.FLOAT32
    scale: float = 1.0

    @classmethod
    def of(cls, codes: Codes, embeddings: Embeddings) -> Coding:
        """The coding of some embeddings.

        Raises:
            ConfigError: binary codes of dimensions that fill no whole bytes.
        """
        count, dim = embeddings.shape
        if codes is Codes.BINARY and dim % 8:
            problem, fix = f"binary codes of {dim} dimensions, no multiple of 8", "take int8"
            raise ConfigError(problem, where="EmbeddingsExport.codes", fix=fix)
        if codes is not Codes.INT8:
            return cls(codes)
        blocks = (embeddings.rows(row, row + _BLOCK) for row in range(0, count, _BLOCK))
        largest = max(float(np.abs(block.astype(np.float32)).max()) for block in blocks)
        return cls(codes, largest / 127 or 1.0)

    def encode(self, embeddings: Float[np.ndarray, "texts dim"]) -> Num[np.ndarray, "texts width"]:
        """float32 or int8 [texts, dim], or bits as uint8 [texts, dim / 8], the first highest."""
        numbers = embeddings.astype(np.float32)
        if self.codes is Codes.FLOAT32:
            return numbers
        if self.codes is Codes.BINARY:
            return np.packbits(numbers > 0, axis=1)
        return np.clip(np.rint(numbers / self.scale), -127, 127).astype(np.int8)

    def decode(self, codes: Num[np.ndarray, "texts width"]) -> Float32[np.ndarray, "texts dim"]:
        """The embeddings that codes stand for; signs for bits."""
        if self.codes is Codes.BINARY:
            return np.unpackbits(codes, axis=1) * np.float32(2) - np.float32(1)
        return codes.astype(np.float32) * np.float32(self.scale)


@dataclasses.dataclass(frozen=True)
class _Coded:
    """Embeddings as their codes have them, coded and decoded as they are read."""

    whole: Embeddings
    coding: Coding

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.coding.decode(self.coding.encode(self.whole.rows(start, stop)))


def recall_of_codes(
    embeddings: Embeddings, queries: Float32[np.ndarray, "queries dim"], coding: Coding, *, k: int
) -> dict[str, float]:
    """Share of the exact top k that codes find.

    Args:
        embeddings: the passages'.
        queries: embeddings of queries; binary search takes their signs, int8 takes them whole.
        coding: the passages' coding.
        k: results per query.

    Returns:
        "alone": of the k best by codes; "rescored": of the 4k best by codes, ordered again by whole
        embeddings.
    """
    exact = ExactSearcher(embeddings).search(queries, k)
    asked = coding.decode(coding.encode(queries)) if coding.codes is Codes.BINARY else queries
    by_codes = ExactSearcher(_Coded(embeddings, coding)).search(asked, RESCORED * k)
    # Scores as exact search has them, by which ties are counted.
    scores = np.full(by_codes.rows.shape, -np.inf, np.float32)
    for query, rows in enumerate(by_codes.rows):
        there = rows >= 0
        passages = embeddings.take(rows[there]).astype(np.float32)
        scores[query, there] = passages @ queries[query]
    alone = SearchResult(by_codes.rows[:, :k], scores[:, :k])
    rescored = top_k(by_codes.rows, scores, k)
    return {
        "alone": measure_recall(alone, exact),
        "rescored": measure_recall(rescored, exact),
    }


EXACT_KIND = "exact index"
INDEX_KINDS = (EXACT_KIND, SCANN_KIND, FAISS_KIND)
_VERSION = 1


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
    config: IndexConfig | None = None,
    sample_queries: Float[np.ndarray, "queries dim"] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Searcher:
    """Builds an index of finished embeddings, or opens a finished one.

    An exact index is a pointer to the embeddings with their fingerprints.

    Args:
        embeddings_dir: a directory that `encode_texts` has finished.
        index_dir: where the index goes.
        config: kind and sizes.
        sample_queries: query embeddings that a library's recall is measured on.
        devices: devices of exact search; default: the first.

    Raises:
        DataError: the embeddings are not finished, or some are not finite.
        FingerprintError: the directory holds an index of other embeddings or another config.
    """
    config = config or IndexConfig()
    embeddings = Embeddings.open(embeddings_dir)
    fingerprints = embeddings.fingerprints
    if config.kind is IndexKind.SCANN:
        return build_scann(
            embeddings,
            index_dir,
            fingerprints=fingerprints,
            config=config.scann,
            sample_queries=sample_queries,
        )
    if config.kind is IndexKind.FAISS:
        return build_faiss(
            embeddings,
            index_dir,
            fingerprints=fingerprints,
            config=config.faiss,
            sample_queries=sample_queries,
        )
    plan: dict[str, object] = {
        "format_version": _VERSION,
        "kind": EXACT_KIND,
        "fingerprints": fingerprints,
        "embeddings": os.path.relpath(embeddings_dir, index_dir),
    }
    if config.dim is not None:
        plan["dim"] = TruncatedEmbeddings(embeddings, config.dim).shape[1]
    for start in range(0, len(embeddings), _BLOCK):
        check_finite(embeddings.rows(start, start + _BLOCK), start, what="passage")
    artifacts.follow_plan(index_dir, plan)
    artifacts.write_json(pathlib.Path(index_dir) / artifacts.METADATA, plan)
    return open_index(index_dir, devices=devices)


def open_index(
    index_dir: artifacts.FilePath,
    *,
    fingerprints: Mapping[str, str] | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Searcher:
    """Opens an index of any kind.

    Args:
        index_dir: where `build_index` put it.
        fingerprints: {"model": ..., "collection": ...}, the model and collection that it must have
            been built from.
        devices: devices of exact search; default: the first.

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
    metadata = artifacts.read_metadata(directory, EXACT_KIND, _VERSION, _Metadata)
    embeddings = Embeddings.open(
        directory / metadata.embeddings, fingerprints=metadata.fingerprints
    )
    artifacts.require_equal(
        f"exact index {directory}",
        embeddings.fingerprints,
        fingerprints or {},
        "build the index from this model's embeddings, into another directory",
    )
    fingerprints = embeddings.fingerprints
    if metadata.dim is None:
        return ExactSearcher(embeddings, devices=devices, fingerprints=fingerprints)
    passages = TruncatedEmbeddings(embeddings, metadata.dim)
    searcher = ExactSearcher(passages, devices=devices, fingerprints=fingerprints)
    return TruncatedSearcher(searcher, passages)
