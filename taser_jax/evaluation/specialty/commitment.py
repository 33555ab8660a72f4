"""How many task-specific parameters stay with their task from one checkpoint to a later one.

Sensitivities are smoothed as T-SAGE does it, I ← β·I + (1 − β)·I′ with I′ the median-normalised
|g·θ| of one batch, for several β side by side. At a checkpoint every parameter is marked with the
task of its highest I, and whether it is task-specific. Marks of two checkpoints are compared on the
devices; only counts leave them.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
Algorithm 1, section 7.4 and Table 4.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int16, PyTree

from taser_jax.evaluation.specialty.sensitivity import (
    TaskLoss,
    check_finite,
    check_medians,
    constrain,
    is_finite,
    normalize,
    sensitivity,
    shardings_of,
    task_median,
)
from taser_jax.evaluation.specialty.specialty import (
    Bounds,
    Specialty,
    most_sensitive_task,
    specialty_of,
    task_entropy,
    task_weights,
)
from taser_jax.models.batch import Batch
from taser_jax.optim.median import MedianOver
from taser_jax.optim.tsage_options import BiasCorrection


class JudgedAt(enum.Enum):
    """The checkpoint at which a parameter must be task-specific; the paper does not say which.

    EARLIER: of those specific at the earlier one, which share is still with its task? LATER: of
    those specific at the later one, which share was with that task before? BOTH: of those specific
    at both.
    """

    EARLIER = "earlier"
    LATER = "later"
    BOTH = "both"


class Averages(NamedTuple):
    """Moving averages of normalised sensitivities.

    Attributes:
        steps: number of batches in them.
        values: task -> tree of the averages at each β, [betas, *shape] per parameter; in the
            order of the task axis, which `jax.tree.map` over the whole dict would lose.
    """

    steps: int
    values: dict[str, Any]


class Marks(NamedTuple):
    """The tasks of a leaf's parameters at one checkpoint.

    Attributes:
        owner: the most sensitive task; the number of tasks if several tie.
        specific: whether the parameter is task-specific.
    """

    owner: Int16[Array, "betas *shape"]
    specific: Bool[Array, "betas *shape"]


@dataclasses.dataclass(frozen=True)
class Commitment:
    """Counts of parameters between two checkpoints.

    Attributes:
        specific: task-specific parameters at the earlier checkpoint, at the later, or at both.
        committed: how many of each have the same most sensitive task at both checkpoints.
    """

    specific: dict[JudgedAt, int]
    committed: dict[JudgedAt, int]

    def rate(self, judged_at: JudgedAt) -> float:
        """The task commitment rate; NaN if no parameter is task-specific."""
        count = self.specific[judged_at]
        return self.committed[judged_at] / count if count else float("nan")


def no_averages(params: PyTree, tasks: Sequence[str], *, betas: int) -> Averages:
    """Zeros, sharded as the parameters are, with an axis for β in front."""

    def zeros(param: jax.Array) -> jax.Array:
        sharding = param.sharding
        assert isinstance(sharding, NamedSharding)
        wide = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jnp.zeros((betas, *param.shape), jnp.float32, device=wide)

    return Averages(0, {task: jax.tree.map(zeros, params) for task in tasks})


def make_advance(
    losses: Mapping[str, TaskLoss], *, betas: Sequence[float], over: MedianOver = MedianOver.ALL
) -> Callable[..., Averages]:
    """Makes the function that adds batches to the averages, compiled once for all checkpoints.

    Args:
        losses: each task's loss, in the order of the task axis.
        betas: shares of the old average that are kept.
        over: entries over which medians are taken.

    Returns:
        `advance(averages, params, batches, *, where) -> averages`; the old ones are donated. It
        raises `DataError` if a gradient is not finite or a batch's median is 0.
    """
    kept = np.asarray(betas, np.float32)

    def move(
        loss: TaskLoss, average: PyTree, params: PyTree, batch: Batch, *, shardings: PyTree
    ) -> tuple[PyTree, Array, Array]:
        new = sensitivity(loss, params, batch)
        median = task_median(new, over)

        def of_leaf(old: jax.Array, value: jax.Array) -> jax.Array:
            beta = kept.reshape(-1, *(1,) * value.ndim)
            return jnp.asarray(beta * old + (1 - beta) * normalize(value, median))

        average = constrain(jax.tree.map(of_leaf, average, new), shardings)
        return average, is_finite(new), median

    moves = {
        task: jax.jit(functools.partial(move, loss), donate_argnums=0, static_argnames="shardings")
        for task, loss in losses.items()
    }

    def advance(
        averages: Averages, params: PyTree, batches: Iterable[Mapping[str, Batch]], *, where: str
    ) -> Averages:
        steps, values = averages.steps, dict(averages.values)
        shardings = shardings_of(next(iter(values.values())))
        for batch in batches:
            finite, medians = {}, {}
            for task in values:
                values[task], finite[task], medians[task] = moves[task](
                    values[task], params, batch[task], shardings=shardings
                )
            check_finite(finite, where=where)
            check_medians(list(medians.values()), tasks=list(medians), over=over, where=where)
            steps += 1
        return Averages(steps, values)

    return advance


def marks_of(
    averages: Averages,
    *,
    betas: Sequence[float],
    temperature: float,
    bounds: Bounds,
    bias_correction: BiasCorrection,
) -> list[Marks]:
    """Marks of every leaf, in tree order.

    Args:
        averages: averages of at least one batch.
        betas: their β.
        temperature: τ of the entropies.
        bounds: what counts as task-specific.
        bias_correction: ADAM divides by 1 − β^steps first.
    """
    factors = correction_factors(betas, averages.steps, bias_correction)
    by_leaf = zip(*(jax.tree.leaves(tree) for tree in averages.values.values()), strict=True)
    return [
        _mark_leaf(leaf, factors, temperature=temperature, bounds=bounds, sharding=leaf[0].sharding)
        for leaf in by_leaf
    ]


def correction_factors(
    betas: Sequence[float], steps: int, bias_correction: BiasCorrection
) -> Float[np.ndarray, " betas"]:
    """Factors for averages of `steps` batches: 1/(1 − β^steps), or 1."""
    if bias_correction is BiasCorrection.NONE:
        return np.ones(len(betas), np.float32)
    return np.asarray([1 / (1 - beta**steps) for beta in betas], np.float32)


@functools.partial(jax.jit, static_argnames=("temperature", "bounds", "sharding"))
def _mark_leaf(
    by_task: tuple[jax.Array, ...],
    factors: Float[Array, " betas"],
    *,
    temperature: float,
    bounds: Bounds,
    sharding: NamedSharding,
) -> Marks:
    marks = mark(jnp.stack(by_task), factors, temperature=temperature, bounds=bounds)
    return jax.lax.with_sharding_constraint(marks, sharding)


@functools.partial(jax.jit, static_argnames=("temperature", "bounds"))
def mark(
    averages: Float[Array, "tasks betas *shape"],
    factors: Float[Array, " betas"],
    *,
    temperature: float,
    bounds: Bounds,
) -> Marks:
    """Marks of one array's parameters.

    Args:
        averages: each task's average at each β.
        factors: `correction_factors`.
        temperature: τ of the entropies.
        bounds: what counts as task-specific.
    """
    values = averages * factors.reshape(-1, *(1,) * (averages.ndim - 2))
    entropy = task_entropy(task_weights(values, temperature))
    kind = specialty_of(values, entropy, bounds)
    return Marks(
        most_sensitive_task(values).astype(jnp.int16),
        kind == list(Specialty).index(Specialty.SPECIFIC),
    )


def compare(earlier: Sequence[Marks], later: Sequence[Marks]) -> list[Commitment]:
    """Counts over all leaves, one `Commitment` for each β."""
    total: PyTree = 0
    for then, now in zip(earlier, later, strict=True):
        total = total + np.asarray(_compare(then, now), np.int64)
    return [
        Commitment(
            specific=dict(zip(JudgedAt, map(int, specific), strict=True)),
            committed=dict(zip(JudgedAt, map(int, committed), strict=True)),
        )
        for specific, committed in zip(total[0], total[1], strict=True)
    ]


@jax.jit
def _compare(then: Marks, now: Marks) -> Array:
    """Counts [specific or committed, betas, judged at]."""
    same = then.owner == now.owner
    judged = {
        JudgedAt.EARLIER: then.specific,
        JudgedAt.LATER: now.specific,
        JudgedAt.BOTH: then.specific & now.specific,
    }

    def count(kept: jax.Array) -> jax.Array:
        return jnp.sum(kept, axis=range(1, kept.ndim), dtype=jnp.int32)

    specific = jnp.stack([count(judged[at]) for at in JudgedAt], axis=1)
    committed = jnp.stack([count(judged[at] & same) for at in JudgedAt], axis=1)
    return jnp.stack([specific, committed])
