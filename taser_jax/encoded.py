"""What a dual encoder returns, and which task it is told of: shared by models and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import no_type_check

import jax
from jaxtyping import Array, Float

from taser_jax.expert_use import RoutingStatistics


# JAX rebuilds pytrees with leaves that are not arrays: shapes are documented here, not checked.
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
    """What `encode` is told of a task: nothing where one program serves them all.

    Args:
        query_tasks: the model's.
        task: of the queries.
    """
    return task if query_tasks else None
