"""MoMA's queries with documents: segments joined for a decoder, and its attention to each of them.

The paper is "Augmenting Zero-Shot Dense Retrievers with Plug-in Mixture-of-Memories" (Ge et al.,
arXiv 2302.03754).
"""

from __future__ import annotations

import enum
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.models.batch import Augmented, Role, States, Tokens
from taser_jax.models.dual_encoder import Params
from taser_jax.models.t5_layers import ATTENTION


class DocumentInput(enum.Enum):
    """The encoder's input for a document: its text alone (MoMA), or preceded by the query (FiD)."""

    ALONE = "alone"
    WITH_QUERY = "with_query"


class FidAttention(enum.Enum):
    """How the decoder's attention to a document becomes one number.

    SUM: probabilities summed over layers, heads and the document's tokens (MoMA, equation 9); this
        favours long documents.
    MEAN: that sum divided by the number of the document's tokens.
    SCORES: scores before the softmax, averaged over layers, heads and the document's real tokens,
        as in FiD's released code.
    """

    SUM = "sum"
    MEAN = "mean"
    SCORES = "scores"


def join_segments(
    query: States, documents: States, present: Bool[Array, "batch documents"]
) -> States:
    """Enc(q), Enc(d₁) … Enc(d_K), one after another, masked at padding and absent documents.

    Args:
        query: states of the queries.
        documents: states of batch·K texts.
        present: which documents exist.
    """
    batch, embed = len(present), query.hidden.shape[-1]
    mask = documents.mask.reshape(*present.shape, -1) & present[..., None]
    return States(
        jnp.concatenate([query.hidden, documents.hidden.reshape(batch, -1, embed)], axis=1),
        jnp.concatenate([query.mask, mask.reshape(batch, -1)], axis=1),
    )


def with_query(texts: Augmented) -> Tokens:
    """Each document's tokens after its query's, as batch·K texts; padding stays at the end."""
    query, documents = texts.query, texts.flat_documents
    assert isinstance(query, Tokens)
    assert isinstance(documents, Tokens)
    count = texts.present.shape[1]
    ids = jnp.concatenate([jnp.repeat(query.ids, count, axis=0), documents.ids], axis=1)
    mask = jnp.concatenate([jnp.repeat(query.mask, count, axis=0), documents.mask], axis=1)
    # A stable sort moves the query's padding behind the document's tokens.
    order = jnp.argsort(~mask, axis=1, stable=True)
    return Tokens(*(jnp.take_along_axis(array, order, axis=1) for array in (ids, mask)))


def segment_attention(
    scores: Float[Array, "layers batch heads joined"],
    *,
    query_length: int,
    documents: int,
    kind: FidAttention = FidAttention.SUM,
) -> Float[Array, "batch segments"]:
    """Attention of a decoder's first position to each segment: the query, then its documents.

    Example:
        One layer and head, exp(scores) 2 at a query's token, 2, 2, 2 at a document's and 4 at
        another's: SUM gives 1/6, 1/2, 1/3. SCORES gives ln 2 = 0.693 and ln 4 = 1.386 for the
        documents, which reverses their order.

    Args:
        scores: scores of the cross-attention, masked, before softmax and dropout.
        query_length: positions of the query.
        documents: K.
        kind: the measure.

    Returns:
        One number per segment; SUM's add up to layers·heads. Absent documents have 0, or -inf for
        SCORES.

    Source: equation 9 of the paper.
    """
    real = scores[0, :, 0] > jnp.finfo(scores.dtype).min
    is_scores = kind is FidAttention.SCORES
    values = jnp.where(real[None, :, None], scores if is_scores else jax.nn.softmax(scores), 0.0)

    def by_segment(values: Float[Array, "batch joined"]) -> Float[Array, "batch segments"]:
        query, rest = values[:, :query_length], values[:, query_length:]
        rest = rest.reshape(len(values), documents, -1).sum(-1) if documents else rest[:, :0]
        return jnp.concatenate([query.sum(-1, keepdims=True), rest], axis=1)

    total = by_segment(values.sum((0, 2)))
    if kind is FidAttention.SUM:
        return total
    tokens = by_segment(real.astype(jnp.float32))
    mean = total / jnp.maximum(tokens, 1.0)
    if kind is FidAttention.MEAN:
        return mean
    return jnp.where(tokens > 0, mean / (scores.shape[0] * scores.shape[2]), -jnp.inf)


def encode_with_attention(
    model: nn.Module,
    params: Params,
    texts: Augmented,
    *,
    task: str | None = None,
    kind: FidAttention = FidAttention.SUM,
) -> tuple[Float[Array, "batch dim"], Float[Array, "batch segments"]]:
    """Embeddings of augmented queries, and the attention to the query's own tokens and documents.

    Args:
        model: a dual encoder whose queries are fused.
        params: its parameters.
        texts: queries with documents.
        task: the queries' task, where tasks have query encoders.
        kind: the measure.
    """
    variables = {"params": params}
    encoded: Any
    encoded, sown = model.apply(
        variables, texts, role=Role.QUERY, task=task, method="encode", mutable=[ATTENTION]
    )
    attention = segment_attention(
        jnp.stack(jax.tree.leaves(sown[ATTENTION])),
        query_length=texts.mask.shape[1],
        documents=texts.present.shape[1],
        kind=kind,
    )
    return encoded.embeddings, attention
