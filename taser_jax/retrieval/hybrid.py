"""Hybrid search: dense and sparse lists joined into one by a weighted sum of scores."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

from taser_jax.errors import ConfigError
from taser_jax.records import DevelopmentSets
from taser_jax.retrieval.fusion import FusionConfig, ScoreNormalization, fuse_runs
from taser_jax.retrieval.runs import Run

ALPHAS = tuple(round(0.1 * step, 1) for step in range(5, 21))


class ChosenFor(enum.Enum):
    """What one α is for: all tasks (the paper), or each task by its own development queries."""

    ALL_TASKS = "all_tasks"
    EACH_TASK = "each_task"


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Options of the fusion.

    Attributes:
        depth: results used from each list (the paper's K').
        normalization: of each list's scores.
        alphas: candidates for α, the weight of the sparse scores.
        tasks: tasks whose development queries choose α; empty means all.
        sets: whether tasks or queries have equal weight in that choice.
        chosen_for: one α for all tasks, or one for each.
    """

    depth: int = 100
    normalization: ScoreNormalization = ScoreNormalization.NONE
    alphas: tuple[float, ...] = ALPHAS
    tasks: tuple[str, ...] = ()
    sets: DevelopmentSets = DevelopmentSets.APART
    chosen_for: ChosenFor = ChosenFor.ALL_TASKS

    def __post_init__(self) -> None:
        if self.depth < 1 or not self.alphas:
            raise ConfigError(
                f"depth {self.depth}, {len(self.alphas)} alphas",
                where="HybridConfig",
                expected="a depth and a number of alphas of at least 1",
            )
        if self.tasks and self.chosen_for is ChosenFor.EACH_TASK:
            raise ConfigError(
                f"tasks {', '.join(self.tasks)} and an alpha for each task",
                where="HybridConfig",
                expected="some tasks that choose for all, or each task for itself",
                fix="leave HybridConfig.tasks empty, or set chosen_for to 'all_tasks'",
            )


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
        config: depth and normalisation.

    Returns:
        A run in the order of `dense`'s queries.

    Raises:
        DataError: the runs are not of the same queries.

    Source: TASER, arXiv 2210.05156, appendix D; Ma et al., arXiv 2104.05740; an empty list counts
    as minimum 0 as in Pyserini's HybridSearcher.
    """
    config = config or HybridConfig()
    joined = FusionConfig(depth=config.depth, k=k, normalization=config.normalization)
    weights = np.broadcast_to(np.array([1.0, alpha]), (len(dense.query_ids), 2))
    return fuse_runs([dense, sparse], weights, joined)


def choose_alpha(
    sets: Sequence[DevelopmentSet], *, k: int, config: HybridConfig | None = None
) -> AlphaChoice:
    """One α for all sets: the candidate with the highest mean, over sets or over queries.

    Args:
        sets: development data.
        k: results the fused runs keep.
        config: depth, normalisation, candidates, and what the mean is over.

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
