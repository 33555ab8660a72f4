"""Losses of a batch: contrastive over its passages or queries, and of its routing."""

from __future__ import annotations

import dataclasses
import enum
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models.batch import RoutingStatistics
from taser_jax.models.routing import entropy, input_information, mean_entropy, mean_probabilities


# As in `batch`: JAX also builds this tree with leaves that are no arrays.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContrastiveLoss:
    """Loss and in-batch ranking.

    Attributes:
        loss: mean of `per_query_loss`, in nats.
        per_query_loss: −log P(positive | query). Shape [queries].
        rank: 1-based rank of the positive among the passages that count. Shape [queries], int32.
        accuracy: share of queries whose positive ranks first.
    """

    loss: Float[Array, ""]
    per_query_loss: Float[Array, " queries"]
    rank: Int[Array, " queries"]
    accuracy: Float[Array, ""]


def contrastive_loss(
    query_embeddings: Float[Array, "queries dim"],
    passage_embeddings: Float[Array, "passages dim"],
    *,
    positive_index: Int[Array, " queries"],
    ignore: Bool[Array, "queries passages"] | None = None,
    temperature: float = 1.0,
) -> ContrastiveLoss:
    """Negative log-likelihood of each query's positive among all passages of the batch.

    loss_i = logsumexp_j(q_i·p_j/τ) − q_i·p_{positive(i)}/τ, mean over queries (DPR, eq. 2, with
    every other passage of the global batch as a negative). The arrays are global: under `jit`
    with sharded inputs the compiler gathers what each device needs, and neither loss nor
    gradient depends on the number of devices.

    Example:
        2 queries, 4 passages, positives 0 and 2, logits [[2, 1, 0, 0], [0, 0, 1, 3]]:
        loss_0 = ln(e² + e + 2) − 2 = 0.493812, rank 1; loss_1 = ln(2 + e + e³) − 1 = 2.210998,
        rank 2; loss = 1.352405, accuracy 0.5.

    Args:
        query_embeddings: all queries of the global batch.
        passage_embeddings: all passages of the global batch.
        positive_index: row of each query's positive in `passage_embeddings`.
        ignore: True where a passage is no negative of the query: it takes no part in the sum or
            in the rank. A True at the positive itself has no effect. None ignores nothing.
        temperature: τ, divides the logits.

    Returns:
        Loss, per-query losses, ranks and accuracy. On ties the earlier passage ranks first:
        rank = 1 + #{j: s_j > s_pos} + #{j < pos: s_j = s_pos}.
    """
    # TPUs would otherwise round the inputs to bfloat16. The product is small beside the encoder's.
    product = jnp.matmul(
        query_embeddings.astype(jnp.float32),
        passage_embeddings.astype(jnp.float32).T,
        precision=jax.lax.Precision.HIGHEST,
    )
    logits = product / temperature
    columns = jnp.arange(logits.shape[1], dtype=positive_index.dtype)
    is_positive = columns[None, :] == positive_index[:, None]
    if ignore is not None:
        logits = jnp.where(ignore & ~is_positive, -jnp.inf, logits)
    # A masked sum, not a gather: it stays local when the passages are sharded.
    positive_logit = jnp.sum(jnp.where(is_positive, logits, 0.0), axis=1)
    per_query_loss = jax.nn.logsumexp(logits, axis=1) - positive_logit
    rank = positive_rank(logits, positive_index=positive_index, positive_score=positive_logit)
    return ContrastiveLoss(
        loss=jnp.mean(per_query_loss),
        per_query_loss=per_query_loss,
        rank=rank,
        accuracy=jnp.mean((rank == 1).astype(jnp.float32)),
    )


def positive_rank(
    scores: Float[Array, "queries passages"],
    *,
    positive_index: Int[Array, " queries"],
    positive_score: Float[Array, " queries"],
) -> Int[Array, " queries"]:
    """1-based rank of each query's positive, ties broken by column.

    Args:
        scores: −inf where a passage does not take part.
        positive_index: column of the positive.
        positive_score: the score at that column.

    Returns:
        1 + #{j: s_j > s_pos} + #{j < pos: s_j = s_pos}, int32. A NaN counts against the
        positive, so broken embeddings never rank well.
    """
    columns = jnp.arange(scores.shape[1], dtype=positive_index.dtype)[None, :]
    pivot, gold = positive_score[:, None], positive_index[:, None]
    behind = (scores < pivot) | ((scores == pivot) & (columns > gold))
    return 1 + jnp.sum(~behind & (columns != gold), axis=1, dtype=jnp.int32)


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


@dataclasses.dataclass(frozen=True)
class RoutingRegularizer:
    """The term −weight·M that is added to the contrastive loss.

    TASER's appendix A writes L = L_sim + β·L_ent with L_ent = −Σ P log P and β = 0.01. Read
    literally, that lowers entropy, against its stated purpose of avoiding collapse; the released
    code adds +Σ P log P, which raises it. The default follows the purpose; a negative weight is
    the literal formula.

    Attributes:
        kind: M; the paper's is the per-input entropy. Set INFORMATION where experts collapse.
        weight: β; above 0 training raises M.
    """

    kind: RoutingMeasure = RoutingMeasure.PER_INPUT
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
    """The term to add to the loss: −weight·M, see `routing_measure`."""
    return -regularizer.weight * routing_measure(regularizer.kind, queries, passages)
