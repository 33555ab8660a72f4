"""Which tasks a model's parameters serve: sensitivities, task entropy and specialty.

Of a parameter with median-normalised sensitivities I_t, TACO-DR's Equation 6 takes
p = softmax over tasks of I_t/τ and the entropy S = −Σ p ln p. One task's gradient is in memory at a
time. Every device counts its own part of a leaf and the counts are added up: nothing with one entry
per parameter leaves the devices.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
sections 4 and 7.3.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.optim.median import MedianOver, lower_median
from taser_jax.storage.errors import DataError

TaskLoss = Callable[[PyTree, PyTree], jax.Array]
"""(parameters, a task's batch) -> scalar loss."""
Measures = Mapping[str, Callable[..., tuple[PyTree, jax.Array, jax.Array]]]
"""Task -> compiled function of parameters, the task's batch and the parameters' shardings."""

SPECIFIC_ENTROPY = 0.3
"""Activated parameters of a lower task entropy, in nats, are task-specific, as in the paper: about
95% on one task and 5% spread over seven."""
ACTIVATED = 0.1
"""Parameters whose sensitivities are all below this many medians are not activated, as there."""
SHARED_BINS = 12
"""Bins of the entropies of shared parameters."""
BINS_PER_MEDIAN, LARGEST_BINNED = 10, 6
"""Bins of sensitivities are evenly spaced up to so many medians; one more has all above."""
NUM_BINS = BINS_PER_MEDIAN * LARGEST_BINNED + 1
# Parameters whose sensitivities in single batches are kept.
_SAMPLED = 131_072
# As in T-SAGE: finite also where a median is tiny.
_LARGEST = 1e30


class Specialty(enum.IntEnum):
    """Kinds of parameters.

    NOT_ACTIVATED: no task's sensitivity reaches the bound. SPECIFIC: activated, and the task
    entropy is low. SHARED: the rest.
    """

    NOT_ACTIVATED = 0
    SPECIFIC = 1
    SHARED = 2

    @property
    def label(self) -> str:
        """Its name in tables."""
        return ("not activated", "task-specific", "shared")[self]


class Sensitivities(NamedTuple):
    """Sums over batches of |g_t·θ| at one point of the parameters, and their medians.

    Attributes:
        totals: task -> tree shaped and sharded as the parameters.
        medians: exact lower medians of the totals over all parameters, in the order of the tasks.
            A total divided by its median is the median-normalised mean: the number of batches
            cancels.
        sample: sensitivities of some parameters in each batch, in medians of the batch; NaN where
            that is 0.
    """

    totals: dict[str, PyTree]
    medians: Float[Array, " task"]
    sample: Float[np.ndarray, "batches tasks parameters"]

    def leaves(self) -> dict[str, tuple[jax.Array, ...]]:
        """Path of a parameter -> each task's total of it."""
        trees = list(self.totals.values())
        by_task = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
        return dict(zip(leaves_by_path(trees[0]), by_task, strict=True))


def make_measures(
    losses: Mapping[str, TaskLoss], *, over: MedianOver = MedianOver.ALL, sampled: int = _SAMPLED
) -> Measures:
    """Makes the functions that measure a batch of each task, compiled once for all checkpoints.

    Args:
        losses: each task's loss, in the order of the task axis.
        over: entries over which a batch's median is taken.
        sampled: number of parameters in a sample.

    Returns:
        Task -> function that returns |g·θ| of every parameter, whether all are finite, and some of
        them in medians of all.
    """

    def of_task(
        loss: TaskLoss, params: PyTree, batch: PyTree, *, shardings: Sequence[NamedSharding]
    ) -> tuple[PyTree, Bool[Array, ""], Float[Array, " sampled"]]:
        leaves, structure = jax.tree.flatten(sensitivity(loss, params, batch))
        # The compiler might otherwise copy them to every device.
        leaves = jax.lax.with_sharding_constraint(leaves, list(shardings))
        is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
        median = lower_median([leaf[None] for leaf in leaves], over=over).value[0]
        sample = _pick(leaves, sampled_places(leaves, sampled)) / median
        everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
        sample = jax.lax.with_sharding_constraint(sample, everywhere)
        return jax.tree.unflatten(structure, leaves), is_finite, sample

    return {
        task: jax.jit(functools.partial(of_task, loss), static_argnames="shardings")
        for task, loss in losses.items()
    }


def sampled_places(
    leaves: Sequence[jax.Array | np.ndarray], number: int
) -> list[Integer[np.ndarray, " _"]]:
    """Flat places in each leaf of about evenly spaced parameters, always the same ones.

    Args:
        leaves: arrays of which only sizes are read.
        number: number of places in all leaves together; all parameters where there are fewer.
    """
    sizes = np.array([leaf.size for leaf in leaves], np.int64)
    number = min(number, int(sizes.sum()))
    # One at random in each of `number` stretches: a constant stride would meet the same columns.
    starts = np.arange(number + 1) * sizes.sum() // number
    places = np.random.default_rng(0).integers(starts[:-1], starts[1:])
    return [
        places[(end - size <= places) & (places < end)] - (end - size)
        for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]


def _pick(
    leaves: Sequence[jax.Array], places: Sequence[Integer[np.ndarray, " _"]]
) -> Float[Array, " sampled"]:
    """The entries at `sampled_places`, leaf after leaf."""
    arrays = [jnp.atleast_1d(leaf) for leaf in leaves]
    return jnp.concatenate(
        [leaf[jnp.unravel_index(at, leaf.shape)] for leaf, at in zip(arrays, places, strict=True)]
    )


def sensitivity(loss: TaskLoss, params: PyTree, batch: PyTree) -> PyTree:
    """|g·θ| of every parameter: the first-order change of the loss were it set to 0 (Equation 5).

    Args:
        loss: (parameters, batch) -> scalar.
        params: where the gradient is taken.
        batch: a task's batch.

    Returns:
        A float32 tree shaped as the parameters.
    """
    gradients = jax.grad(loss)(params, batch)
    return jax.tree.map(
        lambda gradient, param: jnp.abs(gradient * param).astype(jnp.float32), gradients, params
    )


def total_sensitivities(
    measures: Measures,
    params: PyTree,
    batches: Iterable[Mapping[str, PyTree]],
    *,
    checkpoint: str,
    over: MedianOver = MedianOver.ALL,
) -> Sensitivities:
    """Σ over batches of |g_t·θ| of every task and parameter, and each task's median.

    Example:
        θ = (1, −2) and gradients (3, 1), then (−1, 2): |gθ| of (3, 2) and (1, 4), total (4, 6),
        lower median 4.

    Args:
        measures: from `make_measures`.
        params: where the gradients are taken.
        batches: mappings task -> batch.
        checkpoint: names the parameters in errors.
        over: entries over which medians are taken.

    Raises:
        DataError: a gradient is not finite, or a task's median is 0.
    """
    totals: dict[str, PyTree] = {}
    samples: list[list[np.ndarray]] = []
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(params))
    for batch in batches:
        samples.append([])
        for task, measure in measures.items():
            values, is_finite, sample = measure(params, batch[task], shardings=shardings)
            if not bool(is_finite):
                fix = "use a checkpoint from before training diverged"
                raise DataError(f"gradients of {task} are not finite", where=checkpoint, fix=fix)
            totals[task] = _add(totals[task], values) if task in totals else values
            samples[-1].append(np.asarray(sample))
    medians = {task: _median(jax.tree.leaves(total), over) for task, total in totals.items()}
    if zero := [task for task, median in medians.items() if not float(median) > 0]:
        raise DataError(
            f"the median sensitivity to {', '.join(zero)} is 0",
            where=checkpoint,
            fix="average over more batches (num_batches), or set median_over='nonzero': most "
            "parameters of a small model are vocabulary rows that no batch touches",
        )
    return Sensitivities(totals, jnp.stack(list(medians.values())), np.array(samples))


