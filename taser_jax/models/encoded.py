"""The output of a dual encoder, its normalisation and its static task.

Shared by models and training.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.models.expert_use import RoutingStatistics

# The smallest squared norm divided by: a zero vector stays zero, and so does its gradient.
_SMALLEST_SQUARE = 1e-24


class Normalization(enum.Enum):
    """Whether embeddings are divided by their L2 norm, which makes the dot product the cosine."""

    NONE = "none"
    L2 = "l2"


def normalize(
    embeddings: Float[Array, "batch dim"], normalization: Normalization
) -> Float[Array, "batch dim"]:
    """Divides embeddings by their L2 norms, if configured; zeros stay zeros."""
    if normalization is Normalization.NONE:
        return embeddings
    square = jnp.square(embeddings).sum(-1, keepdims=True)
    return embeddings * jax.lax.rsqrt(jnp.maximum(square, _SMALLEST_SQUARE))


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
    """The task's name as `encode` takes it: None where one program serves all tasks.

    Args:
        query_tasks: the model's tasks with a query encoder of their own.
        task: the queries' task.
    """
    return task if query_tasks else None
