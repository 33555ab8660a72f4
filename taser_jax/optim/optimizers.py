"""Builds an optax chain from an `OptimizerConfig`: clip, AdamW, layer decay, freezing."""

from __future__ import annotations

import dataclasses
import enum
import operator
import re

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from taser_jax.devices.partitioning import Rules, assign, leaves_by_path, parameter_path
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import (
    Checked,
    Natural,
    NaturalNumber,
    PositiveNumber,
    PositiveShare,
)

# A decoder that fuses documents lies above the encoder, although it has layers of its own.
_ENCODER = r"(?!(?:.*/)?fusion/)(?:.*/)?"
_LAYER = re.compile(rf"{_ENCODER}layers_(\d+)/.*")


_WITHOUT_DECAY = ("bias", "scale")


class Update(enum.Enum):
    """Whether a parameter is trained."""

    TRAIN = "train"
    FREEZE = "freeze"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
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

    learning_rate: NaturalNumber = 2e-5
    warmup_steps: Natural = 0
    floor: NaturalNumber = 1e-7
    weight_decay: NaturalNumber = 0.0
    clip_norm: PositiveNumber | None = 2.0
    layer_decay: PositiveShare | None = None
    expert_learning_rate_factor: NaturalNumber = 1.0
    updates: Rules[Update] | None = None


def build_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then linear decay to a floor.

    With peak η, warm-up W and total T, the update made at step s (counted from 0) uses
    η·s/W for s < W, and from there η·max(floor, (T − s)/(T − W)). The first update therefore has
    rate 0 where there is a warm-up. DPR's and TASER's floor is 1e-7; 1 keeps the rate constant.

    Example:
        η=1, W=2, T=6: 0, 0.5, 1, 0.75, 0.5, 0.25, then the floor.

    Args:
        config: η, W and the floor.
        total_steps: T, steps of the run.

    Returns:
        The schedule.

    Raises:
        ConfigError: a warm-up that is longer than the run.
    """
    warmup = config.warmup_steps
    if warmup > total_steps or total_steps < 1:
        problem = f"{warmup} warm-up steps in a run of {total_steps} steps"
        fix = "shorten WARMUP_STEPS (about 5 % of the run is common) or train longer"
        raise ConfigError(problem, where="learning-rate schedule", fix=fix)

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(count, jnp.float32)
        after = jnp.maximum(config.floor, (total_steps - step) / max(1, total_steps - warmup))
        return config.learning_rate * jnp.where(step < warmup, step / max(1, warmup), after)

    return schedule


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
    factors = learning_rate_factors(config, params)
    links.append(optax.stateless(lambda updates, _: jax.tree.map(operator.mul, updates, factors)))
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
    """What multiplies each parameter's learning rate: layer_decay^(n + 2 − depth), and for experts.

    TASER's code with n = 12 and a decay of 0.8 has embeddings at depth 0 (0.8^14 = 0.044), layer i
    (from 0) at depth i + 1 (layer 0: 0.055, layer 11: 0.64) and everything above the layers at
    depth 14 (factor 1), a decoder that fuses documents and MPNet's relative positions too. A router
    in a layer has that layer's depth. A gate shared by all specialised blocks lies outside the
    layers and has depth 8 of 12 in TASER's code (factor 0.262), here two thirds of n.

    Args:
        config: the decay, None for none, and the experts' factor.
        params: parameters, arrays or abstract; with a decay their paths hold "layers_<i>".

    Returns:
        A tree of floats shaped as `params`.

    Raises:
        ConfigError: there is no "layers_<i>", or the parameters are a T5's, for which no paper has
            depths.
    """
    decay, names = config.layer_decay, list(leaves_by_path(params))
    numbers = [int(match[1]) for name in names if (match := _LAYER.fullmatch(name))]
    if decay is not None and (not numbers or any("token_embedder" in name for name in names)):
        problem = 'no parameter lies in a layer of BERT, "layers_<i>/..."'
        raise ConfigError(problem, where="OptimizerConfig.layer_decay", fix="set it to None")
    num_layers = max(numbers, default=0) + 1

    def factor(path: jax.tree_util.KeyPath, _: object) -> float:
        name, depth = parameter_path(path), num_layers + 2
        parts = name.split("/")
        if layer := _LAYER.fullmatch(name):
            depth = int(layer[1]) + 1
        elif "embeddings" in parts:
            depth = 0
        elif "router" in parts:
            depth = round(2 * num_layers / 3)
        layers = 1.0 if decay is None else decay ** (num_layers + 2 - depth)
        return layers * config.expert_learning_rate_factor if "experts" in parts else layers

    return jax.tree_util.tree_map_with_path(factor, params)


def _decays(path: jax.tree_util.KeyPath, _: object) -> bool:
    return parameter_path(path).split("/")[-1] not in _WITHOUT_DECAY