@functools.partial(jax.jit, donate_argnums=0)
def _add(total: PyTree, values: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, values)


@functools.partial(jax.jit, static_argnames="over")
def _median(leaves: Sequence[jax.Array], over: MedianOver) -> Float[Array, ""]:
    """The exact lower median over all leaves of one task."""
    return lower_median([leaf[None] for leaf in leaves], over=over).value[0]


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
        return float(self.specialty[kind].sum() / self.size)

    def specific_by_task(self) -> Float[np.ndarray, " tasks"]:
        """Share of all parameters that are specific to each task."""
        return np.asarray(self.specialty)[Specialty.SPECIFIC, :-1] / self.size


def add_up(leaves: Iterable[LeafCounts]) -> LeafCounts:
    """Counts of several leaves together, in int64 and float64, which do not overflow."""
    wide = {"i": np.int64, "f": np.float64}
    fields = ([np.asarray(count) for count in field] for field in zip(*leaves, strict=True))
    sums = (np.sum(counts, axis=0, dtype=wide[counts[0].dtype.kind]) for counts in fields)
    return LeafCounts(*map(np.asarray, sums))


def entropy_edges(num_tasks: int) -> Float[np.ndarray, " edges"]:
    """Edges of the entropy's bins, in nats: one below the bound, the others up to ln T."""
    return np.append(0.0, np.linspace(SPECIFIC_ENTROPY, math.log(num_tasks), SHARED_BINS + 1))


