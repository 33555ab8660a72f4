"""The training objective, a pure function of a batch's encodings: labels, teacher, routing."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models.batch import Batch, Encoded, Normalization, RoutingStatistics
from taser_jax.models.dual_encoder import normalize
from taser_jax.models.routing import expert_shares, logit_offset, logit_spread
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, NaturalNumber, PositiveNumber
from taser_jax.training import losses

T = TypeVar("T")

StepMetrics = dict[str, jax.Array]
"""Scalars by name, float32."""


Objective = Callable[[Encoded, Encoded, Batch], tuple[jax.Array, StepMetrics]]
"""Encodings of a batch's queries and passages, and the batch -> the loss to differentiate, and
metrics; no parameters, no randomness."""


# Has no weight in a softmax; unlike -inf, two of them have a finite difference.
_LEFT_OUT = -1e30


class Distance(enum.Enum):
    """How far the student is from its teacher.

    KL: KL(teacher ‖ student) of the softmaxes over the candidates.
    MARGIN_MSE: mean squared difference of the margins s(positive) - s(candidate).
    """

    KL = "kl"
    MARGIN_MSE = "margin_mse"


@dataclasses.dataclass(frozen=True)
class Distillation(Checked):
    """A term that moves a query's scores of its own passages towards a teacher's.

    These are its positive and its hard negatives, as scored in the negatives' files.

    Attributes:
        distance: KL or margin-MSE; set MARGIN_MSE where scores, not ranks, are to be learnt.
        weight: weight of the term in the objective; tune it against `label_weight`.
        temperature: divides the teacher's scores; raise it where they are far apart. The student's
            are divided by the objective's.
    """

    RANGE_FIX: ClassVar[str] = "to do without a teacher, set distillation = None"

    distance: Distance = Distance.KL
    weight: PositiveNumber = 1.0
    temperature: PositiveNumber = 1.0

    def loss(self, logits: Float[Array, "queries passages"], batch: Batch) -> Float[Array, ""]:
        """The distance on a batch, without its weight.

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
        if self.distance is Distance.KL:
            return kl_divergence(student, teacher, is_scored)
        return margin_mse(student, teacher, is_scored)


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


def margin_mse(
    student: Float[Array, "queries candidates"],
    teacher: Float[Array, "queries candidates"],
    is_scored: Bool[Array, "queries candidates"],
) -> Float[Array, ""]:
    """Mean of ((s_pos − s_j) − (t_pos − t_j))² over all known pairs of a query and a negative j.

    Source: Hofstätter et al. 2020, arXiv 2010.02666, equation 6.

    Example:
        Student (3, 1), teacher (5, 2), the positive first: ((3 − 1) − (5 − 2))² = 1.

    Args:
        student: its scores, the positive's first.
        teacher: its scores.
        is_scored: False where the teacher has no score: the pair does not count.
    """
    gap = student - jax.lax.stop_gradient(teacher)
    counts = is_scored[:, 1:]
    square = jnp.square(gap[:, :1] - gap[:, 1:])
    return jnp.sum(jnp.where(counts, square, 0.0)) / jnp.maximum(jnp.sum(counts), 1)


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
    regularizer: losses.RoutingRegularizer | None = None
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
                term = losses.regularization(self.regularizer, queries.routing, passages.routing)
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
        logits = losses.similarities(queries, passages, temperature=self.temperature)
        positive_index = jnp.asarray(batch.positive_index)
        result = losses.query_to_passage_loss(logits, positive_index=positive_index, ignore=ignore)
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
        "routing/entropy": losses.routing_measure(
            losses.RoutingMeasure.PER_INPUT, queries, passages
        ),
        "routing/mutual_information": losses.routing_measure(
            losses.RoutingMeasure.INFORMATION, queries, passages
        ),
        "routing/logit_offset": jnp.mean(logit_offset(both)),
        "routing/logit_spread": jnp.mean(logit_spread(both)),
    }
    for name, side in sides.items():
        for expert, share in enumerate(expert_shares(side).mean(0)):
            metrics[f"routing/{name}/expert_{expert}_share"] = share
    return metrics
