"""What models read and write: one batch type from the token store to the step, and its output."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

Array = jax.Array | np.ndarray


class Role(enum.Enum):
    """The side of the dual encoder that a text belongs to."""

    QUERY = "query"
    PASSAGE = "passage"


class Normalization(enum.Enum):
    """Whether embeddings are divided by their L2 norm, which makes the dot product the cosine."""

    NONE = "none"
    L2 = "l2"


def _columns(array: Array, length: int) -> np.ndarray:
    """The first `length` columns, padded with 0 where there are fewer."""
    missing = max(length - array.shape[1], 0)
    return np.pad(array[:, :length], [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])


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

    def resized(self, length: int) -> Tokens:
        """The same texts in arrays of `length` columns; what is cut off must be padding."""
        return jax.tree.map(lambda array: _columns(array, length), self)


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """The output of frozen blocks, in place of a text's tokens; padded at the end.

    Attributes:
        hidden: output of the last frozen block. Shape [batch, length, embed].
        mask: True at real tokens. Shape [batch, length], bool.
    """

    hidden: Float[Array, "batch length embed"]
    mask: Bool[Array, "batch length"]

    def resized(self, length: int) -> States:
        """The same texts in arrays of `length` columns; what is cut off must be padding."""
        return jax.tree.map(lambda array: _columns(array, length), self)


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Embedded:
    """Embeddings that a frozen tower gave texts, in place of the texts: nothing is encoded again.

    Attributes:
        embeddings: as the tower made them. Shape [batch, dim], float32.
    """

    embeddings: Float[Array, "batch dim"]

    @property
    def mask(self) -> Bool[np.ndarray, "batch 0"]:
        """No token is computed."""
        return np.zeros((len(self.embeddings), 0), bool)

    def resized(self, length: int) -> Embedded:
        """The same texts: they have no padding."""
        del length
        return self


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Augmented:
    """Queries with the K documents that a memory gave for each (MoMA, equation 2).

    Attributes:
        query: the queries.
        documents: tokens [batch, K, document_length], states of frozen blocks [batch, K,
            document_length, embed], or, for late fusion, the documents' embeddings [batch, K, dim].
        present: False where a query has fewer than K documents. [batch, K]
    """

    query: Tokens | States
    documents: Tokens | States | Float[Array, "batch documents dim"]
    present: Bool[Array, "batch documents"]

    @property
    def mask(self) -> Bool[Array, "batch length"]:
        """True at the queries' real tokens."""
        return self.query.mask

    @property
    def flat_documents(self) -> Tokens | States:
        """Their tokens or states, as batch·K texts."""
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), self.documents)

    def resized(self, length: int) -> Augmented:
        """The same texts with queries of `length` columns; what is cut off must be padding."""
        return dataclasses.replace(self, query=self.query.resized(length))


# Number of texts, and the tokens of each with padding.
TextsShape = tuple[int, int]
# Texts of one length, in whatever form a model takes them.
EncoderInput = Tokens | States | Augmented | Embedded


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenGroups:
    """Texts in groups of similar length, each padded to a length of its own.

    On several hosts, each group holds this host's share of its rows, and `place` that of the texts.

    Attributes:
        groups: the texts, short ones first.
        place: row of each text among all rows of the groups, one group after another. [batch]
    """

    groups: tuple[EncoderInput, ...]
    place: Int[Array, " batch"]


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Queries and passages of one training step; all of one task.

    Passages are query-major: query i's positive is passage i·(1+N), its N hard negatives follow.
    Texts in groups are in this order after `place`.
    On several hosts, `queries`, `passages`, `query_rows`, `positive_index` and the first axis of
    `ignore` hold this host's share; `positive_index` and the second axis of `ignore` refer to the
    passages of the *global* batch.

    Attributes:
        queries: shape [batch, query_length], or groups; with documents where a memory is used.
        passages: shape [batch·(1+N), passage_length], or groups; embedded by a frozen tower.
        positive_index: column of each query's positive among the global batch's passages. [batch]
        ignore: True where a passage must not count as a negative of the query (it is another of
            its positives, or the same passage again); never True at the positive. [batch, passages]
        query_rows: row of each query in its task's query set. [batch]
        passage_rows: row of each passage in the store. [batch·(1+N)]
    """

    queries: Tokens | States | Augmented | TokenGroups
    passages: Tokens | States | Embedded | TokenGroups
    positive_index: Int[Array, " batch"]
    ignore: Bool[Array, "batch columns"]
    query_rows: Int[Array, " batch"]
    passage_rows: Int[Array, " all_passages"]

    @property
    def texts(self) -> list[EncoderInput]:
        """The texts of both sides, groups one by one."""
        return [*groups_of(self.queries), *groups_of(self.passages)]

    @property
    def masks(self) -> list[Bool[Array, "..."]]:
        """True at the real tokens of all texts, and of the documents that queries come with."""
        masks = [texts.mask for texts in self.texts]
        for queries in groups_of(self.queries):
            if isinstance(queries, Augmented) and isinstance(queries.documents, Tokens | States):
                masks.append(queries.documents.mask & queries.present[..., None])
        return masks

    @property
    def sides(self) -> tuple[TextsShape, ...]:
        """(texts, length) of queries and of passages, or of all their groups."""
        return sizes_of(self.queries) + sizes_of(self.passages)

    @property
    def memory(self) -> DocumentsShape | None:
        """The documents of queries that a memory augments; None without."""
        first = groups_of(self.queries)[0]
        if not isinstance(first, Augmented):
            return None
        per_query, documents = first.present.shape[1], first.documents
        if isinstance(documents, Tokens | States):
            return DocumentsShape(per_query, documents.mask.shape[2])
        return DocumentsShape(per_query, 1, documents.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens of all texts, padding included; documents that come as embeddings have none."""
        memory, queries = self.memory, len(self.query_rows)
        documents = 0 if memory is None or memory.dim else memory.per_query * memory.length
        return sum(count * length for count, length in self.sides) + queries * documents


