"""A queue of the passages of the last steps, which serve as additional negatives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from taser_jax.models.encoded import Encoded


@dataclasses.dataclass(frozen=True)
class QueueSize:
    """Sizes of a queue.

    Attributes:
        steps: number of steps whose passages it holds.
        passages: number of passages of each step.
        dim: width of their embeddings.
    """

    steps: int
    passages: int
    dim: int

    def empty(self) -> PassageQueue:
        """A queue that holds nothing yet."""
        return PassageQueue(
            jnp.zeros((self.steps, self.passages, self.dim), jnp.float32),
            jnp.zeros(self.steps, bool),
        )


class PassageQueue(NamedTuple):
    """Embeddings of the passages of the last m steps, as their own step computed them.

    Momentum Contrast (He et al., 2020, arXiv 1911.05722, section 3.1) fills such a queue with a
    slowly moving copy of the encoder. Here the encoder itself fills it, so that a queue of m steps
    holds embeddings that are up to m updates old: keep m small. No gradient reaches them.

    Attributes:
        embeddings: the passages of step s are in place s mod m. [m, passages, dim], float32
        filled: whether a place holds a step's passages. [m], bool
    """

    embeddings: Float[Array, "steps passages dim"] | PyTree
    filled: Bool[Array, " steps"] | PyTree

    def joined(self, passages: Encoded) -> Encoded:
        """A batch's passages, then the queue's, place by place."""
        queued = jax.lax.stop_gradient(self.embeddings).reshape(-1, self.embeddings.shape[-1])
        return dataclasses.replace(
            passages, embeddings=jnp.concatenate([passages.embeddings, queued])
        )

    def ignored(
        self, ignore: Bool[Array, "queries all_passages"]
    ) -> Bool[Array, "queries all_passages"]:
        """`ignore`, with the passages of the queue's empty places ignored too."""
        steps, passages, _ = self.embeddings.shape
        empty = jnp.repeat(~self.filled, passages, total_repeat_length=steps * passages)
        in_batch = jnp.zeros(ignore.shape[1] - len(empty), bool)
        return ignore | jnp.concatenate([in_batch, empty])

    def pushed(
        self,
        passages: Float[Array, "passages dim"],
        *,
        step: Int[Array, ""],
        is_taken: Bool[Array, ""],
    ) -> PassageQueue:
        """The queue after a step; a skipped step leaves its place empty."""
        place = step % len(self.filled)
        kept = jnp.where(is_taken, jax.lax.stop_gradient(passages), 0.0)
        return PassageQueue(
            self.embeddings.at[place].set(kept), self.filled.at[place].set(is_taken)
        )
