"""Search by the first dimensions of embeddings, for models with Matryoshka dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from taser_jax.models.encoded import Normalization
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.runs import SearchResult
from taser_jax.retrieval.searcher import Searcher, check_search
from taser_jax.storage.errors import ConfigError, DataError


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


@dataclasses.dataclass(frozen=True)
class TruncatedEmbeddings:
    """Embeddings that are truncated as they are read.

    Attributes:
        whole: the embeddings on disk.
        dim: number of dimensions kept.
        normalization: the model's normalisation.
    """

    whole: Embeddings
    dim: int
    normalization: Normalization

    @classmethod
    def of(cls, whole: Embeddings, dim: int) -> TruncatedEmbeddings:
        """Truncates embeddings and, where their model normalises, normalises them again.

        Raises:
            ConfigError: more dimensions than there are.
            DataError: embeddings without a record of their normalisation.
        """
        if not 1 <= dim <= whole.shape[1]:
            raise ConfigError(
                f"the first {dim} dimensions of {whole.shape[1]}",
                where="IndexConfig.dim",
                expected=f"1 to {whole.shape[1]}",
                fix="take one of the model's Matryoshka dimensions",
            )
        if "normalization" not in whole.metadata:
            raise DataError(
                "it is not recorded how the embeddings are normalised",
                where=str(whole.directory),
                expected="embeddings that `taser encode` wrote",
                fix="encode again, into another directory",
            )
        return cls(whole, dim, Normalization(whole.metadata["normalization"]))

    @property
    def shape(self) -> tuple[int, int]:
        """(number of passages, dimensions)."""
        return self.whole.shape[0], self.dim

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Embeddings of rows start..stop. [stop-start, dim], float32."""
        return truncate(self.whole.rows(start, stop), self.dim, self.normalization)


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
        passages = self._passages
        check_search(query_embeddings, k, dim=passages.whole.shape[1])
        cut = truncate(query_embeddings, passages.dim, passages.normalization)
        return self._searcher.search(cut, k)
