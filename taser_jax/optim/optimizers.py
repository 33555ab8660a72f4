"""Builds an optax chain from an `OptimizerConfig`: clip, AdamW, per-parameter rates, freezing."""

from __future__ import annotations

import dataclasses
import enum
import operator

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from taser_jax.devices.parameter_rules import Rules, assign, parameter_path
from taser_jax.optim.layer_decay import layer_factors
from taser_jax.storage.errors import ConfigError, check_fields


def make_schedule(
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    floor: float = 1e-7,
) -> optax.Schedule:
    """Linear warm-up from 0, then linear decay to a floor.

    With peak η, warm-up W and total T, the update made at step s (counted from 0) uses
    η·s/W for s < W, and from there η·max(floor, (T − s)/(T − W)). The first update therefore has
    rate 0 where there is a warm-up. DPR's and TASER's floor is 1e-7; 1 keeps the rate constant.

    Example:
        η=1, W=2, T=6: 0, 0.5, 1, 0.75, 0.5, 0.25, then the floor.

    Args:
        learning_rate: peak η.
        total_steps: T, steps of the run.
        warmup_steps: W.
        floor: smallest share of the peak after warm-up.

    Returns:
        The schedule.

    Raises:
        ConfigError: a negative number, or a warm-up that is longer than the run.
    """
    if learning_rate < 0 or floor < 0:
        rates = f"learning rate {learning_rate} and floor {floor}: none may be negative"
        raise ConfigError(rates, where="learning-rate schedule", fix="2e-5 and 1e-7 are DPR's")
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        found = f"{warmup_steps} warm-up steps in a run of {total_steps} steps"
        fix = "shorten WARMUP_STEPS (about 5 % of the run is common) or train longer"
        raise ConfigError(found, where="learning-rate schedule", fix=fix)

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        after = jnp.maximum(floor, (total_steps - step) / max(1, total_steps - warmup_steps))
        return learning_rate * jnp.where(step < warmup_steps, step / max(1, warmup_steps), after)

    return schedule


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
        warmup_steps: steps of linear warm-up from 0.
        floor: smallest share of the peak rate after warm-up; 1 keeps the rate constant.
        weight_decay: decoupled decay of everything but biases and layer-norm scales.
        clip_norm: global gradient norm above which gradients are scaled down; None clips nothing.
            On W devices DPR and TASER clip a gradient that is 1/W of the global one (they average
            a loss that is global already): their 2.0 is 2.0·W here.
        layer_decay: factor per layer below the last; TASER's is 0.8, for BERT trained in full. None
            turns it off.
        expert_learning_rate_factor: multiplies the rate of expert parameters (`moe_factor`);
            raise it where experts stay close to each other.
        updates: which parameters train; None trains all.
    """

    learning_rate: float = 2e-5
    warmup_steps: int = 0
    floor: float = 1e-7
    weight_decay: float = 0.0
    clip_norm: float | None = 2.0
    layer_decay: float | None = None
    expert_learning_rate_factor: float = 1.0
    updates: Rules[Update] | None = None


def build_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning-rate schedule of a run of `total_steps` steps."""
    return make_schedule(
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
    links.append(optax.masked(optax.scale_by_adam(), trains))
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
        fix = "give at least one rule the value 'train'"
        raise ConfigError("every parameter is frozen", where="OptimizerConfig.updates", fix=fix)
    return trains


def learning_rate_factors(config: OptimizerConfig, params: PyTree) -> PyTree[float]:
    """Tree of floats shaped as `params`: what multiplies each parameter's learning rate."""
    if config.layer_decay is None:
        layers = jax.tree.map(lambda _: 1.0, params)
    else:
        layers = layer_factors(params, decay=config.layer_decay)

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
    names = ("weight_decay", "expert_learning_rate_factor")
    check_fields(config, *names, is_valid=lambda x: x >= 0, expected="0 or more")
    expected = "above 0, or None to clip nothing"
    check_fields(config, "clip_norm", is_valid=lambda x: x is None or x > 0, expected=expected)
