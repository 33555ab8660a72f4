"""Runs a stack of blocks: one after another, or those that repeat in one loop, or recomputed."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from taser_jax.devices.mesh import BATCH_AXES


class Remat(enum.Enum):
    """What the backward pass recomputes: nothing, or each block from its input."""

    NONE = "none"
    BLOCK = "block"


class Scan(enum.Enum):
    """What is one loop for the compiler: nothing, or in training the blocks that repeat.

    A loop compiles in a fraction of the time and memory, and stacks the blocks' parameters and
    gradients in every step. Its dropout draws are others.
    """

    NONE = "none"
    BLOCKS = "blocks"


def by_remat(block: type[nn.Module]) -> dict[Remat, type[nn.Module]]:
    """A block's class for each choice of `Remat`.

    Blocks of one kind and shape are traced and lowered once, wherever they stand in a stack.
    """
    return {Remat.NONE: nn.jit(block), Remat.BLOCK: nn.jit(nn.remat(block))}


def layer_names(count: int) -> str:
    """Regular expression of the names of the first blocks.

    Example:
        >>> layer_names(2)
        '(layers_0|layers_1)'
    """
    return f"({'|'.join(f'layers_{i}' for i in range(count))})"


def split_over_batch(
    activations: Float[Array, "batch *features"],
) -> Float[Array, "batch *features"]:
    """Splits the first axis over the devices that share a batch, and no other axis.

    Otherwise the compiler may split activations as `fsdp` splits kernels and then exchange
    activations, which are many times larger than the kernels it would have to gather. Without a
    mesh (`jax.set_mesh`), or if the batch is not divisible, nothing changes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Inside `jax.shard_map` the rows at hand are those of one device already.
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    axes = tuple(axis for axis in BATCH_AXES if axis in free)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if parts == 1 or activations.shape[0] % parts:
        return activations
    return jax.lax.with_sharding_constraint(activations, PartitionSpec(axes))


class BlockCall(NamedTuple):
    """A block without parameters, and what it is called with after the hidden states."""

    block: nn.Module
    arguments: tuple[PyTree, ...]

    def repeats(self, other: BlockCall) -> bool:
        """Whether the calls differ in nothing but the blocks' parameters."""
        arguments = zip(self.arguments, other.arguments, strict=True)
        return self.block == other.block and all(mine is its for mine, its in arguments)


class Repetition(NamedTuple):
    """Calls from `start` on: `period` of them, repeated to be there `times` times."""

    start: int
    period: int
    times: int

    @property
    def length(self) -> int:
        """How many calls these are."""
        return self.period * self.times


def run_blocks(
    stack: nn.Module,
    first: int,
    calls: Sequence[BlockCall],
    hidden: Float[Array, "batch *shape"],
    *,
    frozen: int,
    scanned: bool,
) -> tuple[Float[Array, "batch *output"], list[PyTree]]:
    """Runs blocks, inside the compact method of a module with parameters `layers_i/...`.

    Example:
        With S S E S S E S S F the loop runs S S E twice; S, S and F follow one by one.

    Args:
        stack: the module.
        first: i of the first block.
        calls: one for each block, which returns hidden states and statistics, or None.
        hidden: input of the first block.
        frozen: i up to which blocks get no gradient, and are in no loop.
        scanned: whether blocks that repeat are one `lax.scan`.

    Returns:
        Hidden states, and what else each block that is not frozen returned.
    """
    num_frozen = min(max(frozen - first, 0), len(calls))
    statistics: list[PyTree] = []

    def run(places: range, hidden: Array) -> Array:
        for place in places:
            call = calls[place]
            block = call.block.clone(parent=stack, name=f"layers_{first + place}")
            hidden, its_statistics = block(hidden, *call.arguments)
            hidden = split_over_batch(hidden)
            statistics.append(its_statistics)
        return hidden

    if num_frozen:
        hidden = jax.lax.stop_gradient(run(range(num_frozen), hidden))
        statistics.clear()
    loop = Repetition(len(calls) - num_frozen, 0, 0)
    if scanned and not stack.is_initializing():
        loop = longest_repetition(calls[num_frozen:])
    start = num_frozen + loop.start
    hidden = run(range(num_frozen, start), hidden)
    if loop.times > 1:
        period = calls[start : start + loop.period]
        hidden, repeated = _scan(stack, first + start, period, loop.times, hidden)
        statistics.extend(repeated)
    return run(range(start + loop.length, len(calls)), hidden), statistics


def longest_repetition(calls: Sequence[BlockCall]) -> Repetition:
    """The repetition of most calls, and of these the one with the shortest period.

    Example:
        Of S S E S S E F: start 0, period 3, 2 times. Of S E F: 0 times.
    """
    longest = Repetition(len(calls), 0, 0)
    for period in range(1, len(calls) // 2 + 1):
        for start in range(len(calls) - period):
            end = start + period
            while end < len(calls) and calls[end].repeats(calls[end - period]):
                end += 1
            repetition = Repetition(start, period, (end - start) // period)
            if repetition.times > 1 and repetition.length > longest.length:
                longest = repetition
    return longest


def _scan(
    stack: nn.Module,
    first: int,
    period: Sequence[BlockCall],
    count: int,
    hidden: Float[Array, "batch *shape"],
) -> tuple[Float[Array, "batch *output"], list[PyTree]]:
    params = stack.variables["params"]
    stacked = [
        jax.tree.map(
            lambda *leaves: jnp.stack(leaves),
            *(params[f"layers_{first + place + group * len(period)}"] for group in range(count)),
        )
        for place in range(len(period))
    ]
    streams = [name for name in ("dropout", "routing") if stack.has_rng(name)]
    keys = {name: jax.random.split(stack.make_rng(name), count) for name in streams}

    def run_period(
        hidden: Array, group: tuple[list[PyTree], dict[str, Array]]
    ) -> tuple[Array, PyTree]:
        group_params, group_keys = group
        statistics = []
        for place, (block, arguments) in enumerate(period):
            rngs = {name: jax.random.fold_in(key, place) for name, key in group_keys.items()}
            variables = {"params": group_params[place]}
            hidden, its_statistics = block.apply(variables, hidden, *arguments, rngs=rngs)
            hidden = split_over_batch(hidden)
            statistics.append(its_statistics)
        return hidden, statistics

    hidden, by_place = jax.lax.scan(run_period, hidden, (stacked, keys))
    return hidden, [
        jax.tree.map(lambda leaf, group=group: leaf[group], statistics)
        for group in range(count)
        for statistics in by_place
    ]
