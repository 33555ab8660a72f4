"""Builds and opens indexes of every kind, of whole or truncated embeddings."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float

from taser_jax.models.batch import Normalization
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import ExactSearcher, Searcher, check_finite, check_search
from taser_jax.retrieval.runs import SearchResult
from taser_jax.retrieval.scann import KIND as SCANN_KIND
from taser_jax.retrieval.scann import ScannConfig, ScannSearcher, build_scann
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.typed_files import Positive

_BLOCK = 1 << 16


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


EXACT_KIND = "exact index"
INDEX_KINDS = (EXACT_KIND, SCANN_KIND)
_VERSION = 1


class _Metadata(artifacts.Metadata, frozen=True):
    embeddings: str
    dim: Positive | None = None


class IndexKind(enum.Enum):
    """Exact search on device, or ScaNN's approximate search on the host."""

    EXACT = "exact"
    SCANN = "scann"


@dataclasses.dataclass(frozen=True)
class IndexConfig:
    """The kind of index, and how it is built and searched.

    Attributes:
        kind: exact or ScaNN.
        dim: number of first dimensions to search by, for models trained with Matryoshka dimensions;
            None searches by all. Exact indexes alone.
        scann: how a ScaNN index is built.
    """

    kind: IndexKind = IndexKind.EXACT
    dim: int | None = None
    scann: ScannConfig = dataclasses.field(default_factory=ScannConfig)

    def __post_init__(self) -> None:
        if self.dim is not None and self.kind is not IndexKind.EXACT:
            problem = f"a {self.kind.value} index of the first {self.dim} dimensions"
            fix = "set IndexConfig.kind = 'exact', or leave out IndexConfig.dim"
            raise ConfigError(problem, where="IndexConfig.dim", fix=fix)
        if self.kind is IndexKind.SCANN:
            _require_scann("IndexConfig.kind")


def _require_scann(where: str) -> None:
    # Not imported, which takes a second.
    if importlib.util.find_spec("scann") is None:
        fix = f"{how_to_install('scann')} (Linux, Python 3.11 to 3.13), or take an exact index"
        raise ConfigError("ScaNN is not installed", where=where, fix=fix)


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
        sample_queries: query embeddings that ScaNN's recall is measured on.
        devices: devices of exact search; default: the first.

    Raises:
        DataError: the embeddings are not finished, or some are not finite.
        FingerprintError: the directory holds an index of other embeddings or another config.
    """
    config = config or IndexConfig()
    embeddings = Embeddings.open(embeddings_dir)
    if config.kind is IndexKind.SCANN:
        return build_scann(
            embeddings,
            index_dir,
            fingerprints=embeddings.fingerprints,
            config=config.scann,
            sample_queries=sample_queries,
        )
    plan: dict[str, object] = {
        "format_version": _VERSION,
        "kind": EXACT_KIND,
        "fingerprints": embeddings.fingerprints,
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
    """Opens an index of either kind.

    Args:
        index_dir: where `build_index` put it.
        fingerprints: {"model": ..., "collection": ...}, the model and collection that it must have
            been built from.
        devices: devices of exact search; default: the first.

    Raises:
        ConfigError: it is a ScaNN index, and ScaNN, an extra, is not installed.
        DataError: no finished index there, or its embeddings are gone.
        FingerprintError: it was built from another model or collection, or the embeddings it
            points to have since been replaced.
    """
    directory = pathlib.Path(index_dir)
    if artifacts.kind_of(directory) == SCANN_KIND:
        _require_scann(os.fspath(directory))
        return ScannSearcher(directory, fingerprints=fingerprints)
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
