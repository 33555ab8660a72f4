"""One training step, over a batch of one task or of many.

A step maps `(state, {task: batch})` to `(state, metrics)`. What is compiled depends on the shapes
of the batches, and on the tasks' names only if the model has a query tower per task.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from taser_jax.models.batch import Batch
from taser_jax.models.encoded import static_task
from taser_jax.optim.task_gradients import Report, check_tasks, find_report
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import PASSAGES, Encoder, make_loss
from taser_jax.training.keys import named_key
from taser_jax.training.objective import Objective, StepMetrics
from taser_jax.training.state import Params, SkippedSteps, TrainState

_TASK_METRICS = ("nll", "accuracy", "mrr")


class TaskGradients(enum.Enum):
    """What a step with several tasks passes to the optimiser.

    STACKED: gradients with a leading task axis, for a combiner. SUMMED: their sum, accumulated task
    by task, for an optimiser without one: the naive combiner at one gradient's memory.
    """

    STACKED = "stacked"
    SUMMED = "summed"


class TrainStep:
    """A jitted step: `(state, {task: batch}) -> (state, metrics)`; `state` is donated.

    Args:
        jitted: (state, batches, names); `names`, static, are the task names passed to the model.
        query_tasks: the model's tasks with a query tower of their own.
        tasks: those of every step, in the order of the task axis; None if each step has one task,
            which may change.
    """

    def __init__(
        self, jitted: Any, *, query_tasks: tuple[str, ...], tasks: tuple[str, ...] | None
    ) -> None:
        self._jitted, self._query_tasks, self._tasks = jitted, query_tasks, tasks

    def __call__(
        self, state: TrainState, batches: Mapping[str, Batch]
    ) -> tuple[TrainState, StepMetrics]:
        """The next state, and metrics."""
        return self._jitted(state, *self._split(batches))

    def trace(self, state: TrainState, batches: Mapping[str, Batch]) -> jax.stages.Traced:
        """Traces the step for shapes, as `jax.jit`'s `trace`."""
        return self._jitted.trace(state, *self._split(batches))

    def lower(self, state: TrainState, batches: Mapping[str, Batch]) -> jax.stages.Lowered:
        """Lowers the step for shapes, as `jax.jit`'s `lower`."""
        return self.trace(state, batches).lower()

    @property
    def compilations(self) -> int:
        """Number of compiled programs: one for each shape of a step's batches."""
        return self._jitted._cache_size()

    def _split(
        self, batches: Mapping[str, Batch]
    ) -> tuple[tuple[Batch, ...], tuple[str | None, ...]]:
        tasks = self._tasks or tuple(batches)
        if set(batches) != set(tasks) or (self._tasks is None and len(tasks) != 1):
            wanted = f"of each of {', '.join(tasks)}" if self._tasks else "of one task"
            raise ConfigError(
                f"batches of {', '.join(sorted(batches)) or 'no task'}",
                where="training step",
                expected=f"one batch {wanted}",
                fix="draw from every task in every step, or from one",
            )
        names = tuple(static_task(self._query_tasks, task) for task in tasks)
        return tuple(batches[task] for task in tasks), names


