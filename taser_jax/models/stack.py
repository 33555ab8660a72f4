"""Runs a stack of blocks: one after another, or those that repeat in one loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from taser_jax.models.layers import split_over_batch


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
