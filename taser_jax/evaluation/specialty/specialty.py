"""Task entropy and specialty of parameters, counted leaf by leaf where the parameters live.

Of a parameter with median-normalised sensitivities I_t, TACO-DR's Equation 6 takes
p = softmax over tasks of I_t/τ and the entropy S = −Σ p ln p. Every device counts its own part of a
leaf and the counts are added up: nothing with one entry per parameter leaves the devices.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
sections 4 and 7.3.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from taser_jax.evaluation.specialty.float_bins import NUM_BINS, bin_of
from taser_jax.evaluation.specialty.sensitivity import normalize
from taser_jax.storage.errors import ConfigError

SPECIFIC_BINS, SHARED_BINS = 3, 12


class Specialty(enum.Enum):
    """Kinds of parameters, in the order of the counts.

    NOT_ACTIVATED: no task's sensitivity reaches the bound. SPECIFIC: activated, and the task
    entropy is low. SHARED: the rest.
    """

    NOT_ACTIVATED = "not activated"
    SPECIFIC = "task-specific"
    SHARED = "shared"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The paper's thresholds.

    Attributes:
        specific_entropy: parameters with a lower task entropy (nats) are task-specific; 0.3 is
            about 95% on one task and 5% spread over seven.
        activated: parameters whose sensitivities are all below this many medians are not
            activated.
    """

    specific_entropy: float = 0.3
    activated: float = 0.1

    def __post_init__(self) -> None:
        if not (self.specific_entropy > 0 and self.activated >= 0):
            raise ConfigError(
                f"specific_entropy {self.specific_entropy}, activated {self.activated}",
                where="Bounds",
                expected="an entropy above 0 nats, and 0 medians or more",
                fix="the paper has 0.3 and 0.1",
            )


class LeafCounts(NamedTuple):
    """Counts of one leaf or, added up, of several; K temperatures, T tasks.

    Attributes:
        sensitivity: histogram of each task's values, by `float_bins`. [T, NUM_BINS]
        zeros: how many of each task's values are exactly 0. [T]
        specialty: parameters by temperature, `Specialty` and the most sensitive task; the last
            column counts those whose highest value several tasks share. [K, 3, T + 1]
        entropy: histogram of activated parameters, by `entropy_edges`. [K, bins]
        entropy_sum: sum of the activated parameters' entropies. [K]
        weight_sum: sum of all parameters' softmax weights. [K, T]
        largest_sum: sum of all parameters' largest weights. [K]
    """

    sensitivity: jax.Array | np.ndarray
    zeros: jax.Array | np.ndarray
    specialty: jax.Array | np.ndarray
    entropy: jax.Array | np.ndarray
    entropy_sum: jax.Array | np.ndarray
    weight_sum: jax.Array | np.ndarray
    largest_sum: jax.Array | np.ndarray

    @property
    def size(self) -> int:
        """Number of parameters."""
        return int(self.specialty[0].sum())

    def share(self, what: Specialty, *, temperature: int = 0) -> float:
        """Share of the parameters that are of this kind, at the temperature of that number."""
        of_all = self.specialty[temperature].sum(-1)
        return float(of_all[list(Specialty).index(what)] / of_all.sum())


def on_host(counts: LeafCounts) -> LeafCounts:
    """The counts as int64 and float64 arrays of NumPy, which add up without overflow."""
    wide = {"i": np.int64, "f": np.float64}
    arrays = [np.asarray(count) for count in counts]
    return LeafCounts(*(array.astype(wide[array.dtype.kind]) for array in arrays))


def add_up(leaves: Iterable[LeafCounts]) -> LeafCounts:
    """Counts of several leaves together."""
    return functools.reduce(lambda one, other: LeafCounts(*map(operator.add, one, other)), leaves)


def entropy_edges(num_tasks: int, bounds: Bounds) -> Float[np.ndarray, " edges"]:
    """Edges of the entropy's bins, in nats: some below the bound, the others up to ln T.

    Raises:
        ConfigError: the bound is above the largest entropy that so many tasks can have.
    """
    highest = math.log(num_tasks)
    if bounds.specific_entropy >= highest:
        raise ConfigError(
            f"an entropy below {bounds.specific_entropy} nats counts as task-specific",
            where="Bounds.specific_entropy",
            expected=f"less than ln {num_tasks} = {highest:.3f}, which {num_tasks} tasks cannot "
            "exceed",
            fix="lower the bound, or compare more tasks",
        )
    low = np.linspace(0.0, bounds.specific_entropy, SPECIFIC_BINS + 1)
    return np.concatenate([low, np.linspace(bounds.specific_entropy, highest, SHARED_BINS + 1)[1:]])


