"""Ranked lists joined by a weighted sum of scores: those of specialists, and dense with BM25's."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Float64, Int

from taser_jax.retrieval.runs import Run, SearchResult, top_k
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import DevelopmentSets
from taser_jax.storage.typed_files import Checked, NaturalNumber, Positive, PositiveNumber

# Queries joined at once: five lists of 1,000 have 5,000 candidates for each.
_BLOCK = 256


class ScoreNormalization(enum.Enum):
    """How each query's lists of scores are normalised before they are added.

    NONE: missing scores become the list's minimum, and nothing else changes (TASER, appendix D; Ma
    et al. as of April 2021; DPR-MUF). MIN_MAX: after that, (s - (min + max)/2) / (max - min), or 0
    where max = min (Pyserini's --normalization, since August 2021).
    """

    NONE = "none"
    MIN_MAX = "min_max"


class Weighting(enum.Enum):
    """How confidences become the weights of a query's lists.

    CONFIDENCE: w_i^γ / Σ w^γ (DPR-MUF, equation 6). EQUAL: 1/specialists, the ablation.
    """

    CONFIDENCE = "confidence"
    EQUAL = "equal"


@dataclasses.dataclass(frozen=True)
class FusionConfig(Checked):
    """How specialists' lists are fused.

    Attributes:
        depth: results used from each list; lower it where lists are long and memory is short.
        k: results to keep.
        weighting: how confidences become weights; set EQUAL for the ablation.
        power: γ, the exponent of each confidence; above 1 it sharpens the weights.
    """

    depth: Positive = 1000
    k: Positive = 1000
    weighting: Weighting = Weighting.CONFIDENCE
    power: PositiveNumber = 1.0

    def weighs(self, lists: int) -> bool:
        """Whether so many lists are weighed by confidence."""
        return lists > 1 and self.weighting is not Weighting.EQUAL


def weights_of(
    confidence: Float[np.ndarray, "queries specialists"], config: FusionConfig = FusionConfig()
) -> Float[np.ndarray, "queries specialists"]:
    """Weights of each query's lists, which add up to 1; equal ones where all confidences are 0.

    Example:
        Confidences (.9, .3) are weights (.75, .25); with γ = 2 (.9, .1).

    Args:
        confidence: w of each specialist, 0 to 1; 0 for a specialist without results.
        config: weighting and γ.
    """
    confidence = np.asarray(confidence, np.float64)
    count = confidence.shape[1]
    if config.weighting is Weighting.EQUAL:
        return np.full(confidence.shape, 1 / count)
    is_decided = confidence.max(axis=1, keepdims=True) > 0
    raw = np.where(is_decided, confidence**config.power, 1.0)
    return raw / raw.sum(axis=1, keepdims=True)


def fuse_runs(
    runs: Sequence[Run],
    alternatives: Sequence[Float[np.ndarray, "#queries lists"]],
    config: FusionConfig,
    *,
    normalization: ScoreNormalization = ScoreNormalization.NONE,
) -> list[Run]:
    """Joins lists: score = Σ_i weight_i · s_i, over the union of the lists.

    Example: weights (.75, .25), lists {7: 3, 4: 1} and {4: 6, 9: 2}: 7 gets .75·3 + .25·2 = 2.75.

    Args:
        runs: one list per specialist; the same queries, in any order.
        alternatives: weights, in the order of the first run's queries and of `runs`; several kinds
            share the union of the lists.
        config: depth and k.
        normalization: normalisation of each list's scores.

    Returns:
        A run for each of the alternatives, in the order of the first run's queries. Equal scores
        are ordered by row.

    Raises:
        DataError: the runs are not of the same queries.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), equation 6 and section 4.2; an empty list
    counts as minimum 0.
    """
    query_ids = runs[0].query_ids
    lists = [aligned(run, query_ids) for run in runs]
    rows = np.empty((len(alternatives), len(query_ids), config.k), np.int32)
    best = np.empty(rows.shape, np.float32)
    for start in range(0, len(query_ids), _BLOCK):
        lines = np.arange(start, min(start + _BLOCK, len(query_ids)))
        candidates, scores = candidate_scores(lists, lines, config, normalization=normalization)
        for place, weights in enumerate(alternatives):
            of_lines = np.broadcast_to(weights, (len(query_ids), len(lists)))[lines]
            ranked = top_k(candidates, np.einsum("qcl,ql->qc", scores, of_lines), config.k)
            rows[place, lines], best[place, lines] = ranked.rows, ranked.scores
    return [Run.of(query_ids, SearchResult(*pair)) for pair in zip(rows, best, strict=True)]


def candidate_scores(
    lists: Sequence[SearchResult],
    lines: Int[np.ndarray, " lines"],
    config: FusionConfig,
    *,
    normalization: ScoreNormalization = ScoreNormalization.NONE,
) -> tuple[Int[np.ndarray, "lines candidates"], Float[np.ndarray, "lines candidates lists"]]:
    """The union of some queries' lists, and each passage's score in every list.

    Args:
        lists: one per specialist; line i of each belongs to query i.
        lines: the queries.
        config: its depth.
        normalization: normalisation of each list's scores.

    Returns:
        Rows of passages, which may repeat, with -1 for none; and their scores.
    """
    best = [top_k(ranked.rows[lines], ranked.scores[lines], config.depth) for ranked in lists]
    candidates = np.concatenate([ranked.rows for ranked in best], axis=1)
    scores = [_filled(ranked, candidates, normalization) for ranked in best]
    return candidates, np.stack(scores, axis=2)


def aligned(run: Run, query_ids: Sequence[str]) -> SearchResult:
    """Rows and scores of `run` in the order of `query_ids`.

    Raises:
        DataError: the run is of other queries.
    """
    line_of = {query_id: line for line, query_id in enumerate(run.query_ids)}
    differing = set(query_ids) ^ line_of.keys()
    if differing or len(query_ids) != len(line_of):
        raise DataError(
            f"{len(differing)} queries are in one run only, {min(differing, default='none')!r} say",
            where="fusion",
            fix="search all runs with one query set; a query without results keeps its line",
        )
    order = np.array([line_of[query_id] for query_id in query_ids], np.int64)
    return SearchResult(run.rows[order], run.scores[order])


def _filled(
    result: SearchResult,
    candidates: Int[np.ndarray, "queries candidates"],
    normalization: ScoreNormalization,
) -> Float[np.ndarray, "queries candidates"]:
    """The list's score of each candidate row; its minimum where it lacks one (DPR-MUF, 4.2)."""
    is_result = result.rows >= 0
    some = is_result.any(axis=1, keepdims=True)
    low = np.where(is_result, result.scores, np.inf).min(axis=1, keepdims=True)
    low = np.where(some, low, 0.0).astype(np.float64)
    # One sorted array of (query, row) keys for all queries.
    span = max(int(candidates.max(initial=0)), int(result.rows.max(initial=0))) + 1
    lines = np.arange(len(candidates), dtype=np.int64)[:, None] * span
    keys, values = (lines + result.rows)[is_result], result.scores[is_result]
    order = np.argsort(keys)
    keys, values = np.append(keys[order], -1), np.append(values[order], 0.0)
    asked = np.where(candidates >= 0, lines + candidates, -2)
    place = np.searchsorted(keys[:-1], asked)
    scores = np.where(keys[place] == asked, values[place], low).astype(np.float64)
    if normalization is ScoreNormalization.MIN_MAX:
        high = np.where(is_result, result.scores, -np.inf).max(axis=1, keepdims=True)
        high = np.where(some, high, 1.0)
        spread = high - low
        scores = np.where(
            spread > 0, (scores - (low + high) / 2) / np.where(spread > 0, spread, 1.0), 0.0
        )
    return scores


