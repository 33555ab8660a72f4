"""Which parameters stay with their task, and what noise alone would give.

At a checkpoint every parameter is marked with the task of its highest I, T-SAGE's moving average of
normalised sensitivities. A moving average keeps a parameter with its task whether or not it prefers
one: averages of two checkpoints share batches. Noise is what parameters without a preference give:
in each batch the tasks of each are rotated at random, so that every task is equally likely to have
each of its values.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
Algorithm 1, section 7.4 and Table 4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int16, PyTree

from taser_jax.evaluation import specialty
from taser_jax.optim.median import MedianOver
from taser_jax.optim.tsage import BiasCorrection

Averages = Mapping[str, PyTree]
"""Task -> moving averages of normalised sensitivities, in the order of the task axis, which
`jax.tree.map` over the whole mapping would lose."""
Sample = Float[np.ndarray, "batches tasks parameters"]
"""Median-normalised sensitivities of some parameters in single batches."""


class Marks(NamedTuple):
    """The tasks of a leaf's parameters at one checkpoint.

    Attributes:
        owner: the most sensitive task; the number of tasks if several tie.
        specific: whether the parameter is task-specific.
    """

    owner: Int16[Array, "*shape"]
    specific: Bool[Array, "*shape"]


class Commitment(NamedTuple):
    """Parameters that stay with their task from one checkpoint to the next.

    Attributes:
        earlier_step: step of the earlier checkpoint.
        step: step of the later checkpoint.
        specific: parameters that are task-specific at the earlier one.
        committed: how many of these are most sensitive to the same task at the later one.
        noise: the rate if no parameter preferred a task; None if unknown.
    """

    earlier_step: int
    step: int
    specific: int
    committed: int
    noise: float | None = None

    @property
    def rate(self) -> float:
        """The task commitment rate; NaN if no parameter is task-specific."""
        return self.committed / self.specific if self.specific else float("nan")


def commitments(
    averages: Iterable[tuple[int, Averages]],
    samples: Mapping[int, Sample],
    *,
    beta: float,
    temperature: float,
    correction: BiasCorrection = BiasCorrection.NONE,
) -> list[Commitment]:
    """Commitment from each checkpoint to the next, by T-SAGE's moving averages of I_t.

    A parameter is marked with the task of its highest average, and whether it is task-specific.
    Marks of two checkpoints are compared on the devices; only counts leave them.

    Args:
        averages: (step, averages) of each checkpoint; only marks are kept of those before.
        samples: step -> sensitivities of single batches, for the noise.
        beta: share of the old average that T-SAGE kept in each step.
        temperature: τ of the softmax over tasks.
        correction: of averages, before T-SAGE's softmax.
    """
    simulate = functools.partial(
        noise_commitment, beta=beta, temperature=temperature, correction=correction
    )
    rows: list[Commitment] = []
    earlier: tuple[int, list[Marks]] | None = None
    for step, current in averages:
        by_leaf = zip(*map(jax.tree.leaves, current.values()), strict=True)
        divisor = correction.divisor(beta, step)
        marks = [_mark(leaf, temperature, divisor) for leaf in by_leaf]
        if earlier is not None:
            earlier_step, earlier_marks = earlier
            pairs = zip(earlier_marks, marks, strict=True)
            leaves = [np.asarray(_compare(*leaf), np.int64) for leaf in pairs]
            noise = None
            # A batch whose median is 0 cannot be normalised; nor can T-SAGE normalise it.
            if np.isfinite(samples[step]).all():
                noise = simulate(samples[step], steps=(earlier_step, step)).rate
            specific, committed = np.sum(leaves, axis=0).tolist()
            rows.append(Commitment(earlier_step, step, specific, committed, noise))
        earlier = step, marks
    return rows


_count = jax.jit(specialty.count)


@jax.jit
def _mark(by_task: tuple[Float[Array, "*shape"], ...], temperature: float, divisor: float) -> Marks:
    values = jnp.stack(by_task) / divisor
    kind = specialty.specialty_of(values, specialty.task_entropy(values, temperature))
    owner = specialty.most_sensitive_task(values).astype(jnp.int16)
    return Marks(owner, kind == specialty.Specialty.SPECIFIC)


@jax.jit
def _compare(earlier: Marks, later: Marks) -> Int[Array, "2"]:
    """Counts of those task-specific earlier, and of those with the same owner later."""
    committed = earlier.specific & (earlier.owner == later.owner)
    return jnp.stack([jnp.sum(earlier.specific), jnp.sum(committed)])


def noise_specialty(
    sample: Sample, *, temperature: float, over: MedianOver = MedianOver.ALL
) -> specialty.LeafCounts | None:
    """Counts of the sampled parameters' means if none preferred a task; None if unknown.

    Like those of the parameters, means are divided by their lower median: that of batches' medians
    is 1, that of means above it.

    Args:
        sample: one checkpoint's sample.
        temperature: τ of the softmax over tasks.
        over: entries over which the median is taken.
    """
    if not np.isfinite(sample).all():
        return None
    batches, tasks, parameters = sample.shape
    shift = np.random.default_rng(0).integers(tasks, size=(batches, 1, parameters))
    task = (np.arange(tasks)[:, None] + shift) % tasks
    mean = np.take_along_axis(sample, task, axis=1).mean(axis=0)
    counted = mean if over is MedianOver.ALL else np.where(mean > 0, mean, np.nan)
    median = np.nanquantile(counted, 0.5, axis=1, method="lower", keepdims=True)
    if not (median > 0).all():
        return None
    return jax.device_get(_count((mean / median).astype(np.float32), temperature))


def noise_commitment(
    sample: Sample,
    *,
    beta: float,
    temperature: float,
    steps: tuple[int, int],
    correction: BiasCorrection = BiasCorrection.NONE,
) -> Commitment:
    """Commitment of the sampled parameters if none preferred a task.

    At every step each parameter takes its sensitivities of one batch of the sample, drawn at
    random. They enter the same moving average, and the same bounds decide what is task-specific.

    Example:
        Two tasks, β = 0.9, normally distributed sensitivities, every parameter task-specific,
        averages of 30 and 60 steps: they correlate by 0.9^30·√((1 − 0.9^60)/(1 − 0.9^120)) =
        0.042, and ½ + arcsin(0.042)/π = 51.3% keep their task. For 30 and 32 steps it is 80.0%.

    Args:
        sample: one checkpoint's sample.
        beta: share of the old average that is kept.
        temperature: τ of the softmax over tasks.
        steps: the earlier and the later checkpoint's.
        correction: of averages.
    """
    pool = jnp.asarray(sample, jnp.float32)
    average = jnp.zeros(pool.shape[1:], jnp.float32)
    marks = []
    for start, stop in zip((0, steps[0]), steps, strict=True):
        average = _add_noise(pool, average, beta, start, stop)
        marks.append(_mark(tuple(average), temperature, correction.divisor(beta, stop)))
    return Commitment(*steps, *map(int, _compare(*marks)))


@jax.jit
def _add_noise(
    pool: Float[Array, "batches tasks parameters"],
    average: Float[Array, "tasks parameters"],
    beta: float,
    start: int,
    stop: int,
) -> Float[Array, "tasks parameters"]:
    num_batches, num_tasks, number = pool.shape

    def add(step: jax.Array, average: jax.Array) -> jax.Array:
        batch_key, shift_key = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
        batch = jax.random.randint(batch_key, (number,), 0, num_batches)
        shift = jax.random.randint(shift_key, (number,), 0, num_tasks)
        task = (jnp.arange(num_tasks)[:, None] + shift) % num_tasks
        return beta * average + (1 - beta) * pool[batch, task, jnp.arange(number)]

    return jax.lax.fori_loop(start, stop, add, average)
