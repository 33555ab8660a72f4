"""How routers use their experts: shares, entropies and information, from sums over inputs."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float


@runtime_checkable
class RoutingSums(Protocol):
    """What a learned router adds up over its inputs (sequences, or non-padding tokens).

    All are float32 sums, so statistics of chunks and of devices add up to those of the batch.

    Attributes:
        probability_sum: Σ_x P(expert | x). Shape [blocks, experts].
        entropy_sum: Σ_x H(P(· | x)), in nats. Shape [blocks].
        choice_count: inputs that argmax P sends to each expert. Shape [blocks, experts].
        count: number of inputs. Shape [blocks].
    """

    probability_sum: Any
    entropy_sum: Any
    choice_count: Any
    count: Any


def entropy(probabilities: Float[Array, "blocks experts"]) -> Float[Array, " blocks"]:
    """−Σ p·ln p of each block, in nats; its gradient is finite where p = 0."""
    # 0·log 0 = 0, and its gradient must not be NaN: both branches stay finite.
    positive = probabilities > 0
    logs = jnp.log(jnp.where(positive, probabilities, 1.0))
    return -jnp.sum(jnp.where(positive, probabilities * logs, 0.0), axis=-1)


def expert_shares(statistics: RoutingSums) -> Float[Array, "blocks experts"]:
    """Share of inputs that argmax P sends to each expert; a block's sum to 1."""
    return statistics.choice_count / jnp.maximum(statistics.count, 1.0)[:, None]


def input_information(queries: RoutingSums, passages: RoutingSums) -> Float[Array, " blocks"]:
    """I(input; expert) = H(mean_x P) − mean_x H(P(· | x)) over all inputs, in nats.

    0 where every input is routed alike (collapse, or a router that does not look); ln(experts)
    where choices are certain and the experts evenly used.

    Args:
        queries: sums over queries.
        passages: sums over passages.

    Returns:
        One value a specialised block.
    """
    count = jnp.maximum(queries.count + passages.count, 1.0)
    marginal = (queries.probability_sum + passages.probability_sum) / count[:, None]
    return entropy(marginal) - (queries.entropy_sum + passages.entropy_sum) / count


def role_information(queries: RoutingSums, passages: RoutingSums) -> Float[Array, " blocks"]:
    """I(role; expert) in nats, from argmax choices, both roles weighing the same.

    H(p) − ½(H(p_query) + H(p_passage)) with p = ½(p_query + p_passage): 0 where both roles use
    the experts alike, ln 2 where they never meet (as Det-R does). Weighing roles equally keeps it
    independent of how many passages (or tokens) there are for a query.

    Example:
        Queries go 3 : 1, passages 1 : 3, so p = (½, ½) and the information is
        ln 2 − H(¾, ¼) = 0.6931 − 0.5623 = 0.1308 nats.

    Args:
        queries: sums over queries.
        passages: sums over passages.

    Returns:
        One value a specialised block, 0 to 0.6931.
    """
    query, passage = expert_shares(queries), expert_shares(passages)
    return entropy((query + passage) / 2) - (entropy(query) + entropy(passage)) / 2
