"""Builds and opens indexes of every kind."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import ExactConfig, ExactSearcher
from taser_jax.retrieval.scann_index import KIND as SCANN_KIND
from taser_jax.retrieval.scann_index import ScannSearcher, build_scann
from taser_jax.retrieval.scann_shards import ScannConfig
from taser_jax.retrieval.searcher import Searcher, check_finite
from taser_jax.retrieval.truncation import TruncatedEmbeddings, TruncatedSearcher
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.json_fields import JsonField, JsonType

_EXACT_KIND = "exact index"
_BLOCK = 1 << 16
_VERSION = 1
_EXACT_FIELDS = {
    "fingerprints": artifacts.FINGERPRINTS,
    "embeddings": JsonField(JsonType.STRING, required=True),
    "dim": JsonField(JsonType.INTEGER, minimum=1),
}


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
        exact: block sizes of exact search.
        scann: how a ScaNN index is built.
    """

    kind: IndexKind = IndexKind.EXACT
    dim: int | None = None
    exact: ExactConfig = dataclasses.field(default_factory=ExactConfig)
    scann: ScannConfig = dataclasses.field(default_factory=ScannConfig)

    def __post_init__(self) -> None:
        if self.dim is not None and self.kind is not IndexKind.EXACT:
            raise ConfigError(
                f"the first {self.dim} dimensions in a {self.kind.value} index",
                where="IndexConfig.dim",
                expected="an exact index",
                fix="set IndexConfig.kind = 'exact', or leave out IndexConfig.dim",
            )


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
    plan: dict[str, Any] = {
        "format_version": _VERSION,
        "kind": _EXACT_KIND,
        "fingerprints": embeddings.fingerprints,
        "embeddings": os.path.relpath(embeddings_dir, index_dir),
    }
    if config.dim is not None:
        plan["dim"] = TruncatedEmbeddings.of(embeddings, config.dim).dim
    for start in range(0, len(embeddings), _BLOCK):
        check_finite(embeddings.rows(start, start + _BLOCK), start, what="passage")
    artifacts.follow_plan(index_dir, plan)
    artifacts.write_json(pathlib.Path(index_dir) / artifacts.METADATA, plan)
    return open_index(index_dir, exact=config.exact, devices=devices)


def open_index(
    index_dir: artifacts.FilePath,
    *,
    fingerprints: Mapping[str, str] | None = None,
    exact: ExactConfig | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Searcher:
    """Opens an index of either kind.

    Args:
        index_dir: where `build_index` put it.
        fingerprints: {"model": ..., "collection": ...}, the model and collection that it must have
            been built from.
        exact: block sizes of exact search.
        devices: devices of exact search; default: the first.

    Raises:
        DataError: no finished index there, or its embeddings are gone.
        FingerprintError: it was built from another model or collection, or the embeddings it
            points to have since been replaced.
    """
    directory = pathlib.Path(index_dir)
    if artifacts.kind_of(directory) == SCANN_KIND:
        return ScannSearcher.open(directory, fingerprints=fingerprints)
    metadata = artifacts.read_metadata(directory, _EXACT_KIND, _VERSION, fields=_EXACT_FIELDS)
    embeddings = Embeddings.open(
        directory / metadata["embeddings"], fingerprints=metadata["fingerprints"]
    )
    artifacts.require_equal(
        f"exact index {directory}",
        embeddings.fingerprints,
        fingerprints or {},
        "build the index from this model's embeddings, into another directory",
    )
    options: dict[str, Any] = {
        "config": exact,
        "devices": devices,
        "fingerprints": embeddings.fingerprints,
    }
    if "dim" not in metadata:
        return ExactSearcher(embeddings, **options)
    truncated = TruncatedEmbeddings.of(embeddings, metadata["dim"])
    return TruncatedSearcher(ExactSearcher(truncated, **options), truncated)
