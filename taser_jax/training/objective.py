"""The training objective, a pure function of a batch's encodings: labels and routing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from taser_jax.models.batch import Batch, Encoded, Normalization, RoutingStatistics
from taser_jax.models.dual_encoder import normalize
from taser_jax.models.routing import expert_shares, logit_offset, logit_spread
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, PositiveNumber
from taser_jax.training import losses

StepMetrics = dict[str, jax.Array]
"""Scalars by name, float32."""


Objective = Callable[[Encoded, Encoded, Batch], tuple[jax.Array, StepMetrics]]
"""Encodings of a batch's queries and passages, and the batch -> the loss to differentiate, and
metrics; no parameters, no randomness."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig(Checked):
    """Contrastive loss over the batch, and optional further terms.

        L = Σ_d L_labels(d) + L_routing

    over the `matryoshka_dims` d, or the whole embeddings alone.

    Attributes:
        temperature: divides the similarities.
        regularizer: regulariser of learned routing; None adds nothing.
        matryoshka_dims: the loss is summed over embeddings truncated to these numbers of dimensions
            (Matryoshka representation learning, Kusupati et al. 2022, arXiv 2205.13147, equation
            1 with weights 1); name the whole dimension too. None: the whole embedding.
    """

    RANGE_FIX: ClassVar[str] = "temperature 1.0 is DPR's and TASER's"

    temperature: PositiveNumber = 1.0
    regularizer: losses.RoutingRegularizer | None = None
    matryoshka_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
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
            batch: marks positives and passages that are no negatives.
            normalization: normalisation of truncated embeddings.

        Returns:
            The loss, and for the whole embeddings `nll`, `accuracy`, `mean_rank`, `mrr`; with
            Matryoshka dimensions `nll/dim_<d>`; with learned routing `routing/entropy` (per input),
            `routing/mutual_information`, `routing/logit_offset`, `routing/logit_spread` and
            `routing/<side>/expert_<i>_share`; `regularization` where it is on.

        Raises:
            ConfigError: a regulariser is set and the model has no learned routing.
        """
        whole = queries.embeddings.shape[1]
        terms = {}
        for dim in dict.fromkeys((*self.matryoshka_dims, whole)):
            query, passage = queries.embeddings, passages.embeddings
            if dim < whole:
                query = normalize(query[:, :dim], normalization)
                passage = normalize(passage[:, :dim], normalization)
            result = losses.contrastive_loss(
                query,
                passage,
                positive_index=jnp.asarray(batch.positive_index),
                ignore=jnp.asarray(batch.ignore),
                temperature=self.temperature,
            )
            rank = result.rank.astype(jnp.float32)
            terms[dim] = {
                "nll": result.loss,
                "accuracy": result.accuracy,
                "mean_rank": jnp.mean(rank),
                "mrr": jnp.mean(1.0 / rank),
            }
        # Whether or not it is listed, metrics are those of the whole embedding.
        metrics = terms[whole]
        if self.matryoshka_dims:
            metrics |= {f"nll/dim_{dim}": terms[dim]["nll"] for dim in self.matryoshka_dims}
        loss = sum(
            (terms[dim]["nll"] for dim in self.matryoshka_dims or (whole,)), start=jnp.float32(0)
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