def make_train_step(
    model: Encoder,
    optimizer: optax.GradientTransformation,
    *,
    tasks: Sequence[str] | None = None,
    gradients: TaskGradients = TaskGradients.STACKED,
    objective: Objective | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    schedule: optax.Schedule | None = None,
    trainable: PyTree[bool] | None = None,
    state_shardings: TrainState | None = None,
) -> TrainStep:
    """The jitted training step.

    Tasks are computed one after another, each with its own shapes and its own softmax: the next
    forward pass waits until the last gradients are written, so that only one task's activations
    are in memory. The result equals that of separate passes over the tasks.

    Dropout and routing draws are functions of (seed, side, `state.step`), and of the task's name
    where `tasks` are given. Steps that cannot be taken are skipped: see `apply_gradients`.

    Args:
        model: the dual encoder.
        optimizer: optax chain; is offered the extra arguments of `apply_gradients`. With `tasks` it
            begins with a combiner of the same tasks, as `build_multitask_optimizer` makes it
            (SUMMED: without one).
        tasks: names of the tasks that every step has a batch of, in the order of the task axis.
            None: a step has a batch of one task, which may change from step to step.
        gradients: whether the gradients of `tasks` have a task axis or are summed.
        objective: the loss to minimise; None is `ObjectiveConfig()`.
        num_chunks: number of chunks that the queries, and the passages, of each batch are encoded
            in (`grad_cache`).
        seed: the run's seed.
        schedule: step -> learning rate; for the metric only.
        trainable: tree of bool shaped as the parameters; where False no gradient is computed.
        state_shardings: shardings of the new state; task gradients [tasks, ...] then have the
            parameters' with an unsharded first axis. None leaves them to the compiler, which on a
            mesh may choose another sharding than the input's, and then compiles a second time.

    Returns:
        The step. Metrics: `loss`, `tokens` (padding left out), those of `apply_gradients`, and
        `learning_rate` where a schedule is given. Without `tasks` those of the objective; with
        them, for each task, `loss/<task>`, `nll/<task>`, `accuracy/<task>`, `mrr/<task>`,
        `grad_norm/<task>`, and where there is a combiner `weight/<task>` and its own figures.

    Raises:
        ConfigError: (when a step is traced) batches of other tasks, or no combiner for stacked
            gradients.
    """
    fixed = None if tasks is None else check_tasks(tasks)
    seeds = [seed] if fixed is None else [task_seed(seed, task) for task in fixed]
    loss_fns = [
        make_loss(model, objective=objective, num_chunks=num_chunks, seed=each) for each in seeds
    ]
    param_shardings = None if state_shardings is None else state_shardings.params
    add = _adder(fixed, gradients, param_shardings)

    def train_step(
        state: TrainState, batches: tuple[Batch, ...], names: tuple[str | None, ...]
    ) -> tuple[TrainState, StepMetrics]:
        grads: Params | None = None
        found: list[_TaskResult] = []
        zero = jnp.zeros((), jnp.int32)
        for place, (loss_fn, batch, name) in enumerate(zip(loss_fns, batches, names, strict=True)):
            # Dropout masks depend on nothing but the step: this makes them wait, too.
            loss = functools.partial(
                loss_fn,
                batch=_after(zero, batch),
                step=state.step + zero,
                task=name,
                queue=state.queue,
            )
            (value, metrics), task_grads = jax.value_and_grad(
                lambda params, loss=loss: loss(_freeze(params, trainable)), has_aux=True
            )(state.params)
            grads = add(grads, task_grads, place)
            square = _square(task_grads)
            # No square is below 0, but the compiler does not know, so the next task's forward pass
            # waits. XLA's barriers do not order the schedule on CPUs, where all tasks' activations
            # would be alive at once.
            zero = (square < 0).astype(jnp.int32)
            found.append(_TaskResult(value, square, metrics))
        losses = jnp.stack([each.loss for each in found])
        new_state, metrics, report = apply_gradients(
            state,
            grads,
            optimizer=optimizer,
            losses=losses,
            squared_norms=jnp.stack([each.square for each in found]),
            key=jax.random.fold_in(named_key(seed, "optimizer"), state.step),
            param_shardings=param_shardings,
        )
        if state.queue is not None:
            queue = state.queue.pushed(
                found[0].metrics.pop(PASSAGES), step=state.step, is_taken=metrics["skipped"] == 0
            )
            new_state = dataclasses.replace(new_state, queue=queue)
        metrics["loss"] = jnp.sum(losses)
        masks = [tokens.mask for batch in batches for tokens in batch.texts]
        metrics["tokens"] = jnp.sum(jnp.stack([jnp.sum(mask, dtype=jnp.float32) for mask in masks]))
        metrics |= found[0].metrics if fixed is None else _by_task(fixed, found, report)
        if schedule is not None:
            # The optimiser counts the steps that were taken.
            taken = state.step - state.skipped.total
            metrics["learning_rate"] = jnp.asarray(schedule(taken), jnp.float32)
        return new_state, metrics

    out_shardings = None if state_shardings is None else (state_shardings, None)
    jitted = jax.jit(
        train_step, donate_argnums=0, static_argnames="names", out_shardings=out_shardings
    )
    return TrainStep(jitted, query_tasks=model.query_tasks, tasks=fixed)