def task_entropy(
    sensitivities: Float[Array, "task *shape"], temperature: float | Float[Array, ""]
) -> Float[Array, "*shape"]:
    """Equation 6's S = −Σ p ln p of p = softmax over tasks of I_t/τ, in nats.

    Example:
        p of 0.95 and seven times 0.05/7 -> 0.296; eight times 1/8 -> ln 8 = 2.079.
    """
    weights = jax.nn.softmax(sensitivities / temperature, axis=0)
    return jnp.sum(jax.scipy.special.entr(weights), axis=0)


def specialty_of(
    sensitivities: Float[Array, "task *shape"], entropy: Float[Array, "*shape"]
) -> Int[Array, "*shape"]:
    """Each parameter's `Specialty`."""
    is_activated = jnp.max(sensitivities, axis=0) >= ACTIVATED
    kind = jnp.where(entropy < SPECIFIC_ENTROPY, Specialty.SPECIFIC, Specialty.SHARED)
    return jnp.where(is_activated, kind, Specialty.NOT_ACTIVATED)


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
        normalized = [
            jnp.minimum(total / median, _LARGEST)
            for total, median in zip(totals, medians, strict=True)
        ]
        counts = count(jnp.stack(normalized), temperature)
        return jax.lax.psum(counts, split_along) if split_along else counts

    return jax.shard_map(
        of_part,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(totals, medians, jnp.asarray(temperature))


def count(
    sensitivities: Float[Array, "task *shape"], temperature: float | Float[Array, ""]
) -> LeafCounts:
    """Counts of one array of median-normalised sensitivities."""
    num_tasks = len(sensitivities)
    entropy = task_entropy(sensitivities, temperature)
    kind = specialty_of(sensitivities, entropy)
    is_activated = kind != Specialty.NOT_ACTIVATED
    cell = kind * (num_tasks + 1) + most_sensitive_task(sensitivities)
    inner_edges = jnp.asarray(entropy_edges(num_tasks)[1:-1], jnp.float32)
    num_bins = len(inner_edges) + 1
    entropy_bin = jnp.searchsorted(inner_edges, entropy, side="right")
    bins = jnp.minimum(sensitivities * BINS_PER_MEDIAN, NUM_BINS - 1).astype(jnp.int32)
    of_activated = jnp.where(is_activated, entropy, 0.0)
    return LeafCounts(
        sensitivity=jnp.stack([_histogram(row, NUM_BINS) for row in bins]),
        specialty=_histogram(cell, len(Specialty) * (num_tasks + 1)).reshape(len(Specialty), -1),
        entropy=_histogram(jnp.where(is_activated, entropy_bin, num_bins), num_bins),
        # Along the last axis first: one running sum over millions would lose digits.
        entropy_sum=jnp.sum(jnp.sum(jnp.atleast_1d(of_activated), axis=-1)),
    )


def _histogram(places: Int[Array, "*shape"], length: int) -> Int[Array, " length"]:
    """How often each of 0 .. length - 1 occurs; places beyond are left out."""
    return jnp.bincount(places.reshape(-1), length=length)
