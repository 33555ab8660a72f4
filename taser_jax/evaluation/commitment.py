"""How many task-specific parameters stay with their task from one checkpoint to the next.

At a checkpoint every parameter is marked with the task of its highest I, T-SAGE's moving average of
normalised sensitivities, which training saved, and whether it is task-specific. Marks of two
checkpoints are compared on the devices; only counts leave them.

A moving average keeps a parameter with its task whether or not it prefers one: averages of two
checkpoints share batches. `noise_commitment` is the rate of parameters without any preference.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
Algorithm 1, section 7.4 and Table 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import DictKey, KeyPath, SequenceKey, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Bool, Float, Int, Int16, PyTree

from taser_jax.devices.partitioning import parameter_path
from taser_jax.evaluation.sensitivity import Sample
from taser_jax.evaluation.specialty import (
    Specialty,
    most_sensitive_task,
    specialty_of,
    task_entropy,
    task_weights,
)
from taser_jax.storage.errors import DataError

Averages = Mapping[str, PyTree]
"""Task -> moving averages of normalised sensitivities, in the order of the task axis, which
`jax.tree.map` over the whole mapping would lose."""


class Marks(NamedTuple):
    """The tasks of a leaf's parameters at one checkpoint.

    Attributes:
        owner: the most sensitive task; the number of tasks if several tie.
        specific: whether the parameter is task-specific.
    """

    owner: Int16[Array, "*shape"]
    specific: Bool[Array, "*shape"]


@dataclasses.dataclass(frozen=True)
class Commitment:
    """Counts of parameters between two checkpoints.

    Attributes:
        specific: parameters that are task-specific at the earlier one.
        committed: how many of these are most sensitive to the same task at the later one.
    """

    specific: int
    committed: int

    @property
    def rate(self) -> float:
        """The task commitment rate; NaN if no parameter is task-specific."""
        return self.committed / self.specific if self.specific else float("nan")


@dataclasses.dataclass(frozen=True)
class CommitmentRow:
    """Commitment between two checkpoints of a model.

    Attributes:
        model: the model's name.
        earlier_step: step of the earlier checkpoint.
        step: step of the later checkpoint.
        commitment: the counts.
        noise: the counts if no parameter preferred a task; None if unknown.
    """

    model: str
    earlier_step: int
    step: int
    commitment: Commitment
    noise: Commitment | None


def commitment_rows(
    model: str,
    averages: Iterable[tuple[int, Averages]],
    samples: Mapping[int, Sample],
    *,
    beta: float,
    temperature: float,
) -> list[CommitmentRow]:
    """Commitment from each checkpoint to the next.

    Args:
        model: the model's name.
        averages: (step, averages) of each checkpoint; only marks are kept of those before.
        samples: step -> sensitivities of single batches, for the rates of noise.
        beta: share of the old average that T-SAGE kept in each step.
        temperature: τ of the softmax over tasks.
    """
    rows: list[CommitmentRow] = []
    earlier: tuple[int, list[Marks]] | None = None
    for step, current in averages:
        marks = marks_of(current, temperature)
        if earlier is not None:
            earlier_step, earlier_marks = earlier
            noise = None
            # A batch whose median is 0 cannot be normalised; nor can T-SAGE normalise it.
            if (samples[step].medians > 0).all():
                steps = (earlier_step, step)
                noise = noise_commitment(
                    samples[step], beta=beta, temperature=temperature, steps=steps
                )
            commitment = compare(earlier_marks, marks)
            rows.append(CommitmentRow(model, earlier_step, step, commitment, noise))
        earlier = (step, marks)
    return rows


def saved_averages(checkpoint: epath.Path, abstract_params: PyTree) -> Averages:
    """The averages that T-SAGE took its weights from, as a checkpoint's optimiser state has them.

    Args:
        checkpoint: the `checkpoint_N` directory of a training with T-SAGE.
        abstract_params: shapes and shardings of the parameters.

    Returns:
        Averages of the trainable parameters.

    Raises:
        DataError: there are none.
    """
    shardings = {
        parameter_path(path): leaf.sharding for path, leaf in tree_leaves_with_path(abstract_params)
    }
    directory = checkpoint / "state"
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(directory).item_metadata.tree
        above = _keys_to_averages(tree, checkpoint)

        def requested(path: KeyPath, leaf: PyTree) -> PyTree:
            """The average's shape and sharding; a placeholder for leaves that are not read."""
            if tuple(map(_name, path[: len(above)])) != above:
                return ocp.PLACEHOLDER
            sharding = shardings[parameter_path(path[len(above) + 1 :])]
            return jax.ShapeDtypeStruct(tuple(leaf.shape), jnp.float32, sharding=sharding)

        item = tree_map_with_path(requested, tree)
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        restored = reader.restore(
            directory, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        )
    for key in above:
        restored = restored[key]
    return restored


