"""Task entropy and specialty of parameters, counted leaf by leaf where the parameters live.

Of a parameter with median-normalised sensitivities I_t, TACO-DR's Equation 6 takes
p = softmax over tasks of I_t/τ and the entropy S = −Σ p ln p. Every device counts its own part of a
leaf and the counts are added up: nothing with one entry per parameter leaves the devices.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
sections 4 and 7.3.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from taser_jax.evaluation.sensitivity import normalize

SPECIFIC_ENTROPY = 0.3
"""Activated parameters of a lower task entropy, in nats, are task-specific, as in the paper: about
95% on one task and 5% spread over seven."""
ACTIVATED = 0.1
"""Parameters whose sensitivities are all below this many medians are not activated, as there."""
SHARED_BINS = 12
"""Bins of the entropies of shared parameters."""
BINS_PER_MEDIAN = 40
NUM_BINS = 8 * BINS_PER_MEDIAN + 1
"""Bins of sensitivities: evenly spaced up to 8 medians, and one for all above."""


class Specialty(enum.Enum):
    """Kinds of parameters, in the order of the counts.

    NOT_ACTIVATED: no task's sensitivity reaches the bound. SPECIFIC: activated, and the task
    entropy is low. SHARED: the rest.
    """

    NOT_ACTIVATED = "not activated"
    SPECIFIC = "task-specific"
    SHARED = "shared"


class LeafCounts(NamedTuple):
    """Counts of one leaf or, added up, of several; T tasks.

    Attributes:
        sensitivity: histogram of each task's values, in bins of 1/BINS_PER_MEDIAN. [T, NUM_BINS]
        specialty: parameters by `Specialty` and most sensitive task; the last column counts those
            whose highest value several tasks share. [3, T + 1]
        entropy: histogram of activated parameters, by `entropy_edges`. [1 + SHARED_BINS]
        entropy_sum: sum of the activated parameters' entropies.
    """

    sensitivity: jax.Array | np.ndarray
    specialty: jax.Array | np.ndarray
    entropy: jax.Array | np.ndarray
    entropy_sum: jax.Array | np.ndarray

    @property
    def size(self) -> int:
        """Number of parameters."""
        return int(self.specialty.sum())

    @property
    def mean_entropy(self) -> float:
        """Mean task entropy of the activated parameters, in nats; NaN where there are none."""
        activated = int(self.entropy.sum())
        return float(self.entropy_sum) / activated if activated else float("nan")

    def share(self, kind: Specialty) -> float:
        """Share of the parameters that are of this kind."""
        return float(self.specialty[list(Specialty).index(kind)].sum() / self.size)

    def specific_by_task(self) -> Float[np.ndarray, " tasks"]:
        """Share of all parameters that are specific to each task."""
        specific = list(Specialty).index(Specialty.SPECIFIC)
        return np.asarray(self.specialty)[specific, :-1] / self.size


def on_host(counts: LeafCounts) -> LeafCounts:
    """The counts as int64 and float64 arrays of NumPy, which add up without overflow."""
    wide = {"i": np.int64, "f": np.float64}
    arrays = [np.asarray(count) for count in counts]
    return LeafCounts(*(array.astype(wide[array.dtype.kind]) for array in arrays))


def add_up(leaves: Iterable[LeafCounts]) -> LeafCounts:
    """Counts of several leaves together."""
    return LeafCounts(*(np.sum(field, axis=0) for field in zip(*leaves, strict=True)))


def entropy_edges(num_tasks: int) -> Float[np.ndarray, " edges"]:
    """Edges of the entropy's bins, in nats: one below the bound, the others up to ln T."""
    return np.append(0.0, np.linspace(SPECIFIC_ENTROPY, math.log(num_tasks), SHARED_BINS + 1))


def task_weights(
    sensitivities: Float[Array, "task *shape"], temperature: float | Float[Array, ""]
) -> Float[Array, "task *shape"]:
    """Equation 6's p: softmax over tasks of I_t/τ."""
    return jax.nn.softmax(sensitivities / temperature, axis=0)


