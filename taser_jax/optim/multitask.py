"""From a `MultitaskConfig` to the optimiser of a multi-task run."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import optax
from jaxtyping import PyTree

from taser_jax.optim.baselines import cgd, gradnorm, pcgrad
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer, trainable
from taser_jax.optim.task_gradients import Reduction, check_combined, check_tasks
from taser_jax.optim.tsage import tsage
from taser_jax.optim.tsage_options import TSageConfig
from taser_jax.storage.errors import ConfigError


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
        config: which combiner, and its options.
        tasks: names, in the order of the task axis.
        total_steps: steps of the run, for T-SAGE's burn-in.
        trainable: tree of bool shaped as the parameters; None trains all.

    Returns:
        `update(task_grads, state, params, *, losses, key)`; see `task_gradients`.

    Raises:
        ConfigError: the combiner is the naive sum, which needs no task's gradients.
    """
    match Combiner(config.combiner):
        case Combiner.NAIVE:
            raise ConfigError(
                "the naive sum needs no combiner", fix="add the gradients up (TaskGradients.SUMMED)"
            )
        case Combiner.PCGRAD:
            return pcgrad(tasks=tasks, trainable=trainable, reduction=config.reduction)
        case Combiner.CGD:
            return cgd(tasks=tasks, trainable=trainable)
        case Combiner.GRADNORM:
            return gradnorm(tasks=tasks, trainable=trainable)
        case Combiner.TSAGE:
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
    """The whole chain: combiner, shape check, then `build_optimizer`'s.

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
        return optax.chain(combiner, check_combined(), after)
    if config.reduction is Reduction.MEAN:
        return optax.chain(optax.scale(1.0 / len(check_tasks(tasks))), after)
    return after
