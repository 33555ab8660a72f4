"""One training step over a batch of each task, whose gradients a combiner makes one."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from taser_jax.batch import Batch, Tokens
from taser_jax.errors import ConfigError
from taser_jax.optim.skipping import SkipState
from taser_jax.optim.task_gradients import check_tasks, find_report
from taser_jax.training.keys import named_key
from taser_jax.training.state import Params, TrainState
from taser_jax.training.step import Encoder, ObjectiveConfig, StepMetrics, make_loss

_TASK_METRICS = ("nll", "accuracy", "mrr")


class TaskGradients(enum.Enum):
    """What the optimiser gets.

    STACKED: gradients with a leading task axis, for a combiner. SUMMED: their sum, taken task by
    task, for an optimiser without one; that is the naive combiner at one gradient's memory.
    """

    STACKED = "stacked"
    SUMMED = "summed"


def task_seed(seed: int, task: str) -> int:
    """The seed of one task's dropout and routing draws; by name, so that order does not matter."""
    digest = hashlib.sha256(f"{seed} task {task}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def make_multitask_train_step(
    model: Encoder,
    optimizer: optax.GradientTransformation,
    *,
    tasks: Sequence[str],
    gradients: TaskGradients = TaskGradients.STACKED,
    objective: ObjectiveConfig | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    schedule: optax.Schedule | None = None,
    trainable: Any | None = None,
    state_shardings: TrainState | None = None,
    max_skipped_steps: int = 10,
) -> Callable[[TrainState, Mapping[str, Batch]], tuple[TrainState, StepMetrics]]:
    """The jitted step over one batch of every task.

    Tasks are computed one after another, each with its own shapes and its own softmax: the next
    forward pass waits until the last gradients are written, so that one task's activations are
    alive at a time. The arithmetic is that of the tasks' single steps together.

    A loss or gradient that is not finite changes neither parameters nor optimiser state, but
    counts as a step: the metric `skipped` is 1, and `finite` is False once `max_skipped_steps` were
    skipped in a row, where the training loop stops as for any loss that is not finite.

    Args:
        model: the dual encoder; gets the task's name.
        optimizer: wrapped by `skip_non_finite`, with a combiner of the same tasks first, as
            `build_multitask_optimizer` makes it (SUMMED: without one).
        tasks: names, in the order of the task axis.
        gradients: with a task axis, or summed.
        objective: temperature and regulariser; None is `ObjectiveConfig()`.
        num_chunks: queries, and passages, of each task are encoded in so many chunks.
        seed: the run's seed; draws are functions of (seed, task, step).
        schedule: step -> learning rate, only reported.
        trainable: tree of bool shaped as the parameters; where False no gradient is computed.
        state_shardings: where the new state lives; task gradients are then kept as the parameters
            are, [tasks, ...] by (None, ...).
        max_skipped_steps: see above.

    Returns:
        `step(state, {task: batch}) -> (state, metrics)`; `state` is donated. Metrics: `loss` (sum
        over tasks), `loss/<task>`, `nll/<task>`, `accuracy/<task>`, `mrr/<task>`, `grad_norm`
        (of all task gradients together, before combining), `grad_norm/<task>`, `param_norm`,
        `finite`, `skipped`, `skipped_in_a_row`, `skipped_total`; where there is a combiner,
        `weight/<task>` and its own figures.

    Raises:
        ConfigError: (when a step is traced) batches of other tasks, an optimiser that does not
            count skipped steps, or no combiner for stacked gradients.
    """
    tasks = check_tasks(tasks)
    loss_fns = {
        task: make_loss(
            model,
            objective=objective,
            num_chunks=num_chunks,
            seed=task_seed(seed, task),
            train=True,
        )
        for task in tasks
    }
    shardings = None if state_shardings is None else state_shardings.params

    def train_step(
        state: TrainState, batches: Mapping[str, Batch]
    ) -> tuple[TrainState, StepMetrics]:
        _check(state, batches, tasks)
        grads, squares, losses, metrics = _task_gradients(
            state, batches, loss_fns, gradients=gradients, trainable=trainable, shardings=shardings
        )
        grad_norm = jnp.sqrt(jnp.sum(squares))
        is_finite = jnp.isfinite(grad_norm) & jnp.all(jnp.isfinite(losses))
        key = jax.random.fold_in(named_key(seed, "optimizer"), state.step)
        updates, opt_state = optax.with_extra_args_support(optimizer).update(
            grads,
            state.opt_state,
            state.params,
            losses=losses,
            key=key,
            is_finite=is_finite,
            param_shardings=shardings,
        )
        _check_updates(updates, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {
            "loss": jnp.sum(losses),
            "grad_norm": grad_norm,
            "param_norm": optax.global_norm(state.params),
            "skipped": (~is_finite).astype(jnp.float32),
            "skipped_in_a_row": opt_state.in_a_row.astype(jnp.float32),
            "skipped_total": opt_state.total.astype(jnp.float32),
            "finite": opt_state.in_a_row < max_skipped_steps,
        }
        metrics |= _report(opt_state, tasks)
        if schedule is not None:
            # The optimiser's own count stands still in steps that are skipped.
            taken = state.step - state.opt_state.total
            metrics["learning_rate"] = jnp.asarray(schedule(taken), jnp.float32)
        return TrainState(state.step + 1, params, opt_state), metrics

    out_shardings = None if state_shardings is None else (state_shardings, None)
    return jax.jit(train_step, donate_argnums=0, out_shardings=out_shardings)


def _task_gradients(
    state: TrainState,
    batches: Mapping[str, Batch],
    loss_fns: Mapping[str, Callable[..., tuple[jax.Array, StepMetrics]]],
    *,
    gradients: TaskGradients,
    trainable: Any | None,
    shardings: Any | None,
) -> tuple[Any, jax.Array, jax.Array, StepMetrics]:
    """Gradients (stacked or summed), squared norms [tasks], losses [tasks], and metrics."""
    num_tasks = len(loss_fns)
    is_stacked = gradients is TaskGradients.STACKED

    def empty(param: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
        zeros = jnp.zeros((num_tasks, *param.shape) if is_stacked else param.shape, param.dtype)
        if sharding is None:
            return zeros
        spec = PartitionSpec(None, *sharding.spec) if is_stacked else sharding.spec
        return jax.lax.with_sharding_constraint(zeros, NamedSharding(sharding.mesh, spec))

    found = jax.tree.map(empty, state.params, *([] if shardings is None else [shardings]))
    zero = jnp.zeros((), jnp.int32)
    losses: list[jax.Array] = []
    squares: list[jax.Array] = []
    metrics: StepMetrics = {}
    for place, (task, loss_fn) in enumerate(loss_fns.items()):
        batch = _after(zero, batches[task])
        # Dropout masks wait too: they depend on the step, not on tokens.
        objective = functools.partial(loss_fn, batch=batch, step=state.step + zero, task=task)

        (loss, task_metrics), grads = jax.value_and_grad(
            lambda params, objective=objective: objective(_freeze(params, trainable)), has_aux=True
        )(state.params)
        if is_stacked:
            found = jax.tree.map(lambda rows, row, t=place: rows.at[t].set(row), found, grads)
        else:
            found = jax.tree.map(jnp.add, found, grads)
        square = jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]))
        # Nothing is below 0, but the compiler does not know: the next task's forward pass waits.
        # XLA's barriers do not order the CPU's schedule, and there all activations would be alive.
        zero = (square < 0).astype(jnp.int32)
        squares.append(square)
        metrics[f"grad_norm/{task}"] = jnp.sqrt(square)
        losses.append(loss)
        metrics[f"loss/{task}"] = loss
        for name in _TASK_METRICS:
            metrics[f"{name}/{task}"] = task_metrics[name]
    return found, jnp.stack(squares), jnp.stack(losses), metrics


