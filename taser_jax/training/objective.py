"""The training objective, a pure function of a batch's encodings: labels, teacher, routing."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import ClassVar, TypeVar, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models.batch import Batch, Encoded, Normalization, RoutingStatistics
from taser_jax.models.dual_encoder import normalize
from taser_jax.models.routing import (
    entropy,
    expert_shares,
    input_information,
    logit_offset,
    logit_spread,
    mean_entropy,
    mean_probabilities,
)
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, NaturalNumber, PositiveNumber

T = TypeVar("T")

StepMetrics = dict[str, jax.Array]
"""Scalars by name, float32."""


Objective = Callable[[Encoded, Encoded, Batch], tuple[jax.Array, StepMetrics]]
"""Encodings of a batch's queries and passages, and the batch -> the loss to differentiate, and
metrics; no parameters, no randomness."""


# Has no weight in a softmax; unlike -inf, two of them have a finite difference.
_LEFT_OUT = -1e30


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
    logits = similarities(query_embeddings, passage_embeddings, temperature=temperature)
    return query_to_passage_loss(logits, positive_index=positive_index, ignore=ignore)


def similarities(
    query_embeddings: Float[Array, "queries dim"],
    passage_embeddings: Float[Array, "passages dim"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "queries passages"]:
    """Inner products of all pairs, divided by the temperature.

    They are float32 products at `Precision.HIGHEST`: TPUs would otherwise round the inputs to
    bfloat16, and the product is small beside the encoder's.
    """
    product = jnp.matmul(
        query_embeddings.astype(jnp.float32),
        passage_embeddings.astype(jnp.float32).T,
        precision=jax.lax.Precision.HIGHEST,
    )
    return product / temperature


def query_to_passage_loss(
    logits: Float[Array, "queries passages"],
    *,
    positive_index: Int[Array, " queries"],
    ignore: Bool[Array, "queries passages"] | None = None,
) -> ContrastiveLoss:
    """`contrastive_loss` of given similarities: the softmax is over passages."""
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


@dataclasses.dataclass(frozen=True)
class Distillation(Checked):
    """The divergence of a query's scores of its own passages from a teacher's: `kl_divergence`.

    These are its positive and its hard negatives, as scored in the negatives' files.

    Attributes:
        weight: weight of the term in the objective; tune it against `label_weight`.
        temperature: divides the teacher's scores; raise it where they are far apart. The student's
            are divided by the objective's.
    """

    RANGE_FIX: ClassVar[str] = "to do without a teacher, set distillation = None"

    weight: PositiveNumber = 1.0
    temperature: PositiveNumber = 1.0

    def loss(self, logits: Float[Array, "queries passages"], batch: Batch) -> Float[Array, ""]:
        """KL(teacher ‖ student) over the candidates of a batch, without its weight.

        Args:
            logits: the student's scores, divided by its temperature.
            batch: has the teacher's scores and marks the positives.

        Raises:
            ConfigError: the batch lacks what is read.
        """
        scores = jnp.asarray(require_scores(batch.teacher_scores))
        student = own_logits(
            logits, positive_index=jnp.asarray(batch.positive_index), count=scores.shape[1]
        )
        is_scored = jnp.isfinite(scores)
        teacher = jnp.where(is_scored, scores, 0.0) / self.temperature
        return kl_divergence(student, teacher, is_scored)


def require_scores(scores: T | None) -> T:
    """The teacher's scores, or an error that says how to supply them.

    Raises:
        ConfigError: they are None.
    """
    if scores is None:
        problem = "the objective reads a teacher's scores, and batches have none"
        fix = (
            "mine with TEACHERS (`taser mine`), and train with the directory it writes as "
            "NEGATIVES_DIRS"
        )
        raise ConfigError(problem, where="ObjectiveConfig", fix=fix)
    return scores


def own_logits(
    logits: Float[Array, "queries passages"],
    *,
    positive_index: Int[Array, " queries"],
    count: int,
) -> Float[Array, "queries count"]:
    """Each query's scores of its own passages: the positive and those that follow it.

    Example:
        Logits [[1, 2, 3, 4], [5, 6, 7, 8]] with positives 0 and 2, count 2: [[1, 2], [7, 8]].
    """
    columns = jnp.arange(logits.shape[1], dtype=positive_index.dtype)
    place = columns[None, :] - positive_index[:, None]
    # Masked sums, not gathers: they stay local when the passages are sharded.
    picks = place[:, None, :] == jnp.arange(count, dtype=place.dtype)[None, :, None]
    return jnp.sum(jnp.where(picks, logits[:, None, :], 0.0), axis=2)


def kl_divergence(
    student: Float[Array, "queries candidates"],
    teacher: Float[Array, "queries candidates"],
    is_scored: Bool[Array, "queries candidates"],
) -> Float[Array, ""]:
    """KL(teacher ‖ student) over the scored candidates, mean over queries, in nats.

    With p = softmax(t) and q = softmax(s), Σ_j p_j (ln p_j − ln q_j).

    Example:
        Teacher (ln 3, 0), student (0, 0): p = (3/4, 1/4), q = (1/2, 1/2);
        3/4 ln(3/2) + 1/4 ln(1/2) = 0.130812.

    Args:
        student: its scores, divided by its temperature.
        teacher: its scores, divided by its own.
        is_scored: False where the teacher has no score; the candidate is then in neither softmax.
    """
    log_p, log_q = (
        jax.nn.log_softmax(jnp.where(is_scored, scores, _LEFT_OUT), axis=1)
        for scores in (jax.lax.stop_gradient(teacher), student)
    )
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1))


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig(Checked):
    """Contrastive loss over the batch, and optional further terms.

        L = Σ_d (label_weight · L_labels(d) + distillation.weight · L_teacher(d)) + L_routing

    over the `matryoshka_dims` d, or the whole embeddings alone.

    Attributes:
        temperature: divides the similarities.
        regularizer: regulariser of learned routing; None adds nothing.
        label_weight: weight of the cross entropy on labels; set it to weigh labels against a
            teacher's scores, or 0 to learn from the teacher alone.
        distillation: moves scores towards a teacher's, where one ranks better; None without one.
        matryoshka_dims: the loss is summed over embeddings truncated to these numbers of dimensions
            (Matryoshka representation learning, Kusupati et al. 2022, arXiv 2205.13147, equation
            1 with weights 1); name the whole dimension too. None: the whole embedding.
    """

    RANGE_FIX: ClassVar[str] = "temperature 1.0 and label_weight 1.0 are DPR's and TASER's"

    temperature: PositiveNumber = 1.0
    regularizer: RoutingRegularizer | None = None
    label_weight: NaturalNumber = 1.0
    distillation: Distillation | None = None
    matryoshka_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_weight == 0 and self.distillation is None:
            problem = f"label_weight is {self.label_weight}, and there is no teacher"
            fix = "set label_weight = 1, or distillation"
            raise ConfigError(problem, where="ObjectiveConfig", fix=fix)
        dims = self.matryoshka_dims
        if len(set(dims)) < len(dims) or any(dim < 1 for dim in dims):
            problem = f"matryoshka_dims {list(dims)}: each must be 1 or more, and named once"
            raise ConfigError(problem, where="ObjectiveConfig")

    def for_model(self, *, dim: int, normalization: Normalization) -> Objective:
        """The objective with the model's normalisation for truncated embeddings.

        Args:
            dim: width of the model's embeddings.
            normalization: normalisation of the model's embeddings.

        Raises:
            ConfigError: a Matryoshka dimension above the model's.
        """
        if self.matryoshka_dims and max(self.matryoshka_dims) > dim:
            problem = (
                f"matryoshka_dims {list(self.matryoshka_dims)} of a model with {dim} dimensions"
            )
            raise ConfigError(
                problem, where="ObjectiveConfig", fix=f"leave out what is above {dim}"
            )
        return functools.partial(self, normalization=normalization)

    def __call__(
        self,
        queries: Encoded,
        passages: Encoded,
        batch: Batch,
        *,
        normalization: Normalization = Normalization.NONE,
    ) -> tuple[jax.Array, StepMetrics]:
        """The loss and its metrics.

        Args:
            queries: embeddings [batch, dim] and routing of the queries.
            passages: embeddings [passages, dim] and routing of the passages.
            batch: marks positives and passages that are no negatives; may have a teacher's scores.
            normalization: normalisation of truncated embeddings.

        Returns:
            The loss, and for the whole embeddings `nll`, `accuracy`, `mean_rank`, `mrr`; with
            Matryoshka dimensions `nll/dim_<d>`; with a teacher `distillation`; with learned routing
            `routing/entropy` (per input), `routing/mutual_information`, `routing/logit_offset`,
            `routing/logit_spread` and `routing/<side>/expert_<i>_share`; `regularization` where it
            is on.

        Raises:
            ConfigError: a regulariser is set and the model has no learned routing, or the batch
                lacks the teacher's scores that the objective reads.
        """
        ignore = jnp.asarray(batch.ignore)
        whole = queries.embeddings.shape[1]
        terms = {}
        for dim in dict.fromkeys((*self.matryoshka_dims, whole)):
            query, passage = queries.embeddings, passages.embeddings
            if dim < whole:
                query = normalize(query[:, :dim], normalization)
                passage = normalize(passage[:, :dim], normalization)
            terms[dim] = self._similarity_loss(query, passage, batch, ignore)
        # Whether or not it is listed, metrics are those of the whole embedding.
        metrics = terms[whole][1]
        if self.matryoshka_dims:
            metrics |= {f"nll/dim_{dim}": terms[dim][1]["nll"] for dim in self.matryoshka_dims}
        loss = sum(
            (terms[dim][0] for dim in self.matryoshka_dims or (whole,)), start=jnp.float32(0)
        )
        if queries.routing is not None and passages.routing is not None:
            metrics |= _routing_metrics(queries.routing, passages.routing)
            if self.regularizer is not None:
                term = regularization(self.regularizer, queries.routing, passages.routing)
                loss, metrics["regularization"] = loss + term, term
        elif self.regularizer is not None:
            problem = "a routing regulariser is set, but the model has no learned routing"
            fix = "set ExpertConfig.routing to 'sequence' or 'token', or the regulariser to None"
            raise ConfigError(problem, where="ObjectiveConfig.regularizer", fix=fix)
        return loss, metrics

    def _similarity_loss(
        self,
        queries: Float[Array, "queries dim"],
        passages: Float[Array, "passages dim"],
        batch: Batch,
        ignore: Bool[Array, "queries passages"],
    ) -> tuple[jax.Array, StepMetrics]:
        """The labels' and the teacher's terms."""
        logits = similarities(queries, passages, temperature=self.temperature)
        positive_index = jnp.asarray(batch.positive_index)
        result = query_to_passage_loss(logits, positive_index=positive_index, ignore=ignore)
        rank = result.rank.astype(jnp.float32)
        metrics = {
            "nll": result.loss,
            "accuracy": result.accuracy,
            "mean_rank": jnp.mean(rank),
            "mrr": jnp.mean(1.0 / rank),
        }
        loss = self.label_weight * result.loss
        if self.distillation is not None:
            metrics["distillation"] = self.distillation.loss(logits, batch)
            loss += self.distillation.weight * metrics["distillation"]
        return loss, metrics


def _routing_metrics(queries: RoutingStatistics, passages: RoutingStatistics) -> StepMetrics:
    sides = {"query": queries, "passage": passages}
    both = queries + passages
    metrics = {
        "routing/entropy": routing_measure(RoutingMeasure.PER_INPUT, queries, passages),
        "routing/mutual_information": routing_measure(
            RoutingMeasure.INFORMATION, queries, passages
        ),
        "routing/logit_offset": jnp.mean(logit_offset(both)),
        "routing/logit_spread": jnp.mean(logit_spread(both)),
    }
    for name, side in sides.items():
        for expert, share in enumerate(expert_shares(side).mean(0)):
            metrics[f"routing/{name}/expert_{expert}_share"] = share
    return metrics
