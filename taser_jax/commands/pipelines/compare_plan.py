"""What `taser compare` decides: lengths, steps and freezing, and which row it recommends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from taser_jax.retrieval.fusion import ScoreNormalization

_MULTIPLE = 16
# Where fewer steps fit, blocks are frozen and then the second round is dropped, to fit more.
_ENOUGH_STEPS = 100
# Where not even these fit, passages are cut. The last block alone gains less than half of them do
# in as many steps: it comes before the shortest passages.
_FEWEST_STEPS = 20
_SHORTEST = 64
_MOST_STEPS = 1000
_EPOCHS = 4
# Below this many distinct training queries pretrained weights move less: a lower rate, the lower
# half of the blocks frozen, one round.
_MANY_QUERIES = 1000
# Of all blocks of a pretrained model as wide as MiniLM; fewer blocks, or narrower ones, take more.
_RATE, _WIDTH = 7.5e-5, 384
# Vocabulary, BM25, index, searches and evaluation.
_OTHER_SECONDS = 60.0
# Estimates are short by up to a fifth: this share of a budget is planned.
_PLANNED = 0.9
# A start whose programs are compiled already takes about this share of one that compiles them.
_WARM_START = 0.5
# As many validation queries choose a row without folds, and end a training that gets no better.
ENOUGH_VALIDATION = 300
# The default α weighs as much as this many queries.
_PSEUDO_QUERIES = 30
# One query's gain among many without equals its standard error, but for this.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class FittedLength:
    """The length that a side's texts are cut to.

    Attributes:
        tokens: maximum tokens of a text, special ones included.
        cut: share of the texts that are longer.
        median: median tokens of a text before cutting.
    """

    tokens: int
    cut: float
    median: int

    def cut_to(self, tokens: int | None) -> FittedLength:
        """The lengths of texts that are cut further; None leaves them as they are."""
        return self if tokens is None else dataclasses.replace(self, tokens=tokens)


def fit_length(
    counts: Sequence[int], *, longest: int, given: int | None = None, share: float = 0.95
) -> FittedLength:
    """A percentile of texts' lengths, rounded up to 16 and at most `longest`.

    Example:
        >>> fit_length([10] * 95 + [300] * 5, longest=256).tokens
        16

    Args:
        counts: tokens of each text, special ones included.
        longest: maximum tokens that the model takes.
        given: a length to use instead.
        share: share of the texts that are not cut, where the model takes as much; 1 for pretrained
            models, which then see what they saw in pretraining.
    """
    lengths = np.asarray(counts)
    percentile = int(np.quantile(lengths, share, method="inverted_cdf"))
    tokens = min(_rounded(percentile), longest) if given is None else given
    return FittedLength(
        tokens=tokens, cut=float((lengths > tokens).mean()), median=int(np.median(lengths))
    )


def length_buckets(*sides: FittedLength) -> list[int]:
    """Lengths that batches are padded to: the median of each side, where it saves a quarter."""
    longest = max(side.tokens for side in sides)
    lengths = {_rounded(side.median) for side in sides} | {side.tokens for side in sides}
    return sorted(length for length in lengths if length <= 0.75 * longest)


def padded_length(side: FittedLength, buckets: Sequence[int]) -> float:
    """Mean length that a side's texts are padded to in training.

    Half of the texts are at most as long as the median, whose bucket is the shortest that holds it.

    Example:
        >>> padded_length(FittedLength(tokens=256, cut=0.0, median=60), [32, 64])
        160.0

    Args:
        side: the lengths of its texts.
        buckets: of `length_buckets`.
    """
    shorter = min((length for length in buckets if length >= side.median), default=side.tokens)
    return (min(shorter, side.tokens) + side.tokens) / 2


def batch_tokens(query: FittedLength, passage: FittedLength) -> float:
    """Mean tokens, padding included, of a query with its positive and its negative."""
    buckets = length_buckets(query, passage)
    return padded_length(query, buckets) + 2 * padded_length(passage, buckets)


def _rounded(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a comparison trains.

    Attributes:
        batch_size: queries per step.
        steps: steps of each training.
        learning_rate: the highest of the schedule.
        frozen_blocks: first blocks that stay as pretrained.
        rounds: 2 trains again on mined negatives.
        folds: folds of cross-validation; 0 chooses on the validation queries.
        passage_tokens: tokens that passages are cut to; None leaves them as they are.
        seconds: estimated seconds of the whole comparison, from the start of the command.
    """

    batch_size: int
    steps: int
    learning_rate: float
    frozen_blocks: int
    rounds: int
    folds: int
    passage_tokens: int | None = None
    seconds: float = math.nan


