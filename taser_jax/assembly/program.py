"""A training step with everything it is made of, before anything is allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from taser_jax.assembly.plans import BatchPlan, Step
from taser_jax.copied_axes import CopiedAxis, copied_axes
from taser_jax.models.dual_encoder import DualEncoder, abstract_params, init_params, logical_axes
from taser_jax.optim.optimizers import OptimizerConfig, build_schedule, trainable
from taser_jax.partitioning import Partitioner
from taser_jax.progress import logger
from taser_jax.training.state import TrainState, init_state, state_shardings
from taser_jax.training.step import ObjectiveConfig


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """What `taser train` runs and `taser compile` compiles.

    Attributes:
        params: shapes of the parameters.
        param_shardings: where they live.
        logical_axes: names of their axes.
        copied_axes: those that the mesh cannot divide.
        optimizer: the optax chain.
        initialise: key -> parameters.
        state: shapes of the whole state.
        state_shardings: where it lives.
        train_step: jitted, (state, batch) -> (state, metrics).
    """

    params: Any
    param_shardings: Any
    logical_axes: Any
    copied_axes: Sequence[CopiedAxis]
    optimizer: optax.GradientTransformationExtraArgs
    initialise: Callable[[jax.Array], Any]
    state: TrainState
    state_shardings: TrainState
    train_step: Step

    @property
    def placed_state(self) -> TrainState:
        """Shapes of the whole state with their shardings, as restoring and compiling take them."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.state,
            self.state_shardings,
        )


def make_step_program(
    model: DualEncoder,
    plan: BatchPlan,
    *,
    partitioner: Partitioner,
    optimizer: OptimizerConfig,
    objective: ObjectiveConfig,
    total_steps: int,
    seed: int,
    query_length: int,
    passage_length: int,
) -> StepProgram:
    """Shapes, shardings and the step of a configuration.

    Args:
        model: the dual encoder.
        plan: what a step's batch is.
        partitioner: devices, of this machine or of a topology.
        optimizer: AdamW, schedule, decay, freezing.
        objective: what is minimised.
        total_steps: length of the schedule.
        seed: of dropout and routing.
        query_length: tokens a query.
        passage_length: tokens a passage.
    """
    params = abstract_params(model)
    axes = logical_axes(model)
    shardings = partitioner.param_shardings(axes, params)
    copied = copied_axes(partitioner, axes, params)
    for axis in copied:
        logger.warning("%s", axis)
    chain = plan.optimizer(optimizer, params, total_steps=total_steps)
    initialise = functools.partial(
        init_params, model, query_length=query_length, passage_length=passage_length
    )
    state = jax.eval_shape(lambda key: init_state(initialise, chain, key), jax.random.key(0))
    placed = state_shardings(state, shardings)
    train_step = plan.train_step(
        model,
        chain,
        objective=objective,
        seed=seed,
        schedule=build_schedule(optimizer, total_steps),
        trainable=trainable(optimizer, params),
        state_shardings=placed,
    )
    return StepProgram(
        params=params,
        param_shardings=shardings,
        logical_axes=axes,
        copied_axes=copied,
        optimizer=chain,
        initialise=initialise,
        state=state,
        state_shardings=placed,
        train_step=train_step,
    )
