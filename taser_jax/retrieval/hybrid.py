"""Hybrid search: dense and sparse lists joined into one by a weighted sum of scores."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

from taser_jax.retrieval.fusion import FusionConfig, ScoreNormalization, fuse_runs
from taser_jax.retrieval.runs import Run
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import DevelopmentSets

# Candidates for α if the scores of both lists have the same range.
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
# Cosines in bfloat16 are rounded to 8 bits.
_LARGEST_COSINE = 1.01


class ChosenFor(enum.Enum):
    """Whether all tasks share one α (the paper), or each has one from its development queries."""

    ALL_TASKS = "all_tasks"
    EACH_TASK = "each_task"


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Options of the fusion.

    Attributes:
        depth: results used from each list (the paper's K').
        normalization: normalisation of each list's scores; None means MIN_MAX if the dense ones are
            cosines, which are small compared with BM25's scores, and NONE otherwise.
        alphas: candidates for α, the weight of the sparse scores; None takes 0.1 to 3.0 times the
            width of the dense scores over that of the sparse ones.
        tasks: tasks whose development queries choose α; empty means all.
        sets: whether tasks or queries have equal weight in that choice.
        chosen_for: one α for all tasks, or one for each.
    """

    depth: int = 100
    normalization: ScoreNormalization | None = None
    alphas: tuple[float, ...] | None = None
    tasks: tuple[str, ...] = ()
    sets: DevelopmentSets = DevelopmentSets.APART
    chosen_for: ChosenFor = ChosenFor.ALL_TASKS

    def __post_init__(self) -> None:
        if self.depth < 1 or self.alphas == ():
            raise ConfigError(
                f"depth {self.depth}, alphas {self.alphas}",
                where="HybridConfig",
                expected="a depth of at least 1, and one alpha or more",
            )
        if self.tasks and self.chosen_for is ChosenFor.EACH_TASK:
            raise ConfigError(
                f"tasks {', '.join(self.tasks)} and an alpha for each task",
                where="HybridConfig",
                expected="some tasks that choose for all, or each task for itself",
                fix="leave HybridConfig.tasks empty, or set chosen_for to 'all_tasks'",
            )


def settle(config: HybridConfig, lists: Sequence[tuple[Run, Run]]) -> HybridConfig:
    """Fills in what the configuration derives from the scores: normalisation, candidates for α.

    Example:
        Dense scores from -0.2 to 0.9 are cosines: MIN_MAX, and α from 0.1 to 3.0. If they range
        over 20 per query and BM25's over 10, α is one of 0.2, 0.4, ... 6.0.

    Args:
        config: its `depth` limits the ranks whose scores count.
        lists: dense and sparse run of each set.

    Returns:
        The configuration, complete.
    """
    normalization, alphas = config.normalization, config.alphas
    if normalization is None:
        found = [dense.scores[dense.rows >= 0] for dense, _ in lists]
        cosines = all(np.abs(scores).max(initial=0) <= _LARGEST_COSINE for scores in found)
        normalization = ScoreNormalization.MIN_MAX if cosines else ScoreNormalization.NONE
    if alphas is None:
        ratio = 1.0
        if normalization is ScoreNormalization.NONE:
            dense, sparse = (
                np.mean(np.concatenate([_widths(pair[side], config.depth) for pair in lists]))
                for side in (0, 1)
            )
            ratio = dense / sparse if dense > 0 and sparse > 0 else 1.0
        alphas = tuple(float(f"{share * ratio:.2g}") for share in SHARES)
    return dataclasses.replace(config, normalization=normalization, alphas=alphas)


def _widths(run: Run, depth: int) -> Float64[np.ndarray, " queries"]:
    """Highest minus lowest score of each query's list, 0 for an empty one."""
    rows, scores = run.rows[:, :depth], run.scores[:, :depth].astype(np.float64)
    high = np.where(rows >= 0, scores, -np.inf).max(axis=1, initial=-np.inf)
    low = np.where(rows >= 0, scores, np.inf).min(axis=1, initial=np.inf)
    return np.where(np.isfinite(high), high - low, 0.0)


@dataclasses.dataclass(frozen=True)
class DevelopmentSet:
    """One set's runs and the metric to maximise.

    Attributes:
        dense: the model's run.
        sparse: BM25's run of the same queries.
        evaluate: run -> metric of each query, higher is better.
    """

    dense: Run
    sparse: Run
    evaluate: Callable[[Run], Float64[np.ndarray, " queries"]]


@dataclasses.dataclass(frozen=True)
class AlphaChoice:
    """The chosen α and the curve it was chosen from.

    Attributes:
        alpha: the best, the smallest among equals.
        metric: mean of each candidate, in the order of `alphas`.
        alphas: the candidates.
    """

    alpha: float
    alphas: tuple[float, ...]
    metric: tuple[float, ...]


def fuse(
    dense: Run, sparse: Run, *, alpha: float, k: int, config: HybridConfig | None = None
) -> Run:
    """Joins both lists: score = dense + α·sparse, missing scores at the list's minimum.

    Example: dense {7: 3, 4: 1}, sparse {4: 6, 9: 2}, α = 0.5 gives 7: 3 + 0.5·2 = 4,
    4: 1 + 0.5·6 = 4, 9: 1 + 0.5·2 = 2, in the order 4, 7, 9 (equal scores by row).

    Args:
        dense: the model's run.
        sparse: BM25's run; the same queries, in any order.
        alpha: weight of the sparse scores.
        k: results to keep.
        config: depth and normalisation; None derives the normalisation from these two runs.

    Returns:
        A run in the order of `dense`'s queries.

    Raises:
        DataError: the runs are not of the same queries.

    Source: TASER, arXiv 2210.05156, appendix D; Ma et al., arXiv 2104.05740; an empty list counts
    as minimum 0 as in Pyserini's HybridSearcher.
    """
    settled = settle(config or HybridConfig(), [(dense, sparse)])
    assert settled.normalization is not None
    joined = FusionConfig(depth=settled.depth, k=k, normalization=settled.normalization)
    weights = np.broadcast_to(np.array([1.0, alpha]), (len(dense.query_ids), 2))
    return fuse_runs([dense, sparse], weights, joined)


def choose_alpha(
    sets: Sequence[DevelopmentSet], *, k: int, config: HybridConfig | None = None
) -> AlphaChoice:
    """One α for all sets: the candidate with the highest mean, over sets or over queries.

    Args:
        sets: development data.
        k: results the fused runs keep.
        config: depth, normalisation, candidates, and what the mean is over; settings that are None
            are derived from all sets together.

    Raises:
        ConfigError: no development set.
    """
    config = config or HybridConfig()
    if not sets:
        raise ConfigError(
            "no development set",
            where="choose_alpha",
            expected="at least one; α must not be chosen on test data",
        )
    config = settle(config, [(one.dense, one.sparse) for one in sets])
    assert config.alphas is not None

    def mean(alpha: float) -> float:
        found = [
            one.evaluate(fuse(one.dense, one.sparse, alpha=alpha, k=k, config=config))
            for one in sets
        ]
        if config.sets is DevelopmentSets.COMBINED:
            return float(np.concatenate(found).mean())
        return float(np.mean([values.mean() for values in found]))

    metric = tuple(map(mean, config.alphas))
    best = max(metric)
    alpha = min(alpha for alpha, value in zip(config.alphas, metric, strict=True) if value == best)
    return AlphaChoice(alpha, config.alphas, metric)
