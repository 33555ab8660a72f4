"""One training step on a batch of one task, or of every task, whose gradients then become one.

A step maps `(state, {task: batch})` to `(state, metrics)`. What is compiled depends on the shapes
of the batch, and on the task's name only if the model has a query tower per task.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from taser_jax.models.batch import Batch, static_task
from taser_jax.optim.task_gradients import Report, find_report
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import Loss, make_loss
from taser_jax.training.objective import Objective, StepMetrics
from taser_jax.training.state import Params, SkippedSteps, TrainState, named_key, named_seed

_TASK_METRICS = ("nll", "accuracy", "mrr")


class TaskGradients(enum.Enum):
    """What a step with several tasks passes to the optimiser.

    STACKED: gradients with a leading task axis, for a combiner. SUMMED: their sum, accumulated task
    by task, for an optimiser without one: the naive combiner at one gradient's memory.
    """

    STACKED = "stacked"
    SUMMED = "summed"


def make_train_step(
    model: nn.Module,
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
    """The jitted step on a batch of one task, which may change from step to step, or of every task.

    Dropout and routing draws are functions of (seed, the task's name where there are several, side,
    `state.step`). Steps that cannot be taken are skipped: see `apply_gradients`.

    Tasks are computed one after another, each with its own shapes and its own softmax: the next
    forward pass waits until the last gradients are written, so that only one task's activations
    are in memory. The result equals that of separate passes over the tasks.

    Args:
        model: the dual encoder.
        optimizer: optax chain; is offered the extra arguments of `apply_gradients`. For stacked
            gradients it begins with a combiner of the same tasks, as `build_multitask_optimizer`
            makes it.
        tasks: names of the tasks that every step has a batch of, in the order of the task axis;
            None if each step has one task.
        gradients: whether the gradients of `tasks` have a task axis or are summed.
        objective: the loss to minimise; None is `ObjectiveConfig()`.
        num_chunks: number of chunks that the queries, and the passages, of each batch are encoded
            in (`encode_groups`).
        seed: the run's seed.
        schedule: step -> learning rate; for the metric only.
        trainable: tree of bool shaped as the parameters; where False no gradient is computed.
        state_shardings: shardings of the new state; task gradients [tasks, ...] have the
            parameters' with an unsharded first axis. None leaves them to the compiler, which on a
            mesh may choose another sharding than the input's, and then compiles a second time.

    Returns:
        The step. Metrics: `loss`, `tokens` (padding left out), those of `apply_gradients`,
        `learning_rate` where a schedule is given, and those of the objective; with `tasks` for each
        `loss/<task>`, `nll/<task>`, `accuracy/<task>`, `mrr/<task>`, `grad_norm/<task>`, means over
        tasks of what else the objective measures, such as routing, and where there is a combiner
        `weight/<task>` and its own figures.

    Raises:
        ConfigError: (when a step is called) batches of other tasks.
    """
    seeds = [seed] if tasks is None else [named_seed(seed, f"task {task}") for task in tasks]
    loss_fns = [
        make_loss(model, objective=objective, num_chunks=num_chunks, seed=own) for own in seeds
    ]
    param_shardings = None if state_shardings is None else state_shardings.params
    add = _adder(len(seeds), gradients, param_shardings)

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
            result, own = differentiate(loss, state.params, trainable)
            total = own if tasks is None else add(total, own, place)
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
        measured = results[0].metrics if tasks is None else _by_task(tasks, results, report)
        return new_state, metrics | measured

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
    num_tasks: int, gradients: TaskGradients, param_shardings: Params | None
) -> Callable[[Params | None, Params, int], Params]:
    """Adds the gradients of the task at a place to those of the tasks before it."""
    axis = (num_tasks,) if gradients is TaskGradients.STACKED else ()

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


class TaskResult(NamedTuple):
    """Loss, squared gradient norm and metrics of one task's batch."""

    loss: Float[Array, ""]
    squared_norm: Float[Array, ""]
    metrics: StepMetrics


def differentiate(
    loss: Loss, params: Params, trainable: PyTree[bool] | None
) -> tuple[TaskResult, Params]:
    """The loss of one batch, and its gradients, which are 0 where a parameter is not trained."""
    (value, metrics), gradients = jax.value_and_grad(
        lambda params: loss(_freeze(params, trainable)), has_aux=True
    )(params)
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)]
    return TaskResult(value, jnp.sum(jnp.stack(squares)), metrics), gradients


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


def common_metrics(
    state: TrainState, batches: Sequence[Batch], schedule: optax.Schedule | None
) -> StepMetrics:
    """Tokens of a step without padding, and its learning rate where there is a schedule."""
    masks = [mask for batch in batches for mask in batch.masks]
    tokens = jnp.sum(jnp.stack([jnp.sum(mask, dtype=jnp.float32) for mask in masks]))
    if schedule is None:
        return {"tokens": tokens}
    # The optimiser counts the steps that were taken.
    rate = schedule(state.step - state.skipped.total)
    return {"tokens": tokens, "learning_rate": jnp.asarray(rate, jnp.float32)}


def _freeze(params: Params, trainable: PyTree[bool] | None) -> Params:
    if trainable is None:
        return params
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else jax.lax.stop_gradient(leaf), params, trainable
    )


# XLA would join products with one kernel, such as those of queries and of passages, and copy the
# states of both for it.
_GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}

StepFunction = Callable[
    [TrainState, tuple[Batch, ...], tuple[str | None, ...]], tuple[TrainState, StepMetrics]
]
"""(state, batches, task names that the model needs, static) -> (state, metrics)."""


class TrainStep:
    """A jitted step: `(state, {task: batch}) -> (state, metrics)`; `state` is donated.

    Args:
        step: what is compiled; its state is donated, and the new one placed as the old one.
        query_tasks: the model's tasks with a query tower of their own.
        tasks: those of every step, in the order of the task axis; None if each step has one task,
            which may change.
        state_shardings: shardings of the new state; None leaves them to the compiler.
    """

    def __init__(
        self,
        step: StepFunction,
        *,
        query_tasks: tuple[str, ...],
        tasks: Sequence[str] | None = None,
        state_shardings: TrainState | None,
    ) -> None:
        placed = None if state_shardings is None else (state_shardings, None)
        self._jitted = jax.jit(
            step,
            donate_argnums=0,
            static_argnums=2,
            out_shardings=placed,
            compiler_options=_GPU_OPTIONS if jax.default_backend() == "gpu" else None,
        )
        self._query_tasks, self._tasks = query_tasks, None if tasks is None else tuple(tasks)

    def __call__(
        self, state: TrainState, batches: Mapping[str, Batch]
    ) -> tuple[TrainState, StepMetrics]:
        """The next state, and metrics.

        Raises:
            ConfigError: batches of other tasks than the step's, or of several where it has one.
        """
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
        return self._jitted._cache_size()  # type: ignore[attr-defined]

    def _split(
        self, batches: Mapping[str, Batch]
    ) -> tuple[tuple[Batch, ...], tuple[str | None, ...]]:
        tasks = self._tasks or tuple(batches)
        if set(batches) != set(tasks) or (self._tasks is None and len(tasks) != 1):
            expected = f"of each of {', '.join(tasks)}" if self._tasks else "of one task"
            raise ConfigError(
                f"batches of {', '.join(sorted(batches)) or 'no task'}, not one batch {expected}",
                where="training step",
                fix="draw from every task in every step, or from one",
            )
        names = tuple(static_task(self._query_tasks, task) for task in tasks)
        return tuple(batches[task] for task in tasks), names
