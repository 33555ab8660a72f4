"""How routers use their experts: shares, entropies and information, from sums over inputs."""

from __future__ import annotations

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


# JAX rebuilds pytrees with leaves that are no arrays: shapes are told here, not checked.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingStatistics:
    """Sums over routed inputs, so that statistics of chunks or devices add up; all float32.

    An input is a sequence (Seq-R) or a token (Tok-R); padding tokens, and rows of padding only,
    count for nothing. P = softmax(A·u + c), without noise or temperature (Eq. 4).

    Attributes:
        probability_sum: Σ P. [blocks, experts]
        entropy_sum: Σ −P·log P in nats: the paper's per-input entropy. [blocks]
        choice_count: how many inputs argmax P sends to each expert, as at inference.
            [blocks, experts]
        count: how many inputs. [blocks]
    """

    probability_sum: Float[Array, "blocks experts"]
    entropy_sum: Float[Array, " blocks"]
    choice_count: Float[Array, "blocks experts"]
    count: Float[Array, " blocks"]

    def __add__(self, other: RoutingStatistics) -> RoutingStatistics:
        return jax.tree.map(jnp.add, self, other)


def entropy(probabilities: Float[Array, "blocks experts"]) -> Float[Array, " blocks"]:
    """−Σ p·ln p of each block, in nats; its gradient is finite where p = 0."""
    # 0·log 0 = 0, and its gradient must not be NaN: both branches stay finite.
    positive = probabilities > 0
    logs = jnp.log(jnp.where(positive, probabilities, 1.0))
    return -jnp.sum(jnp.where(positive, probabilities * logs, 0.0), axis=-1)


def expert_shares(statistics: RoutingStatistics) -> Float[Array, "blocks experts"]:
    """Share of inputs that argmax P sends to each expert; a block's sum to 1."""
    return statistics.choice_count / jnp.maximum(statistics.count, 1.0)[:, None]


def input_information(
    queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, " blocks"]:
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


def role_information(
    queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, " blocks"]:
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
