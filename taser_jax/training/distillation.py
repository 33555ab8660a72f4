"""Learning from a teacher's scores: KL divergence and margin-MSE."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models.batch import Batch
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, PositiveNumber

T = TypeVar("T")

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
        # A query's candidates begin with its positive.
        first = jnp.zeros(len(scores), jnp.int32)
        return margin_mse(student, teacher, is_scored, positive_index=first)


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
    *,
    positive_index: Int[Array, " queries"],
) -> Float[Array, ""]:
    """Mean of ((s_pos − s_j) − (t_pos − t_j))² over all known pairs of a query and a negative j.

    Source: Hofstätter et al. 2020, arXiv 2010.02666, equation 6.

    Example:
        Student (3, 1), teacher (5, 2), the positive first: ((3 − 1) − (5 − 2))² = 1.

    Args:
        student: its scores.
        teacher: its scores.
        is_scored: False where the teacher has no score: the pair does not count.
        positive_index: column of each query's positive.
    """
    gap = student - jax.lax.stop_gradient(teacher)
    columns = jnp.arange(gap.shape[1], dtype=positive_index.dtype)
    counts = is_scored & (columns[None, :] != positive_index[:, None])
    square = jnp.square(_at(gap, positive_index)[:, None] - gap)
    return jnp.sum(jnp.where(counts, square, 0.0)) / jnp.maximum(jnp.sum(counts), 1)


def _at(
    scores: Float[Array, "queries passages"], index: Int[Array, " queries"]
) -> Float[Array, " queries"]:
    """The score at each row's index, by a masked sum."""
    columns = jnp.arange(scores.shape[1], dtype=index.dtype)
    return jnp.sum(jnp.where(columns[None, :] == index[:, None], scores, 0.0), axis=1)
