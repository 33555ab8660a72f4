"""Token arrays for models: one batch type from the token store to the training step."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, no_type_check

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

Array = jax.Array | np.ndarray


class Role(enum.Enum):
    """The side of the dual encoder that a text belongs to."""

    QUERY = "query"
    PASSAGE = "passage"


@dataclasses.dataclass(frozen=True)
class HostShare:
    """The parts of a global batch that a host makes.

    On a pod the parts need not be contiguous: devices are ordered by their links, not by host.

    Example:
        >>> HostShare(parts=(0, 3), count=4).rows(8)
        array([0, 1, 6, 7])

    Attributes:
        parts: the host's parts, in ascending order; several hosts may make the same part.
        count: number of equal parts of the global batch.
    """

    parts: tuple[int, ...] = (0,)
    count: int = 1

    def rows(self, num_rows: int) -> Int[np.ndarray, " rows"]:
        """Rows of the host in a global batch of `num_rows`, a multiple of `count`."""
        size = num_rows // self.count
        return (np.array(self.parts)[:, None] * size + np.arange(size)).reshape(-1)


# JAX rebuilds pytrees with leaves that are not arrays (shapes, shardings, scan and vmap slices), so
# these shapes are documented, not checked.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token ids, padded at the end.

    Attributes:
        ids: vocabulary ids, 0-padded. Shape [batch, length], int32.
        mask: True at real tokens. Shape [batch, length], bool.
    """

    ids: Int[Array, "batch length"]
    mask: Bool[Array, "batch length"]


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TeacherEmbeddings:
    """What a teacher made of a batch's texts; inner products are its scores.

    Attributes:
        queries: shape [batch, teacher_dim], float32.
        passages: shape [batch·(1+N), teacher_dim], float32.
    """

    queries: Float[Array, "batch teacher_dim"]
    passages: Float[Array, "passages teacher_dim"]


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Queries and passages of one training step; all of one task.

    Passages are query-major: query i's positive is passage i·(1+N), its N hard negatives follow.
    On several hosts, `queries`, `passages`, `query_rows`, `positive_index` and the first axis of
    `ignore` hold this host's share; `positive_index` and the second axis of `ignore` refer to the
    passages of the *global* batch.

    Attributes:
        queries: shape [batch, query_length].
        passages: shape [batch·(1+N), passage_length].
        positive_index: column of each query's positive among the global batch's passages. [batch]
        ignore: True where a passage must not count as a negative of the query (it is another of
            its positives, or the same passage again); never True at the positive. [batch, passages]
        query_rows: row of each query in its task's query set. [batch]
        passage_rows: row of each passage in the store. [batch·(1+N)]
        teacher_scores: a teacher's scores of each query's positive and hard negatives, NaN where it
            has none; None without a teacher. [batch, 1+N], float32
        teacher_embeddings: a teacher's embeddings of the same texts; None without.
    """

    queries: Tokens
    passages: Tokens
    positive_index: Int[Array, " batch"]
    ignore: Bool[Array, "batch passages"]
    query_rows: Int[Array, " batch"]
    passage_rows: Int[Array, " all_passages"]
    teacher_scores: Float[Array, "batch candidates"] | None = None
    teacher_embeddings: TeacherEmbeddings | None = None


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Sizes of a batch's arrays, over all devices.

    Attributes:
        queries: queries in the batch.
        query_length: tokens of each, padding included.
        passages: positives and hard negatives.
        passage_length: tokens of each, padding included.
        teacher_candidates: passages of a query that a teacher scores; 0 without such scores.
        teacher_dim: dimensions of a teacher's embeddings; 0 without.
    """

    queries: int
    query_length: int
    passages: int
    passage_length: int
    teacher_candidates: int = 0
    teacher_dim: int = 0

    @property
    def sides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(texts, length) of queries and of passages."""
        return (self.queries, self.query_length), (self.passages, self.passage_length)

    @property
    def tokens(self) -> int:
        """Tokens of all texts, padding included."""
        return sum(count * length for count, length in self.sides)

    def chunk(self, num_chunks: int) -> BatchShape:
        """One of `num_chunks` equal parts."""
        return dataclasses.replace(
            self, queries=self.queries // num_chunks, passages=self.passages // num_chunks
        )

    def abstract(self) -> Batch:
        """Shapes and dtypes of the batch's arrays, as `jax.jit(...).lower` takes them."""

        # Any: what stands in the batch's fields is no array.
        def array(dtype: type, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        queries, passages = (Tokens(array(np.int32, *s), array(np.bool_, *s)) for s in self.sides)
        return Batch(
            queries=queries,
            passages=passages,
            positive_index=array(np.int32, self.queries),
            ignore=array(np.bool_, self.queries, self.passages),
            query_rows=array(np.int32, self.queries),
            passage_rows=array(np.int32, self.passages),
            teacher_scores=array(np.float32, self.queries, self.teacher_candidates)
            if self.teacher_candidates
            else None,
            teacher_embeddings=TeacherEmbeddings(
                queries=array(np.float32, self.queries, self.teacher_dim),
                passages=array(np.float32, self.passages, self.teacher_dim),
            )
            if self.teacher_dim
            else None,
        )