def _keys_to_averages(tree: PyTree, checkpoint: epath.Path) -> tuple[str | int, ...]:
    """Keys down to the field `average` of `TSageState`."""
    for path, _ in tree_leaves_with_path(tree):
        names = tuple(map(_name, path))
        if "average" in names:
            return names[: names.index("average") + 1]
    problem = "no moving average of T-SAGE in the optimiser state"
    fix = "analyse checkpoints that `taser train` wrote with MultitaskConfig.combiner='tsage'"
    raise DataError(problem, where=str(checkpoint), fix=fix)


def _name(key: SequenceKey | DictKey) -> str | int:
    """A dictionary's key or a list's place, from a JAX path."""
    return key.idx if isinstance(key, SequenceKey) else key.key


def marks_of(averages: Averages, temperature: float) -> list[Marks]:
    """Marks of every leaf, in tree order."""
    by_leaf = zip(*map(jax.tree.leaves, averages.values()), strict=True)
    return [_mark(leaf, temperature) for leaf in by_leaf]


@jax.jit
def _mark(by_task: tuple[Float[Array, "*shape"], ...], temperature: float) -> Marks:
    values = jnp.stack(by_task)
    kind = specialty_of(values, task_entropy(task_weights(values, temperature)))
    return Marks(
        most_sensitive_task(values).astype(jnp.int16),
        kind == list(Specialty).index(Specialty.SPECIFIC),
    )


def compare(earlier: Sequence[Marks], later: Sequence[Marks]) -> Commitment:
    """Counts over all leaves."""
    leaves = [_compare(*leaf) for leaf in zip(earlier, later, strict=True)]
    specific, committed = np.sum([np.asarray(leaf, np.int64) for leaf in leaves], axis=0)
    return Commitment(int(specific), int(committed))


@jax.jit
def _compare(earlier: Marks, later: Marks) -> Int[Array, "2"]:
    """Counts of those task-specific earlier, and of those with the same owner later."""
    committed = earlier.specific & (earlier.owner == later.owner)
    return jnp.stack([jnp.sum(earlier.specific), jnp.sum(committed)])


def noise_commitment(
    sample: Sample, *, beta: float, temperature: float, steps: tuple[int, int]
) -> Commitment:
    """Commitment of the sampled parameters if none preferred a task.

    At every step each parameter takes its normalised sensitivities of one measured batch, drawn at
    random, with the tasks rotated at random, so that every task is equally likely to have each
    value. They enter the same moving average, and the same bounds decide what is task-specific.

    Example:
        Two tasks, β = 0.9, normally distributed sensitivities, every parameter task-specific,
        averages of 30 and 60 steps: they correlate by 0.9^30·√((1 − 0.9^60)/(1 − 0.9^120)) =
        0.042, and ½ + arcsin(0.042)/π = 51.3% keep their task. For 30 and 32 steps it is 80.0%.

    Args:
        sample: one checkpoint's sample.
        beta: share of the old average that is kept.
        temperature: τ of the softmax over tasks.
        steps: the earlier and the later checkpoint's.
    """
    pool = jnp.asarray(sample.values / sample.medians[..., None], jnp.float32)
    average = jnp.zeros(pool.shape[1:], jnp.float32)
    marks = []
    for start, stop in zip((0, steps[0]), steps, strict=True):
        average = _add_noise(pool, average, beta, start, stop)
        marks.append(_mark(tuple(average), temperature))
    return compare(marks[:1], marks[1:])


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
