"""How many task-specific parameters stay with their task from one checkpoint to the next.

Sensitivities are smoothed as T-SAGE does it, I ← β·I + (1 − β)·I′ with I′ the median-normalised
|g·θ| of one batch, for several β side by side; or T-SAGE's own I is read from the checkpoints. At a
checkpoint every parameter is marked with the task of its highest I, and whether it is
task-specific. Marks of two checkpoints are compared on the devices; only counts leave them.

A moving average keeps a parameter with its task whether or not it prefers one: averages of two
checkpoints share batches. `noise_commitments` is the rate of parameters without any preference.

Source: "Unleash model capacity for universal dense retrieval by task specialty optimization",
Algorithm 1, section 7.4 and Table 4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, KeyPath, SequenceKey, tree_leaves_with_path, tree_map_with_path
from jaxtyping import Array, Bool, Float, Int, Int16, PyTree

from taser_jax.devices.parameter_rules import parameter_path
from taser_jax.evaluation.specialty.sensitivity import (
    MeasureBatch,
    Sample,
    check_medians,
    normalize,
)
from taser_jax.evaluation.specialty.specialty import (
    Specialty,
    SpecialtyConfig,
    most_sensitive_task,
    specialty_of,
    task_entropy,
    task_weights,
)
from taser_jax.optim.median import MedianOver
from taser_jax.optim.tsage_options import BiasCorrection
from taser_jax.storage.errors import DataError

OWN = "own"
"""Stands for β where the average is the one that T-SAGE used and training saved."""


class Averages(NamedTuple):
    """Moving averages of normalised sensitivities.

    Attributes:
        batches: number of batches in them.
        values: task -> tree of the averages at each β, [betas, *shape] per parameter; in the
            order of the task axis, which `jax.tree.map` over the whole dict would lose.
    """

    batches: int
    values: dict[str, PyTree]


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
    """Commitment between two checkpoints at one β.

    Attributes:
        model: the model's name.
        earlier_step: step of the earlier checkpoint.
        step: step of the later checkpoint.
        beta: β of the moving average, or `OWN`.
        commitment: the counts.
        noise: the counts if no parameter preferred a task; None if unknown.
    """

    model: str
    earlier_step: int
    step: int
    beta: str
    commitment: Commitment
    noise: Commitment | None

    @property
    def label(self) -> str:
        """The moving average, as tables and figures name it."""
        return "T-SAGE's own" if self.beta == OWN else f"β = {self.beta}"


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """How averages come about, and what makes their parameters task-specific.

    Attributes:
        betas: shares of the old average that are kept.
        bias_correction: ADAM divides an average of k batches by 1 − β^k before it is judged.
        specialty: what counts as task-specific.
    """

    betas: tuple[float, ...]
    bias_correction: BiasCorrection = BiasCorrection.ADAM
    specialty: SpecialtyConfig = SpecialtyConfig()

    def factors(self, batches: int) -> Float[np.ndarray, " betas"]:
        """Factors for averages of so many batches: 1/(1 − β^k), or 1."""
        if self.bias_correction is BiasCorrection.NONE:
            return np.ones(len(self.betas), np.float32)
        return np.asarray([1 / (1 - beta**batches) for beta in self.betas], np.float32)


def commitment_rows(
    model: str,
    averages: Iterable[tuple[int, Averages]],
    smoothing: Smoothing,
    samples: Mapping[int, Sample],
    *,
    names: Sequence[str],
) -> list[CommitmentRow]:
    """Commitment from each checkpoint to the next, at each β.

    Args:
        model: the model's name.
        averages: (step, averages) of each checkpoint; only marks are kept of those before.
        smoothing: how they came about.
        samples: step -> sensitivities of single batches, for the rates of noise.
        names: each β, as tables have it.
    """
    rows: list[CommitmentRow] = []
    earlier: tuple[int, int, list[Marks]] | None = None
    for step, current in averages:
        marks = marks_of(current, smoothing)
        if earlier is not None:
            earlier_step, earlier_batches, earlier_marks = earlier
            commitments = compare(earlier_marks, marks)
            noise: Sequence[Commitment | None] = [None] * len(names)
            # A batch whose median is 0 cannot be normalised; nor can T-SAGE normalise it.
            if (samples[step].medians > 0).all():
                batches = (earlier_batches, current.batches)
                noise = noise_commitments(samples[step], smoothing, batches=batches)
            rows += [
                CommitmentRow(model, earlier_step, step, *of_beta)
                for of_beta in zip(names, commitments, noise, strict=True)
            ]
        earlier = (step, current.batches, marks)
    return rows


def no_averages(params: PyTree, tasks: Sequence[str], *, betas: int) -> Averages:
    """Zeros, sharded as the parameters are, with an axis for β in front."""

    def zeros(param: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        sharding = param.sharding
        assert isinstance(sharding, NamedSharding)
        wide = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return jnp.zeros((betas, *param.shape), jnp.float32, device=wide)

    return Averages(0, {task: jax.tree.map(zeros, params) for task in tasks})


def advance(
    averages: Averages,
    measure_batch: MeasureBatch,
    params: PyTree,
    batches: Iterable[Mapping[str, PyTree]],
    *,
    checkpoint: str,
    betas: Sequence[float],
    over: MedianOver = MedianOver.ALL,
) -> Averages:
    """Adds batches to the averages; the old ones are donated.

    Args:
        averages: `no_averages`, or those of the checkpoint before.
        measure_batch: from `make_measure_batch`.
        params: where the gradients are taken.
        batches: mappings task -> batch.
        checkpoint: names the parameters in errors.
        betas: shares of the old average that are kept.
        over: entries over which `measure_batch` takes medians.

    Raises:
        DataError: a gradient is not finite, or a batch's median is 0.
    """
    count, values = averages.batches, dict(averages.values)
    shares = np.asarray(betas, np.float32)
    for batch in batches:
        for task, new in measure_batch(params, batch, checkpoint):
            check_medians({task: new.median}, checkpoint=checkpoint, over=over)
            values[task] = _move(values[task], new.values, new.median, shares)
        count += 1
    return Averages(count, values)


@functools.partial(jax.jit, donate_argnums=0)
def _move(
    average: PyTree, new: PyTree, median: Float[Array, ""], betas: Float[Array, " betas"]
) -> PyTree:
    def of_leaf(old: jax.Array, values: jax.Array) -> jax.Array:
        beta = betas.reshape(-1, *(1,) * values.ndim)
        return beta * old + (1 - beta) * normalize(values, median)

    return jax.tree.map(of_leaf, average, new)


def saved_averages(checkpoint: epath.Path, step: int, abstract_params: PyTree) -> Averages:
    """The averages that T-SAGE took its weights from, as a checkpoint's optimiser state has them.

    Args:
        checkpoint: the `checkpoint_N` directory of a training with T-SAGE.
        step: its step; every step of the training is a batch of the average.
        abstract_params: shapes and shardings of the parameters.

    Returns:
        Averages of the trainable parameters, of one β.

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
    return Averages(step, jax.tree.map(lambda leaf: leaf[None], restored))


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


