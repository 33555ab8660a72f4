"""A regulariser of how evenly and how confidently experts are chosen."""

from __future__ import annotations

import dataclasses
import enum

import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.models.expert_use import (
    RoutingStatistics,
    entropy,
    input_information,
    mean_entropy,
    mean_probabilities,
)


class RoutingMeasure(enum.Enum):
    """The regularised measure, in nats; P(· | x) is a router's distribution for input x.

    PER_INPUT: H(P(· | x)) of each input, then the mean over inputs: how undecided the router is.
    BATCH_MARGINAL: H(mean_x P(· | x)) of each role: how evenly the role uses the experts.
    INFORMATION: I(x; expert) over both roles, H(mean_x P) − mean_x H(P): largest where the experts
    are evenly used and every choice is certain, so that the router must distinguish inputs.
    """

    PER_INPUT = "per_input"
    BATCH_MARGINAL = "batch_marginal"
    INFORMATION = "information"


class Direction(enum.Enum):
    """Whether training raises or lowers the measure."""

    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


@dataclasses.dataclass(frozen=True)
class RoutingRegularizer:
    """The term ∓weight·M that is added to the contrastive loss.

    TASER's appendix A writes L = L_sim + β·L_ent with L_ent = −Σ P log P and β = 0.01. Read
    literally, that lowers entropy, against its stated purpose of avoiding collapse; the released
    code adds +Σ P log P, which raises it. The default follows the purpose; `MINIMIZE` is the
    literal formula.

    Attributes:
        kind: M; the paper's is the per-input entropy.
        direction: MAXIMIZE adds −weight·M, MINIMIZE adds +weight·M.
        weight: β.
    """

    kind: RoutingMeasure = RoutingMeasure.PER_INPUT
    direction: Direction = Direction.MAXIMIZE
    weight: float = 0.01


def routing_measure(
    kind: RoutingMeasure, queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, ""]:
    """The measure averaged over specialised blocks.

    Query and passage sides weigh the same however many inputs each has, as in TASER's code. Only
    non-padding tokens count under token routing; TASER's code counts padding too.

    Example:
        One block, a query with P = (1, 0) and a passage with P = (0, 1): per input 0,
        batch-marginal 0 (each role uses one expert), information ln 2.

    Args:
        kind: which measure.
        queries: sums over the batch's queries.
        passages: sums over the batch's passages.

    Returns:
        A scalar between 0 and ln(experts).
    """
    sides = (queries, passages)
    match RoutingMeasure(kind):
        case RoutingMeasure.PER_INPUT:
            value = sum(mean_entropy(side) for side in sides) / 2
        case RoutingMeasure.BATCH_MARGINAL:
            value = sum(entropy(mean_probabilities(side)) for side in sides) / 2
        case RoutingMeasure.INFORMATION:
            value = input_information(queries, passages)
    return jnp.mean(value)


def regularization(
    regularizer: RoutingRegularizer, queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, ""]:
    """The term to add to the loss: ∓weight·M, see `routing_measure`."""
    sign = -1.0 if regularizer.direction is Direction.MAXIMIZE else 1.0
    return sign * regularizer.weight * routing_measure(regularizer.kind, queries, passages)
