"""Optimisers of multi-task runs: the combiners beside T-SAGE, and the choice among all of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer, trainable
from taser_jax.optim.task_gradients import (
    Reduction,
    Report,
    gram_matrix,
    keep_trainable,
    no_report,
    squared_norms,
    weighted_gradients,
    weights_entropy,
)
from taser_jax.optim.tsage import TSageConfig, tsage

_SMALLEST_LOSS = 1e-6
_ENTROPY = "task_entropy"


class WeighingState(NamedTuple):
    """State of a combiner that gives each task a weight.

    Attributes:
        memory: what the next weights depend on.
        report: of the last step, with the weights that it used.
    """

    memory: PyTree
    report: Report


def _weighing(
    tasks: Sequence[str],
    start: Callable[[], PyTree],
    weigh: Callable[..., tuple[PyTree, Report]],
    *,
    scalar: str,
    trainable: PyTree[bool] | None,
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t w_t·g_t with the weights that `weigh` reports.

    Args:
        tasks: names, in the order of the task axis.
        start: makes the memory of the first step.
        weigh: (trainable gradients, memory, *, losses, key) -> (new memory, report of this step).
        scalar: what it reports besides weights.
        trainable: tree of bool; frozen parameters take no part and get 0.
    """

    def init(params: PyTree) -> WeighingState:
        del params
        return WeighingState(start(), no_report(len(tasks), scalar))

    def update(
        updates: PyTree,
        state: WeighingState,
        params: PyTree | None = None,
        *,
        losses: jax.typing.ArrayLike,
        key: jax.Array,
        **extra: object,
    ) -> tuple[PyTree, WeighingState]:
        del extra
        leaves = jax.tree.leaves(keep_trainable(updates, trainable))
        memory, report = weigh(leaves, state.memory, losses=losses, key=key)
        combined = weighted_gradients(report.weights, updates, params, trainable=trainable)
        return combined, WeighingState(memory, report)

    return optax.GradientTransformationExtraArgs(init, update)