def task_weights(
    sensitivities: Float[Array, "task *shape"], temperature: jax.typing.ArrayLike
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
    sensitivities: Float[Array, "task *shape"], entropy: Float[Array, "*shape"], bounds: Bounds
) -> Int[Array, "*shape"]:
    """The number of each parameter's `Specialty` in the enum."""
    activated = jnp.max(sensitivities, axis=0) >= bounds.activated
    specific = entropy < bounds.specific_entropy
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


@functools.partial(jax.jit, static_argnames=("bounds", "temperatures", "sharding"))
def count_leaf(
    totals: tuple[jax.Array, ...],
    medians: Float[Array, " task"],
    *,
    bounds: Bounds,
    temperatures: tuple[float, ...],
    sharding: NamedSharding,
) -> LeafCounts:
    """Counts of one leaf; every device counts its own part, and all get the result.

    Args:
        totals: each task's sums of sensitivities, in the leaf's shape.
        medians: medians of each task's sums, over all leaves.
        bounds: what counts as specific and as activated.
        temperatures: τ of the entropies.
        sharding: sharding of each of the totals.
    """

    def of_part(totals: tuple[jax.Array, ...], medians: jax.Array) -> LeafCounts:
        counts = _count(jnp.stack(list(map(normalize, totals, medians))), bounds, temperatures)
        return jax.tree.map(lambda count: jax.lax.psum(count, axes), counts) if axes else counts

    axes = _mesh_axes(sharding.spec)
    return jax.shard_map(
        of_part,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(totals, medians)


def _mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Mesh axes that an array is split along; along the others it is copied."""
    names = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    return tuple(name for axes in names for name in axes)


def _count(
    sensitivities: Float[Array, "task *shape"], bounds: Bounds, temperatures: Sequence[float]
) -> LeafCounts:
    num_tasks = len(sensitivities)
    owner = most_sensitive_task(sensitivities)
    activated = jnp.max(sensitivities, axis=0) >= bounds.activated
    inner_edges = jnp.asarray(entropy_edges(num_tasks, bounds)[1:-1], jnp.float32)
    specialty, entropies, entropy_sum, weight_sum, largest_sum = [], [], [], [], []
    for temperature in temperatures:
        weights = task_weights(sensitivities, temperature)
        entropy = task_entropy(weights)
        kind = specialty_of(sensitivities, entropy, bounds)
        specialty.append(
            _histogram(kind * (num_tasks + 1) + owner, len(Specialty) * (num_tasks + 1))
        )
        place = jnp.searchsorted(inner_edges, entropy, side="right")
        entropies.append(_histogram(jnp.where(activated, place, -1), len(inner_edges) + 1))
        entropy_sum.append(_sum(jnp.where(activated, entropy, 0.0)))
        weight_sum.append(jnp.stack([_sum(weight) for weight in weights]))
        largest_sum.append(_sum(jnp.max(weights, axis=0)))
    return LeafCounts(
        sensitivity=jnp.stack([_histogram(bin_of(row), NUM_BINS) for row in sensitivities]),
        zeros=jnp.stack([jnp.sum(row == 0, dtype=jnp.int32) for row in sensitivities]),
        specialty=jnp.stack(specialty).reshape(len(temperatures), len(Specialty), num_tasks + 1),
        entropy=jnp.stack(entropies),
        entropy_sum=jnp.stack(entropy_sum),
        weight_sum=jnp.stack(weight_sum),
        largest_sum=jnp.stack(largest_sum),
    )


def _histogram(places: Int[Array, "*shape"], length: int) -> Int[Array, " length"]:
    """How often each of 0 .. length - 1 occurs; negative places are left out."""
    flat = jnp.where(places < 0, length, places).reshape(-1)
    return jnp.zeros(length, jnp.int32).at[flat].add(1, mode="drop")


def _sum(values: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Along the last axis first: one running float32 sum over millions would lose digits."""
    return jnp.sum(jnp.sum(values, axis=-1)) if values.ndim else values
