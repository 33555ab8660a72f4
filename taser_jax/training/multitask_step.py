"""One training step on a batch of every task, whose gradients a combiner or a sum makes one."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from taser_jax.models.batch import Batch
from taser_jax.optim.task_gradients import Report
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.objective import Objective, StepMetrics
from taser_jax.training.state import Params, TrainState, named_key, named_seed
from taser_jax.training.step import (
    TaskResult,
    TrainStep,
    apply_gradients,
    common_metrics,
    differentiate,
)

_TASK_METRICS = ("nll", "accuracy", "mrr")


class TaskGradients(enum.Enum):
    """What a step with several tasks passes to the optimiser.

    STACKED: gradients with a leading task axis, for a combiner. SUMMED: their sum, accumulated task
    by task, for an optimiser without one: the naive combiner at one gradient's memory.
    """

    STACKED = "stacked"
    SUMMED = "summed"


def make_multitask_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    tasks: Sequence[str],
    gradients: TaskGradients = TaskGradients.STACKED,
    objective: Objective | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    schedule: optax.Schedule | None = None,
    trainable: PyTree[bool] | None = None,
    state_shardings: TrainState | None = None,
) -> TrainStep:
    """The jitted step on a batch of every task.

    Tasks are computed one after another, each with its own shapes and its own softmax: the next
    forward pass waits until the last gradients are written, so that only one task's activations
    are in memory. The result equals that of separate passes over the tasks. Dropout and routing
    draws are functions of (seed, the task's name, side, `state.step`).

    Args:
        model: as for `make_train_step`.
        optimizer: optax chain that begins with a combiner of the same tasks, as
            `build_multitask_optimizer` makes it (SUMMED: without one).
        tasks: names of the tasks that every step has a batch of, in the order of the task axis.
        gradients: whether the gradients of `tasks` have a task axis or are summed.
        objective: as for `make_train_step`.
        num_chunks: as for `make_train_step`.
        seed: as for `make_train_step`.
        schedule: as for `make_train_step`.
        trainable: as for `make_train_step`.
        state_shardings: as for `make_train_step`; task gradients [tasks, ...] have the parameters'
            with an unsharded first axis.

    Returns:
        The step. Metrics: `loss`, `tokens`, those of `apply_gradients`, `learning_rate` where a
        schedule is given; for each task `loss/<task>`, `nll/<task>`, `accuracy/<task>`,
        `mrr/<task>`, `grad_norm/<task>`; means over tasks of what else the objective measures, such
        as routing; and where there is a combiner `weight/<task>` and its own figures.

    Raises:
        ConfigError: (when a step is called) batches of other tasks.
    """
    tasks = tuple(tasks)
    loss_fns = [
        make_loss(
            model, objective=objective, num_chunks=num_chunks, seed=named_seed(seed, f"task {task}")
        )
        for task in tasks
    ]
    param_shardings = None if state_shardings is None else state_shardings.params
    add = _adder(tasks, gradients, param_shardings)

    def train_step(
        state: TrainState, batches: tuple[Batch, ...], names: tuple[str | None, ...]
    ) -> tuple[TrainState, StepMetrics]:
        total: Params | None = None
        results: list[TaskResult] = []
        for place, (loss_fn, batch, name) in enumerate(zip(loss_fns, batches, names, strict=True)):
            step = state.step
            if results:
                step, batch = _after(results[-1].squared_norm, step, batch)
            loss = functools.partial(loss_fn, batch=batch, step=step, task=name)
            result, task_gradients = differentiate(loss, state.params, trainable)
            total = add(total, task_gradients, place)
            results.append(result)
        losses = jnp.stack([result.loss for result in results])
        new_state, metrics, report = apply_gradients(
            state,
            total,
            optimizer=optimizer,
            losses=losses,
            squared_norms=jnp.stack([result.squared_norm for result in results]),
            key=jax.random.fold_in(named_key(seed, "optimizer"), state.step),
            param_shardings=param_shardings,
        )
        metrics |= {"loss": jnp.sum(losses)} | common_metrics(state, batches, schedule)
        return new_state, metrics | _by_task(tasks, results, report)

    return TrainStep(
        train_step, query_tasks=model.query_tasks, tasks=tasks, state_shardings=state_shardings
    )


def _after(
    squared_norm: Float[Array, ""], step: jax.Array, batch: Batch
) -> tuple[jax.Array, Batch]:
    """The same step and batch, once a task's squared gradient norm has been computed.

    No square is below 0, but the compiler does not know, so the next task's forward pass waits.
    XLA's barriers do not order the schedule on CPUs, where all tasks' activations would be alive at
    once. Dropout masks depend on nothing but the step: it waits, too.
    """
    zero = (squared_norm < 0).astype(jnp.int32)

    def wait(leaf: jax.Array) -> jax.Array:
        return leaf & (zero == 0) if leaf.dtype == bool else leaf + zero.astype(leaf.dtype)

    queries, passages = jax.tree.map(wait, (batch.queries, batch.passages))
    return step + zero, dataclasses.replace(batch, queries=queries, passages=passages)


def _adder(
    tasks: Sequence[str], gradients: TaskGradients, param_shardings: Params | None
) -> Callable[[Params | None, Params, int], Params]:
    """Adds the gradients of the task at a place to those of the tasks before it."""
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


def _by_task(
    tasks: Sequence[str], results: Sequence[TaskResult], report: Report | None
) -> StepMetrics:
    metrics: StepMetrics = {}
    for task, result in zip(tasks, results, strict=True):
        metrics[f"loss/{task}"] = result.loss
        metrics[f"grad_norm/{task}"] = jnp.sqrt(result.squared_norm)
        metrics |= {f"{name}/{task}": result.metrics[name] for name in _TASK_METRICS}
    # Tasks have other numbers of passages: a mean of their ranks would say nothing.
    for name in sorted(results[0].metrics.keys() - {*_TASK_METRICS, "mean_rank"}):
        metrics[name] = jnp.mean(jnp.stack([result.metrics[name] for result in results]))
    if report is None:
        return metrics
    weights = {f"weight/{task}": report.weights[place] for place, task in enumerate(tasks)}
    return metrics | weights | report.scalars
