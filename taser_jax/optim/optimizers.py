"""Builds an optax chain from an `OptimizerConfig`: clip, AdamW, per-parameter rates, freezing."""

from __future__ import annotations

import dataclasses
import enum
import operator

import jax
import optax
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import Rules, assign, parameter_path
from taser_jax.optim.layer_decay import layer_factors
from taser_jax.optim.schedules import ScheduleKind, make_schedule
from taser_jax.storage.errors import ConfigError

_WITHOUT_DECAY = ("bias", "scale")


class Update(enum.Enum):
    """Whether a parameter is trained."""

    TRAIN = "train"
    FREEZE = "freeze"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW as TASER and DPR train with it; the defaults are TASER's code without layer decay.

    Tables are (regular expression, value) pairs over parameter paths such as
    "encoder/layers_2/experts/wi/kernel"; each parameter must match exactly one rule and each
    rule at least one parameter.

    Attributes:
        learning_rate: peak rate.
        schedule: the rate after warm-up.
        warmup_steps: steps of linear warm-up from 0.
        floor: smallest share of the peak rate after warm-up.
        b1: decay of the first moment.
        b2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled decay of everything but biases and layer-norm scales.
        clip_norm: global gradient norm above which gradients are scaled down; None clips nothing.
            On W devices DPR and TASER clip a gradient that is 1/W of the global one (they average
            a loss that is global already): their 2.0 is 2.0·W here.
        layer_decay: TASER's is 0.8; None turns it off.
        layer_depths: table of depths for layer decay; None is `layer_decay.layer_depths`.
        expert_learning_rate_factor: multiplies the rate of expert parameters (`moe_factor`).
        updates: which parameters train; None trains all.
    """

    learning_rate: float = 2e-5
    schedule: ScheduleKind = ScheduleKind.LINEAR
    warmup_steps: int = 0
    floor: float = 1e-7
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 2.0
    layer_decay: float | None = None
    layer_depths: Rules[int] | None = None
    expert_learning_rate_factor: float = 1.0
    updates: Rules[Update] | None = None


def build_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning-rate schedule of a run of `total_steps` steps."""
    return make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        total_steps=total_steps,
        warmup_steps=config.warmup_steps,
        floor=config.floor,
    )


def build_optimizer(
    config: OptimizerConfig, params: PyTree, *, total_steps: int
) -> optax.GradientTransformationExtraArgs:
    """The optax chain of a run.

    θ ← θ − η_s·f(θ)·(m̂/(√v̂ + ε) + λ·θ), with gradients clipped to a global norm first, f the
    product of layer decay and expert factor, and λ = 0 for biases and scales. As in PyTorch, the
    factor scales the weight decay too. Frozen parameters get no update, keep no moments and do
    not count in the norm. A multi-task combiner goes in front: `optax.chain(combiner, this)`.

    Args:
        config: numbers and tables.
        params: parameters, arrays or abstract; only their paths and shapes are used.
        total_steps: steps of the run, for the schedule.

    Returns:
        The chain.

    Raises:
        ConfigError: a table that does not fit the parameters, or an impossible number.
    """
    _check_numbers(config)
    trains = trainable(config, params)
    frozen = jax.tree.map(operator.not_, trains)
    decays = jax.tree_util.tree_map_with_path(_decays, params)
    links = [optax.masked(optax.set_to_zero(), frozen)]
    if config.clip_norm is not None:
        links.append(optax.clip_by_global_norm(config.clip_norm))
    links.append(
        optax.masked(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon), trains)
    )
    if config.weight_decay:
        decayed = jax.tree.map(operator.and_, decays, trains)
        links.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
    links.append(_scale_each(learning_rate_factors(config, params)))
    links.append(optax.scale_by_learning_rate(build_schedule(config, total_steps)))
    return optax.with_extra_args_support(optax.chain(*links))


def trainable(config: OptimizerConfig, params: PyTree) -> PyTree[bool]:
    """Tree of bool shaped as `params`: True where a parameter is trained."""
    if config.updates is None:
        return jax.tree.map(lambda _: True, params)
    updates = assign(config.updates, params, table="table of updates")
    trains = jax.tree.map(lambda update: Update(update) is Update.TRAIN, updates)
    if not any(jax.tree.leaves(trains)):
        raise ConfigError(
            "every parameter is frozen",
            where="table of updates",
            expected="something to train",
            fix="give at least one rule the value 'train'",
        )
    return trains


def learning_rate_factors(config: OptimizerConfig, params: PyTree) -> PyTree[float]:
    """Tree of floats shaped as `params`: what multiplies each parameter's learning rate."""
    if config.layer_decay is None:
        layers = jax.tree.map(lambda _: 1.0, params)
    else:
        layers = layer_factors(params, decay=config.layer_decay, depths=config.layer_depths)

    def times_expert(path: jax.tree_util.KeyPath, factor: float) -> float:
        is_expert = "experts" in parameter_path(path).split("/")
        return factor * config.expert_learning_rate_factor if is_expert else factor

    return jax.tree_util.tree_map_with_path(times_expert, layers)


def _scale_each(factors: PyTree) -> optax.GradientTransformation:
    """Multiplies each update by its own constant."""
    if all(factor == 1.0 for factor in jax.tree.leaves(factors)):
        return optax.identity()
    return optax.stateless(lambda updates, params: jax.tree.map(operator.mul, updates, factors))


def _decays(path: jax.tree_util.KeyPath, _: object) -> bool:
    return parameter_path(path).split("/")[-1] not in _WITHOUT_DECAY


def _check_numbers(config: OptimizerConfig) -> None:
    problems = {
        "b1": not 0 <= config.b1 < 1,
        "b2": not 0 <= config.b2 < 1,
        "epsilon": config.epsilon <= 0,
        "weight_decay": config.weight_decay < 0,
        "clip_norm": config.clip_norm is not None and config.clip_norm <= 0,
        "expert_learning_rate_factor": config.expert_learning_rate_factor < 0,
    }
    for name, is_wrong in problems.items():
        if is_wrong:
            raise ConfigError(
                f"{name} is {getattr(config, name)}",
                where="OptimizerConfig",
                expected="0 <= b1, b2 < 1; epsilon, clip_norm > 0 (or None); the others >= 0",
                fix=f"correct {name}",
            )
