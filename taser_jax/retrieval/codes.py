"""Embeddings in fewer bits, as vector stores hold them, and the recall that this costs.

int8: c_d = round(x_d / s) with one scale s = max |x| / 127 for all numbers, so that dot products
of codes have the order of s times theirs. binary: the sign of each number as one bit, compared by
the Hamming distance.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from jaxtyping import Float, Num

from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import ExactSearcher, measure_recall
from taser_jax.retrieval.runs import SearchResult, top_k
from taser_jax.storage.errors import ConfigError

# Candidates that are scored again by whole embeddings, as a multiple of k.
_RESCORED = 4
_BLOCK = 1 << 16


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

    def encode(self, embeddings: Float[np.ndarray, "texts dim"]) -> np.ndarray:
        """float32 or int8 [texts, dim], or bits as uint8 [texts, dim / 8], the first highest."""
        if self.codes is Codes.FLOAT32:
            return embeddings.astype(np.float32)
        if self.codes is Codes.BINARY:
            return np.packbits(embeddings > 0, axis=1)
        return np.clip(np.rint(embeddings / self.scale), -127, 127).astype(np.int8)

    def decode(self, codes: Num[np.ndarray, "texts width"]) -> Float[np.ndarray, "texts dim"]:
        """The embeddings that codes stand for, float32; signs for bits."""
        if self.codes is Codes.BINARY:
            return np.unpackbits(codes, axis=1) * np.float32(2) - np.float32(1)
        return codes.astype(np.float32) * np.float32(self.scale)


@dataclasses.dataclass(frozen=True)
class CodedEmbeddings:
    """Embeddings as their codes stand for them.

    Attributes:
        whole: the embeddings on disk.
        coding: their coding.
    """

    whole: Embeddings
    coding: Coding

    @property
    def shape(self) -> tuple[int, int]:
        """(number of passages, dimensions)."""
        return self.whole.shape

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Embeddings of rows start..stop. [stop-start, dim], float32."""
        return self.coding.decode(self.coding.encode(self.whole.rows(start, stop)))


def recall_of_codes(
    embeddings: Embeddings, queries: Float[np.ndarray, "queries dim"], coding: Coding, *, k: int
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
    found = ExactSearcher(CodedEmbeddings(embeddings, coding)).search(asked, _RESCORED * k)
    # Scores as exact search has them, by which ties are counted.
    scores = np.full(found.rows.shape, -np.inf, np.float32)
    for query, rows in enumerate(found.rows):
        there = rows >= 0
        passages = embeddings.take(rows[there]).astype(np.float32)
        scores[query, there] = passages @ queries[query]
    alone = SearchResult(found.rows[:, :k], scores[:, :k])
    rescored = top_k(found.rows, scores, k)
    return {
        "alone": measure_recall(alone, exact),
        "rescored": measure_recall(rescored, exact),
    }
