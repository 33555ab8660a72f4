"""The rates that noise alone would have, from a sample of parameters, batch by batch.

A moving average keeps a parameter with its task whether or not it prefers one: averages of two
checkpoints share batches. `noise_commitments` is the commitment rate of parameters without any
preference, and `agreements` measures how often two independent batches agree on a parameter's task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from taser_jax.evaluation.specialty.commitment import Commitment, compare, correction_factors, mark
from taser_jax.evaluation.specialty.sensitivity import Sample
from taser_jax.evaluation.specialty.specialty import (
    Bounds,
    Specialty,
    most_sensitive_task,
    specialty_of,
    task_entropy,
    task_weights,
)
from taser_jax.optim.tsage_options import BiasCorrection


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How often two means over disjoint batches have the same most sensitive task.

    Attributes:
        batches: in each of the two means.
        activated: the rate among parameters activated in both; NaN if there are none.
        specific: the rate among those task-specific in the first.
        chance: the rate of `activated` if the two were independent, Σ_t p_t·q_t with p and q the
            shares of the tasks in the first and in the second.
    """

    batches: int
    activated: float
    specific: float
    chance: float


def noise_commitments(
    sample: Sample,
    *,
    betas: Sequence[float],
    batches: tuple[int, int],
    temperature: float,
    bounds: Bounds,
    bias_correction: BiasCorrection,
) -> list[Commitment]:
    """Commitment of the sampled parameters if none preferred a task, one `Commitment` per β.

    At every step each parameter takes its normalised sensitivities of one measured batch, drawn at
    random, with the tasks rotated at random, so that every task is equally likely to have each
    value. They enter the same moving average, and the same bounds decide what is task-specific.

    Example:
        Two tasks, β = 0.9, normally distributed sensitivities, every parameter task-specific,
        averages of 30 and 60 batches: they correlate by 0.9^30·√((1 − 0.9^60)/(1 − 0.9^120)) =
        0.042, and ½ + arcsin(0.042)/π = 51.3% keep their task. For 30 and 32 batches it is 80.0%.

    Args:
        sample: one checkpoint's sample.
        betas: shares of the old average that are kept.
        batches: number of batches in the average at the earlier and at the later checkpoint.
        temperature: τ of the entropies.
        bounds: what counts as task-specific.
        bias_correction: how the average is corrected.
    """
    pool = jnp.asarray(sample.values / sample.batch_medians[..., None], jnp.float32)
    _, num_tasks, number = pool.shape
    average = jnp.zeros((num_tasks, len(betas), number), jnp.float32)
    marks, done = [], 0
    for count in batches:
        average = _add_noise(pool, average, np.asarray(betas, np.float32), done, count)
        factors = correction_factors(betas, count, bias_correction)
        marks.append([mark(average, factors, temperature=temperature, bounds=bounds)])
        done = count
    return compare(*marks)


@jax.jit
def _add_noise(
    pool: Float[Array, "batches tasks parameters"],
    average: Float[Array, "tasks betas parameters"],
    betas: Float[Array, " betas"],
    start: int,
    stop: int,
) -> Float[Array, "tasks betas parameters"]:
    num_batches, num_tasks, number = pool.shape
    kept = betas[:, None]

    def add(step: jax.Array, average: jax.Array) -> jax.Array:
        batch_key, shift_key = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
        batch = jax.random.randint(batch_key, (number,), 0, num_batches)
        shift = jax.random.randint(shift_key, (number,), 0, num_tasks)
        task = (jnp.arange(num_tasks)[:, None] + shift) % num_tasks
        new = pool[batch, task, jnp.arange(number)]
        return kept * average + (1 - kept) * new[:, None]

    return jax.lax.fori_loop(start, stop, add, average)


def agreements(sample: Sample, *, temperature: float, bounds: Bounds) -> list[Agreement]:
    """Agreement of means over 1, 2, 4, ... batches, each over all disjoint pairs there are.

    Args:
        sample: one checkpoint's sample.
        temperature: τ of the entropies.
        bounds: what counts as activated and as task-specific.
    """
    normalised = sample.values / sample.medians[:, None]
    found, size = [], 1
    while 2 * size <= len(normalised):
        pairs = len(normalised) // (2 * size)
        means = normalised[: 2 * pairs * size].reshape(pairs, 2, size, *normalised.shape[1:])
        rates = [
            _agreement(first, second, temperature=temperature, bounds=bounds)
            for first, second in means.mean(2)
        ]
        found.append(Agreement(size, *map(float, np.mean(rates, axis=0))))
        size *= 2
    return found


def _agreement(
    first: Float[np.ndarray, "tasks parameters"],
    second: Float[np.ndarray, "tasks parameters"],
    *,
    temperature: float,
    bounds: Bounds,
) -> tuple[float, float, float]:
    num_tasks = len(first)
    owners, activated = [], []
    for side in (first, second):
        owners.append(np.asarray(most_sensitive_task(jnp.asarray(side))))
        activated.append((side.max(0) >= bounds.activated) & (owners[-1] < num_tasks))
    both, same = activated[0] & activated[1], owners[0] == owners[1]
    entropy = task_entropy(task_weights(jnp.asarray(first), temperature))
    kind = np.asarray(specialty_of(jnp.asarray(first), entropy, bounds))
    is_specific = kind == list(Specialty).index(Specialty.SPECIFIC)
    shares = [
        np.bincount(owner[both], minlength=num_tasks) / max(both.sum(), 1) for owner in owners
    ]
    return _share(same[both]), _share(same[is_specific]), float(shares[0] @ shares[1])


def _share(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")
