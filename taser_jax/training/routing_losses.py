"""Entropy of expert choice, as a regulariser."""

from __future__ import annotations

import dataclasses
import enum

import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax import expert_use
from taser_jax.expert_use import RoutingStatistics


class EntropyKind(enum.Enum):
    """Which entropy is meant.

    PER_INPUT: H(P(· | x)) of each input, then the mean over inputs: how undecided the router is.
    BATCH_MARGINAL: H(mean_x P(· | x)): how evenly the experts are used.
    """

    PER_INPUT = "per_input"
    BATCH_MARGINAL = "batch_marginal"


class Direction(enum.Enum):
    """Whether training raises or lowers the entropy."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


@dataclasses.dataclass(frozen=True)
class RoutingRegularizer:
    """The term weight·(∓H) that is added to the contrastive loss.

    TASER's appendix A writes L = L_sim + β·L_ent with L_ent = −Σ P log P and β = 0.01. Read
    literally that lowers entropy, against its stated purpose of avoiding collapse; the released
    code adds +Σ P log P, which raises it. The default follows the purpose; `MINIMIZE` is the
    formula to the letter.

    Attributes:
        kind: the paper's per-input entropy, or the batch-marginal one.
        direction: MAXIMIZE adds −weight·H, MINIMIZE adds +weight·H.
        weight: β.
    """

    kind: EntropyKind = EntropyKind.PER_INPUT
    direction: Direction = Direction.MAXIMIZE
    weight: float = 0.01


def routing_entropy(statistics: RoutingStatistics, kind: EntropyKind) -> Float[Array, ""]:
    """Entropy of expert choice in nats, averaged over specialised blocks.

    Example:
        One block, two inputs with P = (1, 0) and (0, 1): per input 0, batch-marginal ln 2.

    Args:
        statistics: sums over the inputs of one side.
        kind: which entropy.

    Returns:
        A scalar between 0 and ln(experts).
    """
    count = jnp.maximum(statistics.count, 1.0)
    if kind is EntropyKind.PER_INPUT:
        return jnp.mean(statistics.entropy_sum / count)
    return jnp.mean(expert_use.entropy(statistics.probability_sum / count[:, None]))


def regularization(
    regularizer: RoutingRegularizer, queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, ""]:
    """The term to add to the loss: entropy averaged over blocks, then over the two sides.

    Query and passage sides weigh the same however many inputs each has, as in TASER's code. Only
    non-padding tokens count under token routing; TASER's code counts padding too.

    Args:
        regularizer: kind, direction and weight.
        queries: sums over the batch's queries.
        passages: sums over the batch's passages.

    Returns:
        ∓weight·(H_queries + H_passages)/2.
    """
    entropy = 0.5 * (
        routing_entropy(queries, regularizer.kind) + routing_entropy(passages, regularizer.kind)
    )
    sign = -1.0 if regularizer.direction is Direction.MAXIMIZE else 1.0
    return sign * regularizer.weight * entropy
