"""MoMA's queries with documents: segments joined for a decoder, and its attention to each of them.

The paper is "Augmenting Zero-Shot Dense Retrievers with Plug-in Mixture-of-Memories" (Ge et al.,
arXiv 2302.03754).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.models.batch import Augmented, Role, States
from taser_jax.models.dual_encoder import Params
from taser_jax.models.t5_layers import ATTENTION


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


def segment_attention(
    scores: Float[Array, "layers batch heads joined"], *, query_length: int, documents: int
) -> Float[Array, "batch segments"]:
    """Attention of a decoder's first position to each segment: the query, then its documents.

    Probabilities are summed over layers, heads and a segment's tokens: this favours long documents.

    Example:
        One layer and head, exp(scores) 2 at a query's token, 2, 2, 2 at a document's and 4 at
        another's: 1/6, 1/2, 1/3.

    Args:
        scores: scores of the cross-attention, masked, before softmax and dropout.
        query_length: positions of the query.
        documents: K.

    Returns:
        One number per segment, which add up to layers·heads; 0 for absent documents.

    Source: equation 9 of the paper.
    """
    real = scores[0, :, 0] > jnp.finfo(scores.dtype).min
    total = jnp.where(real[None, :, None], jax.nn.softmax(scores), 0.0).sum((0, 2))
    query, rest = total[:, :query_length], total[:, query_length:]
    rest = rest.reshape(len(total), documents, -1).sum(-1) if documents else rest[:, :0]
    return jnp.concatenate([query.sum(-1, keepdims=True), rest], axis=1)


def encode_with_attention(
    model: nn.Module,
    params: Params,
    texts: Augmented,
    *,
    task: str | None = None,
) -> tuple[Float[Array, "batch dim"], Float[Array, "batch segments"]]:
    """Embeddings of augmented queries, and the attention to the query's own tokens and documents.

    Args:
        model: a dual encoder whose queries are fused.
        params: its parameters.
        texts: queries with documents.
        task: the queries' task, where tasks have query encoders.
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
    )
    return encoded.embeddings, attention
