"""PCGrad: removes from each task's gradient the components that conflict with other tasks'."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from taser_jax.optim.task_gradients import (
    Reduction,
    Report,
    check_task_gradients,
    check_tasks,
    gram_matrix,
    weighted_gradients,
)


@dataclasses.dataclass(frozen=True)
class PCGradConfig:
    """How projected gradients are combined.

    Attributes:
        reduction: SUM is the paper's; MEAN divides by the number of tasks, as TACO-DR's code does.
    """

    reduction: Reduction = Reduction.SUM


class PCGradState(NamedTuple):
    """Report of the last step: `conflicts` is the share of task pairs with a negative product."""

    report: Report


def pcgrad(
    config: PCGradConfig, *, tasks: Sequence[str], trainable: PyTree[bool] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_i g′_i of gradient surgery.

    g′_i starts as g_i; the other tasks j are visited in random order, and where <g′_i, g_j> < 0,
    g′_i ← g′_i − <g′_i, g_j>/‖g_j‖² · g_j with the original g_j. Gradients are whole vectors over
    all trainable parameters. Every g′_i is a combination of the g_j, so the dot products of the
    gradients, one [tasks, tasks] matrix, are all it takes: g′ is never stored.

    Example:
        g_1 = (1, 0), g_2 = (−1, 1): their product is −1. g′_1 = g_1 + g_2/2 = (0.5, 0.5),
        g′_2 = g_2 + g_1 = (0, 1), the sum is (0.5, 1.5); in terms of the gradients,
        2·g_1 + 1.5·g_2.

    Args:
        config: sum or mean.
        tasks: names, in the order of the task axis.
        trainable: tree of bool; dot products exclude frozen parameters.

    Source: Yu et al. 2020, "Gradient Surgery for Multi-Task Learning", Algorithm 1.
    """
    tasks = check_tasks(tasks)
    num_tasks = len(tasks)
    scale = 1.0 / num_tasks if config.reduction is Reduction.MEAN else 1.0

    def init(params: PyTree) -> PCGradState:
        del params
        weights = jnp.full((num_tasks,), scale, jnp.float32)
        return PCGradState(Report(weights, {"conflicts": jnp.float32(0)}))

    def update(
        updates: PyTree,
        state: PCGradState,
        params: PyTree | None = None,
        *,
        losses: jax.typing.ArrayLike,
        key: jax.Array,
        **extra: object,
    ) -> tuple[PyTree, PCGradState]:
        del state, extra
        products = gram_matrix(check_task_gradients(updates, params, losses, tasks, trainable))
        factors = projected(products, visiting_orders(key, num_tasks))
        weights = scale * jnp.sum(factors, axis=0)
        combined = weighted_gradients(weights, updates, params, trainable=trainable)
        pairs = max(1, num_tasks * (num_tasks - 1))
        conflicts = jnp.sum(products < 0).astype(jnp.float32) / pairs
        return combined, PCGradState(Report(weights, {"conflicts": conflicts}))

    return optax.GradientTransformationExtraArgs(init, update)


def visiting_orders(key: jax.Array, num_tasks: int) -> Int[Array, "task visit"]:
    """For each task the others in random order; the task itself comes last and has no effect."""
    draws = jax.random.uniform(key, (num_tasks, num_tasks))
    return jnp.argsort(draws + 2.0 * jnp.eye(num_tasks), axis=1)


def projected(
    products: Float[Array, "task task"], orders: Int[Array, "task visit"]
) -> Float[Array, "task task"]:
    """Factors c with g′_i = Σ_j c_ij·g_j, from the products of the original gradients."""
    num_tasks = len(products)
    squares = jnp.diagonal(products)
    is_other: Bool[np.ndarray, "task task"] = ~np.eye(num_tasks, dtype=bool)

    def of_task(task: jax.Array, order: jax.Array) -> jax.Array:
        def visit(factors: jax.Array, other: jax.Array) -> tuple[jax.Array, None]:
            product = factors @ products[:, other]
            conflicts = (product < 0) & jnp.asarray(is_other)[task, other] & (squares[other] > 0)
            step = product / jnp.where(squares[other] > 0, squares[other], 1.0)
            return factors.at[other].add(jnp.where(conflicts, -step, 0.0)), None

        start = jax.nn.one_hot(task, num_tasks, dtype=jnp.float32)
        return jax.lax.scan(visit, start, order)[0]

    with jax.default_matmul_precision("highest"):
        return jax.vmap(of_task)(jnp.arange(num_tasks), orders)
