"""The output of a dual encoder: embeddings, and how routers used their experts.

Statistics of routers are sums over inputs, from which shares, entropies and information follow.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The smallest squared norm divided by: a zero vector stays zero, and so does its gradient.
_SMALLEST_SQUARE = 1e-24


class Normalization(enum.Enum):
    """Whether embeddings are divided by their L2 norm, which makes the dot product the cosine."""

    NONE = "none"
    L2 = "l2"


def normalize(
    embeddings: Float[Array, "batch dim"], normalization: Normalization
) -> Float[Array, "batch dim"]:
    """Divides embeddings by their L2 norms, if configured; zeros stay zeros."""
    if normalization is Normalization.NONE:
        return embeddings
    square = jnp.square(embeddings).sum(-1, keepdims=True)
    return embeddings * jax.lax.rsqrt(jnp.maximum(square, _SMALLEST_SQUARE))


# JAX rebuilds pytrees with leaves that are not arrays: shapes are documented, not checked.
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

    probability_sum: Float[Array, "blocks experts"]
    entropy_sum: Float[Array, " blocks"]
    choice_count: Float[Array, "blocks experts"]
    count: Float[Array, " blocks"]
    logit_sum: Float[Array, "blocks experts"]
    logit_square_sum: Float[Array, "blocks experts"]

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

    embeddings: Float[Array, "batch dim"]
    routing: RoutingStatistics | None


def static_task(query_tasks: Sequence[str], task: str | None) -> str | None:
    """The task's name as `encode` takes it: None where one program serves all tasks.

    Args:
        query_tasks: the model's tasks with a query encoder of their own.
        task: the queries' task.
    """
    return task if query_tasks else None


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
    """I(input; expert) = H(mean_x P) − mean_x H(P(· | x)) in nats, both roles weighing the same.

    0 where every input is routed alike (collapse, or a router that ignores its input); ln(experts)
    where choices are certain and the experts evenly used, by role or within the roles.

    Example:
        A query with P = (1, 0) and two passages with (½, ½): the mean is (¾, ¼), and the
        information is H(¾, ¼) − ½·ln 2 = 0.5623 − 0.3466 = 0.2158 nats.

    Args:
        queries: sums over queries.
        passages: sums over passages.

    Returns:
        One value per specialised block.
    """
    marginal = (mean_probabilities(queries) + mean_probabilities(passages)) / 2
    return entropy(marginal) - (mean_entropy(queries) + mean_entropy(passages)) / 2


def mean_probabilities(statistics: RoutingStatistics) -> Float[Array, "blocks experts"]:
    """mean_x P(· | x)."""
    return statistics.probability_sum / jnp.maximum(statistics.count, 1.0)[:, None]


def mean_entropy(statistics: RoutingStatistics) -> Float[Array, " blocks"]:
    """mean_x H(P(· | x)), in nats."""
    return statistics.entropy_sum / jnp.maximum(statistics.count, 1.0)


def logit_offset(statistics: RoutingStatistics) -> Float[Array, " blocks"]:
    """How far the mean logits of two experts are apart; root mean square over pairs of experts.

    The part that all inputs share. With two experts |mean_x (l_0 − l_1)|. Where it is much larger
    than the `logit_spread`, argmax sends all inputs to one expert, whatever P is.

    Example:
        Logits (1, 0) and (3, 0): differences 1 and 3, offset 2, spread 1.
    """
    mean = statistics.logit_sum / jnp.maximum(statistics.count, 1.0)[:, None]
    return _over_pairs(jnp.square(mean))


def logit_spread(statistics: RoutingStatistics) -> Float[Array, " blocks"]:
    """Standard deviation over inputs of the difference of two logits; as `logit_offset`.

    The part that distinguishes inputs.
    """
    count = jnp.maximum(statistics.count, 1.0)[:, None]
    mean = statistics.logit_sum / count
    return _over_pairs(jnp.maximum(statistics.logit_square_sum / count - jnp.square(mean), 0.0))


def _over_pairs(squares: Float[Array, "blocks experts"]) -> Float[Array, " blocks"]:
    """√ of the mean square difference of two experts, whose sum over experts is 0."""
    return jnp.sqrt(2.0 * jnp.sum(squares, axis=-1) / max(squares.shape[-1] - 1, 1))