def pcgrad(
    *,
    tasks: Sequence[str],
    trainable: PyTree[bool] | None = None,
    reduction: Reduction = Reduction.SUM,
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_i g′_i of gradient surgery.

    g′_i starts as g_i; the other tasks j are visited in random order, and where <g′_i, g_j> < 0,
    g′_i ← g′_i − <g′_i, g_j>/‖g_j‖² · g_j with the original g_j. Gradients are whole vectors over
    all trainable parameters. Every g′_i is a combination of the g_j, so the dot products of the
    gradients, one [tasks, tasks] matrix, are all it takes: g′ is never stored. The report's
    `conflicts` is the share of task pairs with a negative product.

    Example:
        g_1 = (1, 0), g_2 = (−1, 1): their product is −1. g′_1 = g_1 + g_2/2 = (0.5, 0.5),
        g′_2 = g_2 + g_1 = (0, 1), the sum is (0.5, 1.5); in terms of the gradients,
        2·g_1 + 1.5·g_2.

    Args:
        tasks: names, in the order of the task axis.
        trainable: tree of bool; dot products exclude frozen parameters.
        reduction: SUM is the paper's; MEAN divides by the number of tasks, as TACO-DR's code does.

    Source: Yu et al. 2020, "Gradient Surgery for Multi-Task Learning", Algorithm 1.
    """
    num_tasks = len(tasks)
    scale = 1.0 / num_tasks if reduction is Reduction.MEAN else 1.0

    def weigh(
        leaves: Sequence[Array], memory: tuple[()], *, losses: jax.typing.ArrayLike, key: jax.Array
    ) -> tuple[tuple[()], Report]:
        del losses
        products = gram_matrix(leaves)
        factors = projected(products, visiting_orders(key, num_tasks))
        pairs = max(1, num_tasks * (num_tasks - 1))
        conflicts = jnp.sum(products < 0).astype(jnp.float32) / pairs
        return memory, Report(scale * jnp.sum(factors, axis=0), {"conflicts": conflicts})

    return _weighing(tasks, tuple, weigh, scalar="conflicts", trainable=trainable)


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


def cgd(
    *,
    tasks: Sequence[str],
    trainable: PyTree[bool] | None = None,
    loss_exponent: float = 0.25,
    temperature: float = 100.0,
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t w_t·g_t with weights that grow with a task's contribution to all tasks.

    r_i = Σ_j (ℓ_i·ℓ_j)^p · cos(g_i, g_j), over all tasks, i itself included; then
    w ← softmax(log w + r/τ), from 1/T at the start, and the new w is used at once.

    Example:
        ℓ = (4, 1), p = 0.5, τ = 1, g_1 = (3, 4), g_2 = (0, 2). Cosines: 1, 0.8, 1.
        r = (4 + 2·0.8, 2·0.8 + 1) = (5.6, 2.6), w = softmax(5.6, 2.6) = (0.9526, 0.0474), the
        gradient is (2.8577, 3.9051).

    Args:
        tasks: names, in the order of the task axis.
        trainable: tree of bool; the cosines exclude frozen parameters.
        loss_exponent: p; 0.25 in TACO-DR's scripts, 0.5 in CGD's paper, where the losses stand for
            the gradients' sizes.
        temperature: τ, the inverse of the weights' step size; 100 in TACO-DR's scripts.

    Source: Piratla et al. 2022, "Focus on the Common Good: Group Distributional Robustness
    Follows", Algorithm 1, with cosines over all parameters.
    """

    def weigh(
        leaves: Sequence[Array], memory: Array, *, losses: jax.typing.ArrayLike, key: jax.Array
    ) -> tuple[Array, Report]:
        del key
        products = gram_matrix(leaves)
        norms = jnp.sqrt(jnp.diagonal(products))
        inverse = jnp.where(norms > 0, 1.0 / jnp.where(norms > 0, norms, 1.0), 0.0)
        # A regulariser may make a loss negative; it then counts as 0.
        powers = jnp.maximum(losses, 0.0) ** loss_exponent
        gains = powers * inverse
        common = gains * jnp.sum(products * gains, axis=1)
        log_weights = jax.nn.log_softmax(memory + common / temperature)
        return log_weights, _with_entropy(jnp.exp(log_weights))

    def start() -> Array:
        return jnp.log(jnp.full((len(tasks),), 1.0 / len(tasks), jnp.float32))

    return _weighing(tasks, start, weigh, scalar=_ENTROPY, trainable=trainable)


def _with_entropy(weights: Float[Array, " task"]) -> Report:
    return Report(weights, {_ENTROPY: weights_entropy(weights)})


class GradNormMemory(NamedTuple):
    """What GradNorm's next weights depend on.

    Attributes:
        step: steps done.
        weights: w, one per task; their sum is the number of tasks.
        first_losses: the losses of the first step.
        inner: state of the weights' Adam.
    """

    step: Array
    weights: Array
    first_losses: Array
    inner: PyTree


def gradnorm(
    *,
    tasks: Sequence[str],
    trainable: PyTree[bool] | None = None,
    alpha: float = 1.5,
    learning_rate: float = 0.025,
) -> optax.GradientTransformationExtraArgs:
    """The combiner Σ_t w_t·g_t with weights trained on the tasks' gradient norms.

    With G_t = ‖w_t·g_t‖ over all trainable parameters, Ḡ their mean over tasks, and
    r_t = (ℓ_t/ℓ_t(0)) / (its mean over tasks), the weights minimise Σ_t |G_t − Ḡ·r_t^α| by gradient
    descent, with Ḡ·r_t^α held constant: the gradient for w_t is sign(G_t − Ḡ·r_t^α)·‖g_t‖. They
    have an Adam of their own and are then scaled to add up to T. A step uses the weights of the
    step before. A weight that would fall below 0 becomes 0, and its own gradient can raise it
    again; if all weights would, none changes. Losses below 1e-6 count as 1e-6 in r, because the
    first loss is a divisor.

    Example:
        ‖g‖ = (4, 2), w = (1, 1), ℓ = ℓ(0): r = (1, 1), Ḡ = 3, gradients of w (+4, −2). Adam's first
        step moves each by its rate, 0.025: (0.975, 1.025), which add up to 2 already.

    Args:
        tasks: names, in the order of the task axis.
        trainable: tree of bool; the norms exclude frozen parameters.
        alpha: how strongly slow tasks are favoured; 1.5 in the paper's experiments on NYUv2.
        learning_rate: learning rate of the weights' own Adam; 0.025 in the paper.

    Source: Chen et al. 2018, "GradNorm: Gradient Normalization for Adaptive Loss Balancing in Deep
    Multitask Networks", Equations 1 and 2 and Algorithm 1.
    """
    num_tasks = len(tasks)
    inner = optax.adam(learning_rate)

    def weigh(
        leaves: Sequence[Array],
        memory: GradNormMemory,
        *,
        losses: jax.typing.ArrayLike,
        key: jax.Array,
    ) -> tuple[GradNormMemory, Report]:
        del key
        norms = jnp.sqrt(squared_norms(leaves))
        # A loss can be exactly 0, where a softmax saturates, and below 0 with a regulariser.
        losses = jnp.maximum(losses, _SMALLEST_LOSS)
        first_losses = jnp.where(memory.step == 0, losses, memory.first_losses)
        paces = losses / first_losses
        paces = paces / jnp.mean(paces)
        weighted_norms = memory.weights * norms
        targets = jnp.mean(weighted_norms) * paces**alpha
        slopes = jnp.sign(weighted_norms - targets) * norms
        steps, inner_state = inner.update(slopes, memory.inner)
        weights = jnp.maximum(memory.weights + steps, 0.0)
        whole = jnp.sum(weights)
        scaled = weights * num_tasks / jnp.where(whole > 0, whole, 1.0)
        # If all were 0, no gradient could raise one again.
        weights = jnp.where(whole > 0, scaled, memory.weights)
        moved = GradNormMemory(memory.step + 1, weights, first_losses, inner_state)
        return moved, _with_entropy(memory.weights)

    def start() -> GradNormMemory:
        ones = jnp.ones((num_tasks,), jnp.float32)
        return GradNormMemory(jnp.zeros((), jnp.int32), ones, ones, inner.init(ones))

    return _weighing(tasks, start, weigh, scalar=_ENTROPY, trainable=trainable)


class Combiner(enum.Enum):
    """How the tasks' gradients become one."""

    NAIVE = "naive"
    PCGRAD = "pcgrad"
    CGD = "cgd"
    GRADNORM = "gradnorm"
    TSAGE = "tsage"


@dataclasses.dataclass(frozen=True)
class MultitaskConfig:
    """The combiner of a multi-task run; CGD and GradNorm have no options.

    Attributes:
        combiner: which one.
        reduction: of the plain sum and of PCGrad. SUM is that of their papers; set MEAN to compare
            them with T-SAGE at the same clip norm, since its combined gradient is an average.
        tsage: options of T-SAGE.
    """

    combiner: Combiner = Combiner.TSAGE
    reduction: Reduction = Reduction.SUM
    tsage: TSageConfig = TSageConfig()


def build_combiner(
    config: MultitaskConfig,
    *,
    tasks: Sequence[str],
    total_steps: int,
    trainable: PyTree[bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The first link of a multi-task chain.

    Args:
        config: which combiner, not the naive sum, and its options.
        tasks: names, in the order of the task axis.
        total_steps: steps of the run, for T-SAGE's burn-in.
        trainable: tree of bool shaped as the parameters; None trains all.

    Returns:
        `update(task_grads, state, params, *, losses, key)`; see `task_gradients`.
    """
    match Combiner(config.combiner):
        case Combiner.PCGRAD:
            return pcgrad(tasks=tasks, trainable=trainable, reduction=config.reduction)
        case Combiner.CGD:
            return cgd(tasks=tasks, trainable=trainable)
        case Combiner.GRADNORM:
            return gradnorm(tasks=tasks, trainable=trainable)
        case _:
            return tsage(config.tsage, tasks=tasks, total_steps=total_steps, trainable=trainable)


def reads_task_gradients(config: MultitaskConfig) -> bool:
    """Whether the combiner needs each task's gradients; the naive sum does not."""
    return Combiner(config.combiner) is not Combiner.NAIVE


def build_multitask_optimizer(
    config: MultitaskConfig,
    optimizer: OptimizerConfig,
    params: PyTree,
    *,
    tasks: Sequence[str],
    total_steps: int,
) -> optax.GradientTransformationExtraArgs:
    """The whole chain: combiner, then `build_optimizer`'s.

    The naive sum has no combiner: its step adds up the tasks' gradients as it computes them, at the
    memory of one gradient (`TaskGradients.SUMMED`).

    Args:
        config: the combiner.
        optimizer: clipping, AdamW, rates, freezing.
        params: parameters, arrays or abstract; only their paths and shapes are used.
        tasks: names, in the order of the task axis.
        total_steps: steps of the run.

    Returns:
        An optimiser for `make_multitask_step`.
    """
    after = build_optimizer(optimizer, params, total_steps=total_steps)
    if reads_task_gradients(config):
        trains = None if optimizer.updates is None else trainable(optimizer, params)
        combiner = build_combiner(config, tasks=tasks, total_steps=total_steps, trainable=trains)
        return optax.chain(combiner, after)
    if config.reduction is Reduction.MEAN:
        return optax.chain(optax.scale(1.0 / len(tasks)), after)
    return after