def _freeze(params: Params, trainable: Any | None) -> Params:
    if trainable is None:
        return params
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else jax.lax.stop_gradient(leaf), params, trainable
    )


def _after(zero: jax.Array, batch: Batch) -> Batch:
    """The same batch, once `zero`, which is 0, has been computed."""

    def wait(tokens: Tokens) -> Tokens:
        return Tokens(ids=tokens.ids + zero, mask=tokens.mask & (zero == 0))

    return dataclasses.replace(batch, queries=wait(batch.queries), passages=wait(batch.passages))


def _check(state: TrainState, batches: Mapping[str, Batch], tasks: Sequence[str]) -> None:
    if set(batches) != set(tasks):
        raise ConfigError(
            f"batches of {', '.join(sorted(batches)) or 'no task'}",
            where="multi-task step",
            expected=f"one batch of each of {', '.join(tasks)}",
            fix="draw from every task in every step",
        )
    if not isinstance(state.opt_state, SkipState):
        raise ConfigError(
            f"the optimiser's state is a {type(state.opt_state).__name__}",
            where="multi-task step",
            expected="a SkipState, which counts steps with gradients that are not finite",
            fix="make the optimiser by build_multitask_optimizer, or wrap it by skip_non_finite",
        )


def _check_updates(updates: Any, params: Any) -> None:
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        if update.shape != param.shape:
            raise ConfigError(
                f"an update of shape {update.shape} for a parameter of shape {param.shape}",
                where="multi-task step",
                expected="the parameter's own shape: a combiner removes the task axis",
                fix="put a combiner first in the chain, as build_multitask_optimizer does",
            )


def _report(opt_state: Any, tasks: Sequence[str]) -> StepMetrics:
    report = find_report(opt_state)
    if report is None:
        return {}
    weights = {f"weight/{task}": report.weights[place] for place, task in enumerate(tasks)}
    return weights | report.scalars