# Candidates for α if the scores of both lists have the same range.
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
# The one that is taken where no query chooses.
DEFAULT_SHARE = 0.5
# Cosines in bfloat16 are rounded to 8 bits.
_LARGEST_COSINE = 1.01


class ChosenFor(enum.Enum):
    """Whether all tasks share one α (the paper), or each has one from its development queries."""

    ALL_TASKS = "all_tasks"
    EACH_TASK = "each_task"


@dataclasses.dataclass(frozen=True)
class HybridConfig(Checked):
    """Options of the fusion.

    Attributes:
        depth: results used from each list (the paper's K').
        normalization: of each list's scores; None means MIN_MAX if the dense ones are cosines, and
            NONE otherwise; set it to compare with results of one kind.
        alphas: candidates for α, the weight of the sparse scores; None takes 0.1 to 3.0 times the
            width of the dense scores over that of the sparse ones.
        tasks: tasks whose development queries choose α; empty means all.
        sets: whether tasks or queries have equal weight in that choice.
        chosen_for: one α for all tasks, or one for each.
    """

    depth: Positive = 100
    normalization: ScoreNormalization | None = None
    alphas: tuple[NaturalNumber, ...] | None = None
    tasks: tuple[str, ...] = ()
    sets: DevelopmentSets = DevelopmentSets.APART
    chosen_for: ChosenFor = ChosenFor.ALL_TASKS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alphas == ():
            raise ConfigError("alphas is ()", where="HybridConfig", fix="give one, or None")
        if self.tasks and self.chosen_for is ChosenFor.EACH_TASK:
            problem = f"tasks {', '.join(self.tasks)} choose for all, and each task for itself"
            fix = "leave HybridConfig.tasks empty, or set chosen_for to 'all_tasks'"
            raise ConfigError(problem, where="HybridConfig", fix=fix)


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
        dense_scores = (dense.scores[dense.rows >= 0] for dense, _ in lists)
        cosines = all(np.abs(scores).max(initial=0) <= _LARGEST_COSINE for scores in dense_scores)
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


