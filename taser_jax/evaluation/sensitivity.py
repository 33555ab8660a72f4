"""Task-specific sensitivities |g_t·θ|, measured and summed where the parameters live.

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
from jaxtyping import Array, Bool, Float, Integer, PyTree

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.optim.median import MedianOver, lower_median
from taser_jax.storage.errors import DataError

TaskLoss = Callable[[PyTree, PyTree], jax.Array]
"""(parameters, a task's batch) -> scalar loss."""

_SAMPLED = 131_072
_LARGEST = 1e30
"""Bound of a normalised sensitivity, as in T-SAGE: finite also where a median is tiny."""


class BatchSensitivity(NamedTuple):
    """Sensitivities to one task in one batch.

    Attributes:
        values: |g·θ| in float32, a tree shaped and sharded as the parameters.
        median: lower median of all values.
        sample: the values at `sampled_places`.
        is_finite: whether all values are.
    """

    values: PyTree
    median: Float[Array, ""]
    sample: Float[Array, " sampled"]
    is_finite: Bool[Array, ""]


Measures = Mapping[str, Callable[..., BatchSensitivity]]
"""Task -> compiled function of parameters, the task's batch and the parameters' shardings."""


class Sample(NamedTuple):
    """Sensitivities of some parameters to each task, batch by batch.

    Attributes:
        values: |g·θ|.
        medians: median of each batch and task, over all parameters of the model.
    """

    values: Float[np.ndarray, "batches tasks parameters"]
    medians: Float[np.ndarray, "batches tasks"]


class Sensitivities(NamedTuple):
    """Sums over batches of |g_t·θ| at one point of the parameters, and their medians.

    Attributes:
        totals: task -> tree shaped and sharded as the parameters.
        medians: exact lower medians of the totals over all parameters, in the order of the tasks.
            A total divided by its median is the median-normalised mean: the number of batches
            cancels.
        sample: sensitivities of some parameters, batch by batch.
    """

    totals: dict[str, PyTree]
    medians: Float[Array, " task"]
    sample: Sample

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
        over: entries over which medians are taken.
        sampled: number of parameters in a sample.
    """

    def of_task(
        loss: TaskLoss, params: PyTree, batch: PyTree, *, shardings: Sequence[NamedSharding]
    ) -> BatchSensitivity:
        values = sensitivity(loss, params, batch)
        leaves, structure = jax.tree.flatten(values)
        # The compiler might otherwise copy them to every device.
        leaves = jax.lax.with_sharding_constraint(leaves, list(shardings))
        sample = _pick(leaves, sampled_places(leaves, sampled))
        everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
        return BatchSensitivity(
            values=jax.tree.unflatten(structure, leaves),
            median=_median(leaves, over),
            sample=jax.lax.with_sharding_constraint(sample, everywhere),
            is_finite=jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])),
        )

    return {
        task: jax.jit(functools.partial(of_task, loss), static_argnames="shardings")
        for task, loss in losses.items()
    }


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
    sample_medians: list[list[np.ndarray]] = []
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(params))
    for batch in batches:
        samples.append([])
        sample_medians.append([])
        for task, measure in measures.items():
            measured = measure(params, batch[task], shardings=shardings)
            if not bool(measured.is_finite):
                fix = "use a checkpoint from before training diverged"
                raise DataError(f"gradients of {task} are not finite", where=checkpoint, fix=fix)
            values = measured.values
            totals[task] = _add(totals[task], values) if task in totals else values
            samples[-1].append(np.asarray(measured.sample))
            sample_medians[-1].append(np.asarray(measured.median))
    medians = {task: _median(jax.tree.leaves(total), over) for task, total in totals.items()}
    _check_medians(medians, checkpoint=checkpoint, over=over)
    return Sensitivities(
        totals,
        jnp.stack(list(medians.values())),
        Sample(np.array(samples), np.array(sample_medians)),
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


def normalize(values: Float[Array, "*shape"], median: Float[Array, ""]) -> Float[Array, "*shape"]:
    """Sensitivities in medians of their task (Equation 10)."""
    return jnp.minimum(values / median, _LARGEST)


def _check_medians(medians: Mapping[str, jax.Array], *, checkpoint: str, over: MedianOver) -> None:
    """Raises `DataError` that names the tasks whose median is 0: nothing can be divided by it."""
    zero = [task for task, median in medians.items() if not float(median) > 0]
    if zero:
        fix = "leave the task out: its loss does not depend on the parameters"
        if over is MedianOver.ALL:
            fix = (
                "average over more batches (num_batches), or set median_over='nonzero': most "
                "parameters of a small model are vocabulary rows that no batch touches"
            )
        problem = f"the median sensitivity to {', '.join(zero)} is 0"
        raise DataError(problem, where=checkpoint, fix=fix)


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


@functools.partial(jax.jit, donate_argnums=0)
def _add(total: PyTree, values: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, values)


@functools.partial(jax.jit, static_argnames="over")
def _median(leaves: Sequence[jax.Array], over: MedianOver) -> Float[Array, ""]:
    """The exact lower median over all leaves of one task."""
    return lower_median([leaf[None] for leaf in leaves], over=over).value[0]
