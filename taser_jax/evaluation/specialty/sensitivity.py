"""Task-specific sensitivities |g_t·θ|, summed or averaged over batches where the parameters live.

One task's gradient is in memory at a time. The result has one value per task and parameter: a tree
for each task, sharded as the parameters are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer, PyTree

from taser_jax.devices.parameter_rules import parameter_paths
from taser_jax.models.batch import Batch
from taser_jax.optim.median import MedianOver, lower_median
from taser_jax.storage.errors import DataError

TaskLoss = Callable[[PyTree, Batch], jax.Array]
"""(parameters, a task's batch) -> scalar loss."""


_LARGEST = 1e30
"""Bound of a normalised sensitivity, as in T-SAGE: finite also where a median is tiny."""


class Sample(NamedTuple):
    """Sensitivities of some parameters to each task, batch by batch.

    Attributes:
        values: |g·θ|.
        batch_medians: median of each batch and task, over all parameters of the model.
        medians: median of each task's mean over the batches, over all parameters too.
    """

    values: Float[np.ndarray, "batches tasks parameters"]
    batch_medians: Float[np.ndarray, "batches tasks"]
    medians: Float[np.ndarray, " tasks"]


class Sensitivities(NamedTuple):
    """Sums over batches of |g_t·θ| at one point of the parameters, and their medians.

    Attributes:
        totals: task -> tree shaped and sharded as the parameters.
        medians: exact lower medians of the totals over all parameters, in the order of the tasks.
            A total divided by its median is the median-normalised mean: the number of batches
            cancels.
        sample: sensitivities of some parameters, batch by batch, if requested.
    """

    totals: dict[str, PyTree]
    medians: Float[Array, " task"]
    sample: Sample | None

    def leaves(self) -> dict[str, tuple[jax.Array, ...]]:
        """Path of a parameter -> each task's total of it."""
        trees = list(self.totals.values())
        by_task = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
        return dict(zip(parameter_paths(trees[0]), by_task, strict=True))


def make_measure(
    losses: Mapping[str, TaskLoss], *, over: MedianOver = MedianOver.ALL, sampled: int = 0
) -> Callable[..., Sensitivities]:
    """Makes the function that measures sensitivities, compiled once for all checkpoints.

    Example:
        θ = (1, −2) and gradients (3, 1), then (−1, 2): |gθ| of (3, 2) and (1, 4), total (4, 6),
        lower median 4.

    Args:
        losses: each task's loss, in the order of the task axis.
        over: entries over which medians are taken.
        sampled: number of parameters whose sensitivities are kept for every batch.

    Returns:
        `measure(params, batches, *, where) -> Sensitivities`: Σ over batches of |g_t·θ| of every
        task and parameter, and each task's median. `batches` yields mappings task -> batch; totals
        are sharded as `params`; `where` names them in errors. It raises `DataError` where a
        gradient is not finite or a median is 0.
    """

    def add(
        loss: TaskLoss,
        total: PyTree,
        finite: Array,
        params: PyTree,
        batch: Batch,
        *,
        shardings: PyTree,
    ) -> tuple[PyTree, Array, tuple[Array, Array] | None]:
        new = sensitivity(loss, params, batch)
        total = constrain(jax.tree.map(jnp.add, total, new), shardings)
        kept = None
        if sampled:
            values = pick(new, sampled_places(new, sampled))
            whole = NamedSharding(shardings[0].mesh, PartitionSpec())
            kept = jax.lax.with_sharding_constraint(values, whole), task_median(new, over)
        return total, finite & is_finite(new), kept

    adders = {
        task: jax.jit(functools.partial(add, loss), donate_argnums=0, static_argnames="shardings")
        for task, loss in losses.items()
    }

    def measure(
        params: PyTree, batches: Iterable[Mapping[str, Batch]], *, where: str = "sensitivities"
    ) -> Sensitivities:
        shardings = shardings_of(params)
        totals = {task: zeros_like(params) for task in losses}
        finite = {task: jnp.asarray(True) for task in losses}
        kept: list[list[jax.Array]] = []
        for batch in batches:
            kept.append([])
            for task, add in adders.items():
                totals[task], finite[task], of_batch = add(
                    totals[task], finite[task], params, batch[task], shardings=shardings
                )
                kept[-1].append(jax.tree.map(np.asarray, of_batch))
        check_finite(finite, where=where)
        medians = jnp.stack([task_median(tree, over) for tree in totals.values()])
        check_medians(list(medians), tasks=list(losses), over=over, where=where)
        sample = None
        if sampled:
            values, batch_medians = (
                np.array([[of_task[part] for of_task in row] for row in kept]) for part in (0, 1)
            )
            sample = Sample(values, batch_medians, np.asarray(medians) / len(kept))
        return Sensitivities(totals, medians, sample)

    return measure


def sampled_places(params: PyTree, number: int) -> list[Integer[np.ndarray, " places"]]:
    """Flat places in each leaf of about evenly spaced parameters, always the same ones.

    Args:
        params: arrays or shapes.
        number: number of places in all leaves together; all parameters where there are fewer.
    """
    sizes = np.array([leaf.size for leaf in jax.tree.leaves(params)], np.int64)
    number = int(min(number, sizes.sum()))
    # One at random in each of `number` stretches: a constant stride would meet the same columns.
    starts = np.arange(number + 1) * sizes.sum() // max(number, 1)
    places = np.random.default_rng(0).integers(starts[:-1], starts[1:])
    return [
        places[(end - size <= places) & (places < end)] - (end - size)
        for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]


def pick(
    tree: PyTree, places: Sequence[Integer[np.ndarray, " places"]]
) -> Float[Array, " sampled"]:
    """The entries at `sampled_places`, leaf after leaf."""
    leaves = map(jnp.atleast_1d, jax.tree.leaves(tree))
    return jnp.concatenate(
        [leaf[jnp.unravel_index(at, leaf.shape)] for leaf, at in zip(leaves, places, strict=True)]
    )


def zeros_like(params: PyTree) -> PyTree:
    """Float32 zeros shaped and sharded as the parameters."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, jnp.float32, device=leaf.sharding), params
    )


def shardings_of(tree: PyTree) -> tuple[jax.sharding.Sharding, ...]:
    """The sharding of each leaf, in tree order; hashable."""
    return tuple(leaf.sharding for leaf in jax.tree.leaves(tree))


def constrain(tree: PyTree, shardings: Sequence[jax.sharding.Sharding]) -> PyTree:
    """Keeps the tree sharded: the compiler might otherwise copy sums to every device."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, jax.lax.with_sharding_constraint(leaves, list(shardings)))


def sensitivity(loss: TaskLoss, params: PyTree, batch: Batch) -> PyTree:
    """|g·θ| of every parameter: the first-order change of the loss were it set to 0 (Equation 5).

    Args:
        loss: (parameters, batch) -> scalar.
        params: where the gradient is taken.
        batch: a task's batch.

    Returns:
        A float32 tree shaped and sharded as the parameters.
    """
    gradients = jax.grad(loss)(params, batch)

    def of_leaf(gradient: jax.Array, param: jax.Array) -> jax.Array:
        return jnp.abs(gradient * param).astype(jnp.float32)

    return jax.tree.map(of_leaf, gradients, params)


def is_finite(tree: PyTree) -> PyTree:
    """Whether all entries of all leaves are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def normalize(values: Float[Array, "*shape"], median: Float[Array, ""]) -> Float[Array, "*shape"]:
    """Sensitivities in medians of their task (Equation 10)."""
    return jnp.minimum(values / median, _LARGEST)


@functools.partial(jax.jit, static_argnames="over")
def task_median(values: PyTree, over: MedianOver) -> Float[Array, ""]:
    """The exact lower median over all leaves of one task's tree."""
    return lower_median([leaf[None] for leaf in jax.tree.leaves(values)], over=over).value[0]


def check_finite(finite: Mapping[str, jax.Array], *, where: str) -> None:
    """Raises `DataError` that names the tasks with gradients that are not finite."""
    bad = [task for task, is_good in finite.items() if not bool(is_good)]
    if bad:
        raise DataError(
            f"gradients of {', '.join(bad)} are not finite",
            where=where,
            expected="finite losses and gradients on the training data",
            fix="use a checkpoint from before training diverged",
        )


def check_medians(
    medians: Sequence[jax.Array], *, tasks: Sequence[str], over: MedianOver, where: str
) -> None:
    """Raises `DataError` that names the tasks whose median is 0: nothing can be divided by it."""
    zero = [task for task, median in zip(tasks, medians, strict=True) if not float(median) > 0]
    if zero:
        raise DataError(
            f"the median sensitivity to {', '.join(zero)} is 0",
            where=where,
            expected="gradients that are not 0 for more than half of the parameters",
            fix="average over more batches (num_batches), or set median_over='nonzero': most "
            "parameters of a small model are vocabulary rows that no batch touches"
            if over is MedianOver.ALL
            else "leave the task out: its loss does not depend on the parameters",
        )
