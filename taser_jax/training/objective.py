"""What is minimised: pure functions of what the encoder made of a batch."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from taser_jax.batch import Batch
from taser_jax.encoded import Encoded
from taser_jax.errors import ConfigError
from taser_jax.expert_use import RoutingStatistics, expert_shares, input_information
from taser_jax.training.losses import contrastive_loss
from taser_jax.training.routing_losses import (
    EntropyKind,
    RoutingRegularizer,
    regularization,
    routing_entropy,
)

StepMetrics = dict[str, jax.Array]
"""Scalars by name, float32."""


@runtime_checkable
class Objective(Protocol):
    """A loss of a batch's encodings; no parameters, no randomness."""

    def __call__(
        self, queries: Encoded, passages: Encoded, batch: Batch
    ) -> tuple[jax.Array, StepMetrics]:
        """The loss to differentiate, and metrics."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """Contrastive loss over the batch, and an entropy term where routing is learned.

    Attributes:
        temperature: divides the similarities.
        regularizer: entropy of learned routing; None adds nothing.
    """

    temperature: float = 1.0
    regularizer: RoutingRegularizer | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature {self.temperature}",
                where="ObjectiveConfig",
                expected="a positive number; it divides the similarities",
                fix="1.0 is DPR's and TASER's",
            )

    def __call__(
        self, queries: Encoded, passages: Encoded, batch: Batch
    ) -> tuple[jax.Array, StepMetrics]:
        """The loss and its metrics.

        Args:
            queries: embeddings [batch, dim] and routing of the queries.
            passages: embeddings [passages, dim] and routing of the passages.
            batch: tells positives, and what does not count as a negative.

        Returns:
            The loss, and `nll`, `accuracy`, `mean_rank`, `mrr`; where the model routes by learning,
            `routing/entropy` (per input), `routing/mutual_information` and
            `routing/<side>/expert_<i>_share`; `regularization` where it is on.

        Raises:
            ConfigError: a regulariser is set and the model has no learned routing.
        """
        result = contrastive_loss(
            queries.embeddings,
            passages.embeddings,
            positive_index=jnp.asarray(batch.positive_index),
            ignore=jnp.asarray(batch.ignore),
            temperature=self.temperature,
        )
        rank = result.rank.astype(jnp.float32)
        loss = result.loss
        metrics = {
            "nll": result.loss,
            "accuracy": result.accuracy,
            "mean_rank": jnp.mean(rank),
            "mrr": jnp.mean(1.0 / rank),
        }
        if queries.routing is not None and passages.routing is not None:
            metrics |= _routing_metrics(queries.routing, passages.routing)
            if self.regularizer is not None:
                term = regularization(self.regularizer, queries.routing, passages.routing)
                loss, metrics["regularization"] = loss + term, term
        elif self.regularizer is not None:
            raise ConfigError(
                "an entropy regulariser is set, but the model has no learned routing",
                where="ObjectiveConfig.regularizer",
                expected="sequence or token routing, or no regulariser",
                fix="set ROUTING to one of these, or the regulariser to None",
            )
        return loss, metrics


def _routing_metrics(queries: RoutingStatistics, passages: RoutingStatistics) -> StepMetrics:
    sides = {"query": queries, "passage": passages}
    entropies = [routing_entropy(side, EntropyKind.PER_INPUT) for side in sides.values()]
    metrics = {
        "routing/entropy": jnp.mean(jnp.stack(entropies)),
        "routing/mutual_information": jnp.mean(input_information(queries, passages)),
    }
    for name, side in sides.items():
        for expert, share in enumerate(expert_shares(side).mean(0)):
            metrics[f"routing/{name}/expert_{expert}_share"] = share
    return metrics
