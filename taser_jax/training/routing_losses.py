"""Entropy of expert choice, as a regulariser and as metrics, from sums over inputs."""

from __future__ import annotations

import dataclasses
import enum
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


def routing_entropy(statistics: RoutingSums, kind: EntropyKind) -> Float[Array, ""]:
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
    return jnp.mean(_entropy(statistics.probability_sum / count[:, None]))


def regularization(
    regularizer: RoutingRegularizer, queries: RoutingSums, passages: RoutingSums
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


def mutual_information(queries: RoutingSums, passages: RoutingSums) -> Float[Array, ""]:
    """I(input; expert) = H(mean_x P) − mean_x H(P(· | x)) over all inputs, mean over blocks.

    0 where every input is routed alike (collapse, or a router that does not look); ln(experts)
    where choices are certain and the experts evenly used.

    Args:
        queries: sums over the batch's queries.
        passages: sums over the batch's passages.

    Returns:
        Nats.
    """
    count = jnp.maximum(queries.count + passages.count, 1.0)
    marginal = (queries.probability_sum + passages.probability_sum) / count[:, None]
    conditional = (queries.entropy_sum + passages.entropy_sum) / count
    return jnp.mean(_entropy(marginal) - conditional)


def expert_shares(statistics: RoutingSums) -> Float[Array, " experts"]:
    """Share of inputs that argmax P sends to each expert, mean over blocks; sums to 1."""
    count = jnp.maximum(statistics.count, 1.0)
    return jnp.mean(statistics.choice_count / count[:, None], axis=0)


def _entropy(probabilities: Float[Array, "blocks experts"]) -> Float[Array, " blocks"]:
    # 0·log 0 = 0, and its gradient must not be NaN: both branches stay finite.
    positive = probabilities > 0
    logs = jnp.log(jnp.where(positive, probabilities, 1.0))
    return -jnp.sum(jnp.where(positive, probabilities * logs, 0.0), axis=-1)