def marks_of(averages: Averages, smoothing: Smoothing) -> list[Marks]:
    """Marks of every leaf, in tree order, from averages of at least one batch."""
    factors = smoothing.factors(averages.batches)
    by_leaf = zip(*map(jax.tree.leaves, averages.values.values()), strict=True)
    return [_mark(leaf, factors, config=smoothing.specialty) for leaf in by_leaf]


@functools.partial(jax.jit, static_argnames="config")
def _mark(
    by_task: tuple[Float[Array, "betas *shape"], ...],
    factors: Float[Array, " betas"],
    *,
    config: SpecialtyConfig,
) -> Marks:
    averages = jnp.stack(by_task)
    values = averages * factors.reshape(-1, *(1,) * (averages.ndim - 2))
    entropy = task_entropy(task_weights(values, config.temperature))
    kind = specialty_of(values, entropy, config)
    return Marks(
        most_sensitive_task(values).astype(jnp.int16),
        kind == list(Specialty).index(Specialty.SPECIFIC),
    )


def compare(earlier: Sequence[Marks], later: Sequence[Marks]) -> list[Commitment]:
    """Counts over all leaves, one `Commitment` for each β."""
    leaves = [_compare(*leaf) for leaf in zip(earlier, later, strict=True)]
    totals = np.sum([np.asarray(leaf, np.int64) for leaf in leaves], axis=0)
    return [Commitment(int(specific), int(committed)) for specific, committed in totals.T]


@jax.jit
def _compare(earlier: Marks, later: Marks) -> Int[Array, "2 betas"]:
    """Counts of those task-specific earlier, and of those with the same owner later."""
    committed = earlier.specific & (earlier.owner == later.owner)
    axes = range(1, committed.ndim)
    return jnp.stack([jnp.sum(each, axes) for each in (earlier.specific, committed)])


def noise_commitments(
    sample: Sample, smoothing: Smoothing, *, batches: tuple[int, int]
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
        smoothing: how averages come about.
        batches: number of batches in the average at the earlier and at the later checkpoint.
    """
    pool = jnp.asarray(sample.values / sample.medians[..., None], jnp.float32)
    _, num_tasks, number = pool.shape
    betas = np.asarray(smoothing.betas, np.float32)
    average = jnp.zeros((num_tasks, len(betas), number), jnp.float32)
    marks, done = [], 0
    for count in batches:
        average = _add_noise(pool, average, betas, jnp.asarray(done), jnp.asarray(count))
        marks.append([_mark(tuple(average), smoothing.factors(count), config=smoothing.specialty)])
        done = count
    return compare(*marks)


@jax.jit
def _add_noise(
    pool: Float[Array, "batches tasks parameters"],
    average: Float[Array, "tasks betas parameters"],
    betas: Float[Array, " betas"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
) -> Float[Array, "tasks betas parameters"]:
    num_batches, num_tasks, number = pool.shape
    old_share = betas[:, None]

    def add(step: jax.Array, average: jax.Array) -> jax.Array:
        batch_key, shift_key = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
        batch = jax.random.randint(batch_key, (number,), 0, num_batches)
        shift = jax.random.randint(shift_key, (number,), 0, num_tasks)
        task = (jnp.arange(num_tasks)[:, None] + shift) % num_tasks
        new = pool[batch, task, jnp.arange(number)]
        return old_share * average + (1 - old_share) * new[:, None]

    return jax.lax.fori_loop(start, stop, add, average)