def defaults(
    queries: int,
    *,
    validation: int,
    blocks: int | None,
    width: int,
    batch_size: int,
    frozen: int | None = None,
) -> Plan:
    """Training by the number of distinct training queries, where nothing is set.

    Four epochs, within 20 to 1,000 steps, of batches that hold at most half of the queries. Below
    1,000 queries the lower half of the blocks of pretrained weights is frozen, and there is one
    round. Their rate is 7.5e-5 · min(1, sqrt(queries / 1000)) · 384/width · blocks/trained blocks.

    Args:
        queries: distinct training queries.
        validation: validation queries; enough of them choose by themselves, without folds.
        blocks: blocks of the pretrained encoder; None for random weights.
        width: its embed_dim.
        batch_size: the largest batch.
        frozen: frozen blocks, if they are set.
    """
    size = min(batch_size, 1 << max(1, (max(queries, 4) // 2).bit_length() - 1))
    steps = min(_MOST_STEPS, max(_FEWEST_STEPS, -(-_EPOCHS * queries // size)))
    folds = 5 if queries < 300 else 2
    if blocks is None or validation >= ENOUGH_VALIDATION or queries < 10:
        folds = 0
    if blocks is None:
        return Plan(size, max(steps, _ENOUGH_STEPS), 1e-3, 0, 2, folds)
    half, rounds = (blocks // 2, 1) if queries < _MANY_QUERIES else (0, 2)
    frozen = half if frozen is None else frozen
    rate = _RATE * min(1.0, (queries / _MANY_QUERIES) ** 0.5) * _WIDTH / width
    # No block that is left to train is refused where the model is made.
    rate *= blocks / max(1, blocks - frozen)
    # Two digits, as it is printed.
    return Plan(size, steps, float(f"{rate:.2g}"), frozen, rounds, folds)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured seconds, and the sizes by which they are multiplied.

    Attributes:
        step_seconds: seconds of a training step with no block frozen, without its first blocks'
            forward pass where these are frozen.
        start_seconds: seconds from a training's start to its first step.
        encode_seconds: seconds to encode all passages and queries once.
        blocks: the encoder's blocks.
        systems: number of systems that are trained.
        pretrained: whether the weights are pretrained: then they are encoded untrained, too, and
            blocks can be frozen.
        spent_seconds: seconds since the command began.
        pool_share: share of the passages that a fold's model encodes.
        validation_share: share of the passages that a training's validations encode, together.
        chunks: in how many chunks a plan's batches are encoded; more than one encodes them twice.
        shorter: tokens that passages may be cut to, longest first -> what a step and an encoding
            then cost, as shares.
    """

    step_seconds: float
    start_seconds: float
    encode_seconds: float
    blocks: int
    systems: int
    pretrained: bool
    spent_seconds: float = 0.0
    pool_share: float = 1.0
    validation_share: float = 0.0
    chunks: Callable[[Plan], int] = lambda plan: 1
    shorter: Mapping[int, float] = dataclasses.field(default_factory=dict)


def shorter_passages(query: FittedLength, passage: FittedLength) -> dict[int, float]:
    """Tokens that passages can be cut to, and the share of a batch's tokens that is then left.

    Example:
        >>> lengths = [FittedLength(size, 0.0, size) for size in (32, 256)]
        >>> {tokens: round(share, 2) for tokens, share in shorter_passages(*lengths).items()}
        {192: 0.76, 128: 0.53, 64: 0.29}

    Args:
        query: the queries' lengths.
        passage: the passages'; a query has two of them in a batch.
    """
    lengths = [_rounded(passage.tokens * quarters // 4) for quarters in (3, 2, 1)]
    return {
        tokens: batch_tokens(query, passage.cut_to(tokens)) / batch_tokens(query, passage)
        for tokens in lengths
        if _SHORTEST <= tokens < passage.tokens
    }


def plan(
    costs: Costs, preferred: Plan, *, minutes: float | None, fixed: Collection[str] = ()
) -> Plan:
    """Fits a comparison to a budget: first fewer steps, then frozen blocks, one round, two folds.

    Then passages are cut, and the last block alone is trained. Fewer blocks or steps than preferred
    take a higher rate: blocks in proportion, steps by the root, up to twice the rate.

    Frozen blocks' states are computed once, so that a step, or an encoding, costs the share of the
    other blocks.

    Args:
        costs: this comparison's costs.
        preferred: how to train where time allows.
        minutes: the budget; None sets no limit.
        fixed: fields of the plan that are set: these stay as preferred.

    Returns:
        The plan; its seconds exceed the budget where not even the shortest plan fits.
    """
    if minutes is None:
        return _timed(costs, preferred, preferred.steps)
    half, last = (costs.blocks // 2, costs.blocks - 1) if costs.pretrained else (0, 0)
    fixed_steps = preferred.steps if "steps" in fixed else 0
    enough_steps, fewest = max(_ENOUGH_STEPS, fixed_steps), max(_FEWEST_STEPS, fixed_steps)
    cuts = [(fewest, {"passage_tokens": tokens}) for tokens in costs.shorter]
    changes: list[tuple[int, dict[str, int]]] = [
        (enough_steps, {}),
        (enough_steps, {"frozen_blocks": max(half, preferred.frozen_blocks)}),
        (enough_steps, {"rounds": 1}),
        (enough_steps, {"folds": min(preferred.folds, 2)}),
        (fewest, {}),
        *cuts[:-1],
        (fewest, {"frozen_blocks": max(last, preferred.frozen_blocks)}),
        *cuts[-1:],
    ]
    changed = preferred
    for enough, change in changes:
        if change.keys() & set(fixed):
            continue
        changed = dataclasses.replace(changed, **change)
        without = _timed(costs, changed, 0).seconds
        of_a_step = _timed(costs, changed, 1).seconds - without
        fitting = int((60 * _PLANNED * minutes - without) / of_a_step)
        if fitting >= min(preferred.steps, enough):
            break
    steps = min(max(fitting, fewest), preferred.steps)
    if "learning_rate" not in fixed:
        preferred_blocks, blocks = (
            max(1, costs.blocks - each.frozen_blocks) for each in (preferred, changed)
        )
        longer = min(2.0, math.sqrt(preferred.steps / steps))
        rate = preferred.learning_rate * longer * preferred_blocks / blocks
        changed = dataclasses.replace(changed, learning_rate=float(f"{rate:.2g}"))
    return _timed(costs, changed, steps)


def _timed(costs: Costs, plan: Plan, steps: int) -> Plan:
    """The plan with so many steps, and the seconds that it then takes."""
    frozen_share = plan.frozen_blocks / costs.blocks
    trained = 1 - frozen_share
    tokens = 1.0 if plan.passage_tokens is None else costs.shorter[plan.passage_tokens]
    trainings = costs.systems * (plan.rounds + plan.folds)
    # A fold's training has the steps of its share of the queries: all but one fold's.
    all_steps = steps * costs.systems * (plan.rounds + max(0, plan.folds - 1))
    # The frozen blocks' states are computed once, for the untrained model, too.
    encodings = frozen_share + trained * (
        costs.systems * (plan.rounds + plan.folds * costs.pool_share)
        + costs.pretrained
        + trainings * costs.validation_share
    )
    # Forward once, or twice, and backward for twice that.
    passes = 3 if costs.chunks(plan) == 1 else 4
    # What a system's first training compiles, its later ones read.
    starts = costs.systems + _WARM_START * (trainings - costs.systems)
    seconds = (
        costs.spent_seconds
        + _OTHER_SECONDS
        + starts * costs.start_seconds
        + all_steps * tokens * costs.step_seconds * trained * passes / 3
        + encodings * tokens * costs.encode_seconds
    )
    return dataclasses.replace(plan, steps=steps, seconds=seconds)


class Gain(NamedTuple):
    """A candidate's mean gain over the baseline on the same queries.

    Attributes:
        mean: mean over tasks of the mean difference over their queries.
        error: its standard error; infinite where a task has one query.
    """

    mean: float
    error: float


def paired_gain(
    values: Mapping[str, Float64[np.ndarray, " queries"]],
    baseline: Mapping[str, Float64[np.ndarray, " queries"]],
) -> Gain:
    """Mean over tasks of the differences, error = sqrt(sum_t s_t^2 / n_t) / tasks.

    Example:
        >>> paired_gain({"a": np.array([1.0, 0.5])}, {"a": np.array([0.0, 0.5])})
        Gain(mean=0.5, error=0.5)

    Args:
        values: task -> a candidate's measure by query.
        baseline: the baseline's, of the same tasks and queries.
    """
    differences = [values[task] - baseline[task] for task in baseline]
    mean = float(np.mean([each.mean() for each in differences]))
    if any(len(each) < 2 for each in differences):
        return Gain(mean, math.inf)
    variances = [float(each.var(ddof=1)) / len(each) for each in differences]
    return Gain(mean, math.sqrt(math.fsum(variances)) / len(differences))


def recommend(gains: Mapping[str, Gain], baseline: str) -> str:
    """The candidate whose gain less one standard error is highest, if that is above zero.

    One error of doubt counts against training, none against the baseline: a choice among several
    candidates by few queries otherwise takes the luckiest.

    Example:
        >>> recommend({"trained": Gain(0.02, 0.03), "hybrid": Gain(0.02, 0.01)}, "untrained")
        'hybrid'

    Args:
        gains: candidate -> its gain over the baseline.
        baseline: what is recommended where nothing is better.
    """
    leads = {name: gain.mean - gain.error for name, gain in gains.items()}
    best = max(leads, key=leads.__getitem__, default=baseline)
    return best if leads.get(best, 0.0) > _ROUNDING else baseline


def shrunk_alpha(best: float, *, default: float, queries: int) -> float:
    """Shrinks α to the default: log α = (n log best + 30 log default)/(n + 30), or 0 if one is 0.

    Example:
        >>> shrunk_alpha(2.0, default=0.5, queries=30)
        1.0

    Args:
        best: the queries' choice.
        default: α without queries; it weighs as much as 30 of them.
        queries: n, how many chose.
    """
    if not best or not default:
        return 0.0
    share = queries / (queries + _PSEUDO_QUERIES)
    return math.exp(share * math.log(best) + (1 - share) * math.log(default))


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is recommended, and why.

    Attributes:
        row: the candidate.
        alphas: dense candidate -> α of its hybrid.
        gains: candidate -> its gain over the baseline, in the measure's units.
        queries: number of queries that decided.
        normalizations: dense candidate -> of the lists that its α was chosen for.
    """

    row: str
    alphas: Mapping[str, float]
    gains: Mapping[str, Gain]
    queries: int
    normalizations: Mapping[str, ScoreNormalization | None] = dataclasses.field(
        default_factory=dict
    )
