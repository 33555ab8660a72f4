"""One training step on a batch of one task; `multitask_step` has one on a batch of every task.

A step maps `(state, {task: batch})` to `(state, metrics)`. What is compiled depends on the shapes
of the batch, and on the task's name only if the model has a query tower per task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from taser_jax.models.batch import Batch, static_task
from taser_jax.optim.task_gradients import Report, find_report
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import Loss, make_loss
from taser_jax.training.objective import Objective, StepMetrics
from taser_jax.training.state import Params, SkippedSteps, TrainState, named_key


def make_train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    objective: Objective | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    schedule: optax.Schedule | None = None,
    trainable: PyTree[bool] | None = None,
    state_shardings: TrainState | None = None,
) -> TrainStep:
    """The jitted step on a batch of one task, which may change from step to step.

    Dropout and routing draws are functions of (seed, side, `state.step`). Steps that cannot be
    taken are skipped: see `apply_gradients`.

    Args:
        model: the dual encoder.
        optimizer: optax chain; is offered the extra arguments of `apply_gradients`.
        objective: the loss to minimise; None is `ObjectiveConfig()`.
        num_chunks: number of chunks that the queries, and the passages, of each batch are encoded
            in (`encode_groups`).
        seed: the run's seed.
        schedule: step -> learning rate; for the metric only.
        trainable: tree of bool shaped as the parameters; where False no gradient is computed.
        state_shardings: shardings of the new state. None leaves them to the compiler, which on a
            mesh may choose another sharding than the input's, and then compiles a second time.

    Returns:
        The step. Metrics: `loss`, `tokens` (padding left out), those of the objective and of
        `apply_gradients`, and `learning_rate` where a schedule is given.
    """
    loss_fn = make_loss(model, objective=objective, num_chunks=num_chunks, seed=seed)

    def train_step(
        state: TrainState, batches: tuple[Batch, ...], tasks: tuple[str | None, ...]
    ) -> tuple[TrainState, StepMetrics]:
        (batch,), (task,) = batches, tasks
        loss = functools.partial(loss_fn, batch=batch, step=state.step, task=task)
        result, gradients = differentiate(loss, state.params, trainable)
        new_state, metrics, _ = apply_gradients(
            state,
            gradients,
            optimizer=optimizer,
            losses=result.loss[None],
            squared_norms=result.squared_norm[None],
            key=jax.random.fold_in(named_key(seed, "optimizer"), state.step),
            param_shardings=None if state_shardings is None else state_shardings.params,
        )
        metrics |= {"loss": result.loss} | common_metrics(state, batches, schedule) | result.metrics
        return new_state, metrics

    return TrainStep(train_step, query_tasks=model.query_tasks, state_shardings=state_shardings)


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
        tasks: tuple[str, ...] | None = None,
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
        self._query_tasks, self._tasks = query_tasks, tasks

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