def default_alpha(config: HybridConfig) -> float:
    """α without queries to choose it by: the candidate at `DEFAULT_SHARE`, or the middle one."""
    assert config.alphas is not None
    same = len(config.alphas) == len(SHARES)
    return config.alphas[SHARES.index(DEFAULT_SHARE) if same else len(config.alphas) // 2]


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
    dense: Run, sparse: Run, *, alpha: float, k: int, config: HybridConfig = HybridConfig()
) -> Run:
    """Joins both lists: score = dense + α·sparse, missing scores at the list's minimum.

    Example: dense {7: 3, 4: 1}, sparse {4: 6, 9: 2}, α = 0.5 gives 7: 3 + 0.5·2 = 4,
    4: 1 + 0.5·6 = 4, 9: 1 + 0.5·2 = 2, in the order 4, 7, 9 (equal scores by row).

    Args:
        dense: the model's run.
        sparse: BM25's; the same queries, in any order.
        alpha: weight of the sparse scores.
        k: results to keep.
        config: depth and normalisation, by default derived from these two runs.

    Returns:
        A run in the order of `dense`'s queries.

    Raises:
        DataError: the runs are not of the same queries.

    Source: TASER, arXiv 2210.05156, appendix D; Ma et al., arXiv 2104.05740; an empty list counts
    as minimum 0 as in Pyserini's HybridSearcher.
    """
    return _hybrids(dense, sparse, [alpha], k=k, config=settle(config, [(dense, sparse)]))[0]


def _hybrids(
    dense: Run, sparse: Run, alphas: Sequence[float], *, k: int, config: HybridConfig
) -> list[Run]:
    assert config.normalization is not None
    weights = [np.array([[1.0, alpha]]) for alpha in alphas]
    joined = FusionConfig(depth=config.depth, k=k)
    return fuse_runs([dense, sparse], weights, joined, normalization=config.normalization)


def choose_alpha(
    sets: Sequence[DevelopmentSet], *, k: int, config: HybridConfig = HybridConfig()
) -> AlphaChoice:
    """One α for all sets: the candidate with the highest mean, over sets or over queries.

    Args:
        sets: development data.
        k: results the fused runs keep.
        config: settings that are None are derived from all sets together.

    Raises:
        ConfigError: no development set.
    """
    if not sets:
        fix = "give one at least; α must not be chosen on test data"
        raise ConfigError("no development set", where="choose_alpha", fix=fix)
    config = settle(config, [(queries.dense, queries.sparse) for queries in sets])
    assert config.alphas is not None
    fused = [_hybrids(each.dense, each.sparse, config.alphas, k=k, config=config) for each in sets]

    def mean(runs: Sequence[Run]) -> float:
        metrics = [queries.evaluate(run) for queries, run in zip(sets, runs, strict=True)]
        if config.sets is DevelopmentSets.COMBINED:
            return float(np.concatenate(metrics).mean())
        return float(np.mean([values.mean() for values in metrics]))

    metric = tuple(map(mean, zip(*fused, strict=True)))
    best = max(metric)
    alpha = min(alpha for alpha, value in zip(config.alphas, metric, strict=True) if value == best)
    return AlphaChoice(alpha, config.alphas, metric)