def _adder(
    tasks: Sequence[str] | None, gradients: TaskGradients, param_shardings: Params | None
) -> Callable[[Params | None, Params, int], Params]:
    """Adds the gradients of the task at a place to those of the tasks before it."""
    if tasks is None:
        return lambda total, grads, place: grads
    axis = (len(tasks),) if gradients is TaskGradients.STACKED else ()

    def empty(param: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
        zeros = jnp.zeros((*axis, *param.shape), param.dtype)
        if sharding is None:
            return zeros
        spec = PartitionSpec(*(None for _ in axis), *sharding.spec)
        return jax.lax.with_sharding_constraint(zeros, NamedSharding(sharding.mesh, spec))

    def add(total: Params | None, grads: Params, place: int) -> Params:
        if total is None:
            total = jax.tree.map(empty, grads, *([param_shardings] if param_shardings else []))
        if axis:
            return jax.tree.map(lambda rows, row: rows.at[place].set(row), total, grads)
        return jax.tree.map(jnp.add, total, grads)

    return add


def task_seed(seed: int, task: str) -> int:
    """The seed of one task's dropout and routing draws; by name, so that order does not matter."""
    digest = hashlib.sha256(f"{seed} task {task}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def apply_gradients(
    state: TrainState,
    gradients: Params,
    *,
    optimizer: optax.GradientTransformation,
    losses: Float[Array, " task"],
    squared_norms: Float[Array, " task"],
    key: jax.Array,
    param_shardings: Params | None = None,
) -> tuple[TrainState, StepMetrics, Report | None]:
    """Updates the state, unless the step cannot be taken: then it is skipped and counted.

    A step is skipped where a loss is not finite, where the gradients' global norm is not (a norm
    that overflows float32 included), and where a combiner reports that it could not weigh the tasks
    (`Report.usable`). Parameters and optimiser state, schedules and moving averages included, then
    stay as they are; only `state.step` and `state.skipped` grow. The training loop decides how many
    skipped steps in a row are too many.

    Args:
        state: the state the gradients were taken at.
        gradients: shaped as the parameters, or with a leading task axis where the optimizer
            starts with a multi-task combiner.
        optimizer: optax chain; is offered `losses`, `squared_norms`, `key` and `param_shardings`.
        losses: one loss per task.
        squared_norms: squared norm of each task's gradients, before clipping and combining.
        key: random key for combiners that draw.
        param_shardings: where parameters live.

    Returns:
        The new state; `grad_norm`, `param_norm` (before the update), `skipped` (0 or 1),
        `skipped_in_a_row` and `skipped_total`; the combiner's report on this step.

    Raises:
        ConfigError: an update is not shaped as its parameter.
    """
    grad_norm = jnp.sqrt(jnp.sum(squared_norms))
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradients,
        state.opt_state,
        state.params,
        losses=losses,
        squared_norms=squared_norms,
        key=key,
        param_shardings=param_shardings,
    )
    _check_updates(updates, state.params)
    report = find_report(opt_state)
    is_taken = jnp.isfinite(grad_norm) & jnp.all(jnp.isfinite(losses))
    if report is not None and report.usable is not None:
        is_taken &= report.usable
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_taken, new, old),
        (optax.apply_updates(state.params, updates), opt_state),
        (state.params, state.opt_state),
    )
    skipped = (~is_taken).astype(jnp.int32)
    counts = SkippedSteps(
        in_a_row=(state.skipped.in_a_row + skipped) * skipped, total=state.skipped.total + skipped
    )
    metrics = {
        "grad_norm": grad_norm,
        "param_norm": optax.global_norm(state.params),
        "skipped": skipped.astype(jnp.float32),
        "skipped_in_a_row": counts.in_a_row.astype(jnp.float32),
        "skipped_total": counts.total.astype(jnp.float32),
    }
    return TrainState(state.step + 1, params, opt_state, counts), metrics, report


class _TaskResult(NamedTuple):
    """Loss, squared gradient norm and metrics of one task's batch."""

    loss: jax.Array
    square: jax.Array
    metrics: StepMetrics


def _by_task(
    tasks: Sequence[str], found: Sequence[_TaskResult], report: Report | None
) -> StepMetrics:
    metrics: StepMetrics = {}
    for task, each in zip(tasks, found, strict=True):
        metrics[f"loss/{task}"] = each.loss
        metrics[f"grad_norm/{task}"] = jnp.sqrt(each.square)
        metrics |= {f"{name}/{task}": each.metrics[name] for name in _TASK_METRICS}
    if report is None:
        return metrics
    weights = {f"weight/{task}": report.weights[place] for place, task in enumerate(tasks)}
    return metrics | weights | report.scalars


def _square(grads: Params) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]))


def _freeze(params: Params, trainable: PyTree[bool] | None) -> Params:
    if trainable is None:
        return params
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else jax.lax.stop_gradient(leaf), params, trainable
    )


def _after(zero: jax.Array, batch: Batch) -> Batch:
    """The same batch, once `zero`, which is 0, has been computed."""

    def wait(leaf: jax.Array) -> jax.Array:
        return leaf & (zero == 0) if leaf.dtype == bool else leaf + zero.astype(leaf.dtype)

    queries, passages = jax.tree.map(wait, (batch.queries, batch.passages))
    return dataclasses.replace(batch, queries=queries, passages=passages)


def _check_updates(updates: Params, params: Params) -> None:
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        if update.shape != param.shape:
            raise ConfigError(
                f"an update of shape {update.shape} for a parameter of shape {param.shape}",
                where="training step",
                expected="the parameter's own shape: a combiner removes the task axis",
                fix="put a combiner first in the chain, as build_multitask_optimizer does",
            )