def task_entropy(weights: Float[Array, "task *shape"]) -> Float[Array, "*shape"]:
    """Equation 6's S = −Σ p ln p, in nats.

    Example:
        Weights 0.95 and seven times 0.05/7 -> 0.296; eight times 1/8 -> ln 8 = 2.079.
    """
    return jnp.sum(jax.scipy.special.entr(weights), axis=0)


def specialty_of(
    sensitivities: Float[Array, "task *shape"], entropy: Float[Array, "*shape"]
) -> Int[Array, "*shape"]:
    """The number of each parameter's `Specialty` in the enum."""
    activated = jnp.max(sensitivities, axis=0) >= ACTIVATED
    specific = entropy < SPECIFIC_ENTROPY
    order = list(Specialty)
    return jnp.where(
        activated,
        jnp.where(specific, order.index(Specialty.SPECIFIC), order.index(Specialty.SHARED)),
        order.index(Specialty.NOT_ACTIVATED),
    )


def most_sensitive_task(sensitivities: Float[Array, "task *shape"]) -> Int[Array, "*shape"]:
    """The task of the highest value; T, no task, where several have it."""
    highest = sensitivities == jnp.max(sensitivities, axis=0)
    alone = jnp.sum(highest, axis=0) == 1
    return jnp.where(alone, jnp.argmax(sensitivities, axis=0), len(sensitivities))


@functools.partial(jax.jit, static_argnames="sharding")
def count_leaf(
    totals: tuple[jax.Array, ...],
    medians: Float[Array, " task"],
    *,
    temperature: float,
    sharding: NamedSharding,
) -> LeafCounts:
    """Counts of one leaf; every device counts its own part, and all get the result.

    Args:
        totals: each task's sums of sensitivities, in the leaf's shape.
        medians: medians of each task's sums, over all leaves.
        temperature: τ of the softmax over tasks.
        sharding: sharding of each of the totals.
    """
    # Mesh axes that the leaf is split along; along the others it is copied.
    names = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in sharding.spec]
    split_along = tuple(name for axes in names for name in axes)

    def of_part(
        totals: tuple[jax.Array, ...], medians: jax.Array, temperature: jax.Array
    ) -> LeafCounts:
        counts = _count(jnp.stack(list(map(normalize, totals, medians))), temperature)
        return jax.lax.psum(counts, split_along) if split_along else counts

    return jax.shard_map(
        of_part,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(totals, medians, jnp.asarray(temperature))


def _count(sensitivities: Float[Array, "task *shape"], temperature: Float[Array, ""]) -> LeafCounts:
    num_tasks = len(sensitivities)
    entropy = task_entropy(task_weights(sensitivities, temperature))
    kind = specialty_of(sensitivities, entropy)
    activated = kind != list(Specialty).index(Specialty.NOT_ACTIVATED)
    cell = kind * (num_tasks + 1) + most_sensitive_task(sensitivities)
    inner_edges = jnp.asarray(entropy_edges(num_tasks)[1:-1], jnp.float32)
    num_bins = len(inner_edges) + 1
    entropy_bin = jnp.searchsorted(inner_edges, entropy, side="right")
    bins = jnp.minimum(sensitivities * BINS_PER_MEDIAN, NUM_BINS - 1).astype(jnp.int32)
    return LeafCounts(
        sensitivity=jnp.stack([_histogram(row, NUM_BINS) for row in bins]),
        specialty=_histogram(cell, len(Specialty) * (num_tasks + 1)).reshape(len(Specialty), -1),
        entropy=_histogram(jnp.where(activated, entropy_bin, num_bins), num_bins),
        entropy_sum=_sum(jnp.where(activated, entropy, 0.0)),
    )


def _histogram(places: Int[Array, "*shape"], length: int) -> Int[Array, " length"]:
    """How often each of 0 .. length - 1 occurs; places beyond are left out."""
    return jnp.bincount(places.reshape(-1), length=length)


def _sum(values: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Along the last axis first: one running float32 sum over millions would lose digits."""
    return jnp.sum(jnp.sum(values, axis=-1)) if values.ndim else values
