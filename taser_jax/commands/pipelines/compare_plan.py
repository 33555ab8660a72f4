"""What `taser compare` decides from the data and from measured steps: lengths, steps, freezing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_SHARE = 0.95
_MULTIPLE = 16
# Where fewer steps fit, blocks are frozen and then the second round is dropped, to fit more.
_ENOUGH_STEPS = 100
_FEWEST_STEPS = 20
# Vocabulary, BM25, index, searches and evaluation.
_OTHER_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class FittedLength:
    """The length that a side's texts are cut to.

    Attributes:
        tokens: maximum tokens of a text, special ones included.
        cut: share of the texts that are longer.
        mean: mean tokens of a text after cutting.
        median: median tokens of a text before cutting.
    """

    tokens: int
    cut: float
    mean: float
    median: int


def fit_length(counts: Sequence[int], *, longest: int, given: int | None = None) -> FittedLength:
    """The 95th percentile of texts' lengths, rounded up to 16 and at most `longest`.

    Example:
        >>> fit_length([10] * 95 + [300] * 5, longest=256).tokens
        16

    Args:
        counts: tokens of each text, special ones included.
        longest: maximum tokens that the model takes.
        given: a length to use instead.
    """
    found = np.asarray(counts)
    wanted = int(np.quantile(found, _SHARE, method="inverted_cdf"))
    tokens = given or min(_rounded(wanted), longest)
    return FittedLength(
        tokens=tokens,
        cut=float((found > tokens).mean()),
        mean=float(np.minimum(found, tokens).mean()),
        median=int(np.median(found)),
    )


def length_buckets(*sides: FittedLength) -> list[int]:
    """Lengths that batches are padded to: the median of each side, where it saves a quarter."""
    longest = max(side.tokens for side in sides)
    wanted = {_rounded(side.median) for side in sides} | {side.tokens for side in sides}
    return sorted(length for length in wanted if length <= 0.75 * longest)


def padded_length(side: FittedLength, buckets: Sequence[int]) -> float:
    """Mean length that a side's texts are padded to in training.

    Half of the texts are at most as long as the median, whose bucket is the shortest that holds it.

    Example:
        >>> padded_length(FittedLength(tokens=256, cut=0.0, mean=90.0, median=60), [32, 64])
        160.0

    Args:
        side: the lengths of its texts.
        buckets: of `length_buckets`.
    """
    shorter = min((length for length in buckets if length >= side.median), default=side.tokens)
    return (min(shorter, side.tokens) + side.tokens) / 2


def _rounded(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


def default_steps(queries: int, batch_size: int) -> int:
    """Three epochs, within 100 to 1,000 steps."""
    return min(1000, max(_ENOUGH_STEPS, -(-3 * queries // batch_size)))


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured seconds, and the sizes by which they are multiplied.

    Attributes:
        step_seconds: seconds of a training step with no block frozen.
        start_seconds: seconds from a training's start to its first step.
        encode_seconds: seconds to encode all passages and queries once.
        blocks: the encoder's blocks.
        systems: number of systems that are trained.
        untrained: whether the untrained pretrained model is encoded, too.
    """

    step_seconds: float
    start_seconds: float
    encode_seconds: float
    blocks: int
    systems: int
    untrained: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long the comparison trains.

    Attributes:
        steps: steps of each training.
        frozen_blocks: number of the encoder's first blocks that stay as pretrained.
        rounds: 2 trains again on mined negatives.
        seconds: estimated seconds of the whole comparison.
    """

    steps: int
    frozen_blocks: int
    rounds: int
    seconds: float


def plan(costs: Costs, *, steps: int, minutes: float | None, pretrained: bool) -> Plan:
    """Fits a comparison to a budget: first fewer steps, then frozen blocks, then one round.

    Frozen blocks' states are computed once, so that a step, or an encoding, costs the share of the
    other blocks.

    Args:
        costs: this comparison's costs.
        steps: steps of each training, where time allows.
        minutes: the budget; None sets no limit.
        pretrained: whether the weights are pretrained: blocks of random weights are not frozen.

    Returns:
        The plan; its seconds exceed the budget where not even the shortest plan fits.
    """
    half = costs.blocks // 2 if pretrained else 0
    options = [(2, 0), *([(2, half)] if half else []), (1, half)]
    if minutes is None:
        return _estimated(costs, steps, 0, 2)
    for rounds, frozen in options:
        fixed = _estimated(costs, 0, frozen, rounds).seconds
        each = _estimated(costs, 1, frozen, rounds).seconds - fixed
        fitting = int((60 * minutes - fixed) / each)
        if fitting >= min(steps, _ENOUGH_STEPS):
            return _estimated(costs, min(fitting, steps), frozen, rounds)
    rounds, frozen = options[-1]
    return _estimated(costs, max(min(fitting, steps), _FEWEST_STEPS), frozen, rounds)


def _estimated(costs: Costs, steps: int, frozen: int, rounds: int) -> Plan:
    kept = frozen / costs.blocks
    trained = 1 - kept
    trainings = costs.systems * rounds
    # The frozen blocks' states are computed once, for the untrained model, too.
    encodings = kept + trained * (trainings + costs.untrained)
    seconds = (
        _OTHER_SECONDS
        + trainings * (costs.start_seconds + steps * costs.step_seconds * trained)
        + encodings * costs.encode_seconds
    )
    return Plan(steps, frozen, rounds, seconds)