def groups_of(texts: EncoderInput | TokenGroups) -> tuple[EncoderInput, ...]:
    """The arrays of one side."""
    return texts.groups if isinstance(texts, TokenGroups) else (texts,)


def sizes_of(texts: EncoderInput | TokenGroups) -> tuple[TextsShape, ...]:
    """(texts, length) of one side, or of each of its groups."""
    return tuple((each.mask.shape[0], each.mask.shape[1]) for each in groups_of(texts))


@dataclasses.dataclass(frozen=True)
class DocumentsShape:
    """Sizes of what a memory adds to queries.

    Attributes:
        per_query: documents of a query, K.
        length: tokens of each, padding included; 1 for embeddings.
        dim: width of the embeddings that stand for them; 0 where they come as tokens.
    """

    per_query: int
    length: int
    dim: int = 0


def abstract_batch(
    queries: TextsShape, passages: TextsShape, *, memory: DocumentsShape | None = None
) -> Batch:
    """Shapes and dtypes of a batch's arrays, over all devices, as `jax.jit(...).lower` takes them.

    Args:
        queries: number of queries, and tokens of each with padding.
        passages: the same of positives and hard negatives.
        memory: documents of queries that a memory augments.
    """
    count = queries[0]
    return Batch(
        queries=_abstract_queries(queries, memory),
        passages=_abstract_tokens(*passages),
        positive_index=_abstract(np.int32, count),
        ignore=_abstract(np.bool_, count, passages[0]),
        query_rows=_abstract(np.int32, count),
        passage_rows=_abstract(np.int32, passages[0]),
    )


def in_groups(batch: Batch, queries: Iterable[TextsShape], passages: Iterable[TextsShape]) -> Batch:
    """An abstract batch with the same texts in groups of (texts, length)."""
    of_queries = tuple(_abstract_queries(group, batch.memory) for group in queries)
    of_passages = tuple(itertools.starmap(_abstract_tokens, passages))
    return dataclasses.replace(
        batch,
        queries=TokenGroups(of_queries, place=batch.query_rows),
        passages=TokenGroups(of_passages, place=batch.passage_rows),
    )


def _abstract_queries(shape: TextsShape, memory: DocumentsShape | None) -> Tokens | Augmented:
    texts = _abstract_tokens(*shape)
    if memory is None:
        return texts
    each = (shape[0], memory.per_query)
    documents = (
        _abstract(np.float32, *each, memory.dim)
        if memory.dim
        else _abstract_tokens(*each, memory.length)
    )
    return Augmented(texts, documents, _abstract(np.bool_, *each))


def _abstract_tokens(*shape: int) -> Tokens:
    return Tokens(_abstract(np.int32, *shape), _abstract(np.bool_, *shape))


# Any: what stands in the batch's fields is no array.
def _abstract(dtype: type, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingStatistics:
    """Sums over routed inputs, so that statistics of chunks or devices add up; all float32.

    An input is a sequence (Seq-R) or a token (Tok-R); padding tokens, and rows of padding only,
    do not count. P = softmax(A·u + c), without noise or temperature (Eq. 4).

    Attributes:
        probability_sum: Σ P. [blocks, experts]
        entropy_sum: Σ −P·log P in nats: the paper's per-input entropy. [blocks]
        choice_count: how many inputs argmax P sends to each expert, as at inference.
            [blocks, experts]
        count: how many inputs. [blocks]
        logit_sum: Σ z, z being A·u + c minus its mean over experts. [blocks, experts]
        logit_square_sum: Σ z². [blocks, experts]
    """

    probability_sum: Float[jax.Array, "blocks experts"]
    entropy_sum: Float[jax.Array, " blocks"]
    choice_count: Float[jax.Array, "blocks experts"]
    count: Float[jax.Array, " blocks"]
    logit_sum: Float[jax.Array, "blocks experts"]
    logit_square_sum: Float[jax.Array, "blocks experts"]

    def __add__(self, other: RoutingStatistics) -> RoutingStatistics:
        return jax.tree.map(jnp.add, self, other)


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """The result of `encode`.

    Attributes:
        embeddings: their dot products are the scores. [batch, dim], float32.
        routing: statistics of learned routers; None with Det-R and without experts.
    """

    embeddings: Float[jax.Array, "batch dim"]
    routing: RoutingStatistics | None


def static_task(query_tasks: Sequence[str], task: str | None) -> str | None:
    """The task's name as `encode` takes it: None where one program serves all tasks.

    Args:
        query_tasks: the model's tasks with a query encoder of their own.
        task: the queries' task.
    """
    return task if query_tasks else None
