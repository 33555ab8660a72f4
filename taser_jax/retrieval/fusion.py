"""Several ranked lists joined into one by a weighted sum of scores."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from taser_jax.retrieval.runs import Run, SearchResult, top_k
from taser_jax.storage.errors import ConfigError, DataError

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
class FusionConfig:
    """How specialists' lists are fused.

    Attributes:
        depth: results used from each list.
        k: results to keep.
        weighting: how confidences become weights.
        power: γ, the exponent of each confidence; above 1 it sharpens the weights.
        normalization: normalisation of each list's scores.
    """

    depth: int = 1000
    k: int = 1000
    weighting: Weighting = Weighting.CONFIDENCE
    power: float = 1.0
    normalization: ScoreNormalization = ScoreNormalization.NONE

    def __post_init__(self) -> None:
        if self.depth < 1 or self.k < 1 or not self.power > 0:
            raise ConfigError(
                f"depth {self.depth}, k {self.k}, power {self.power}",
                where="FusionConfig",
                expected="depth and k of at least 1, a power above 0",
            )


@dataclasses.dataclass(frozen=True)
class Weights:
    """Each query's weights, which add up to 1.

    Attributes:
        values: one line per query.
        undecided: queries whose confidences are all 0; their lists weigh the same.
    """

    values: Float[np.ndarray, "queries specialists"]
    undecided: int


def weights_of(
    confidence: Float[np.ndarray, "queries specialists"], config: FusionConfig | None = None
) -> Weights:
    """Weights of each query's lists.

    Example:
        Confidences (.9, .3) are weights (.75, .25); with γ = 2 (.9, .1).

    Args:
        confidence: w of each specialist, 0 to 1; 0 for a specialist without results.
        config: weighting and γ.

    Raises:
        DataError: a confidence that is not between 0 and 1.
    """
    config = config or FusionConfig()
    confidence = np.asarray(confidence, np.float64)
    if not ((confidence >= 0) & (confidence <= 1)).all():
        line = int(np.argmin(((confidence >= 0) & (confidence <= 1)).all(axis=1)))
        raise DataError(
            f"confidences {confidence[line].tolist()} of query {line}",
            where="fusion",
            expected="numbers between 0 and 1",
            fix="compute the confidences again, from embeddings that are finite",
        )
    count = confidence.shape[1]
    if config.weighting is Weighting.EQUAL:
        return Weights(np.full(confidence.shape, 1 / count), 0)
    decided = confidence.max(axis=1) > 0
    raw = np.where(decided[:, None], confidence**config.power, 1.0)
    return Weights(raw / raw.sum(axis=1, keepdims=True), int((~decided).sum()))


def fuse_runs(
    runs: Sequence[Run],
    weights: Float[np.ndarray, "queries lists"],
    config: FusionConfig,
) -> Run:
    """Joins lists: score = Σ_i weight_i · s_i, over the union of the lists.

    Example: weights (.75, .25), lists {7: 3, 4: 1} and {4: 6, 9: 2}: 7 gets .75·3 + .25·2 = 2.75,
    4 gets .75·1 + .25·6 = 2.25, 9 gets .75·1 + .25·2 = 1.25.

    Args:
        runs: one list per specialist; the same queries, in any order.
        weights: in the order of the first run's queries and of `runs`.
        config: depth, k and normalisation.

    Returns:
        A run in the order of the first run's queries. Equal scores are ordered by row.

    Raises:
        ConfigError: no run, or a number of weights that differs from that of runs.
        DataError: the runs are not of the same queries.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), equation 6 and section 4.2; an empty list
    counts as minimum 0.
    """
    if not runs or weights.shape != (len(runs[0].query_ids), len(runs)):
        raise ConfigError(
            f"weights of shape {weights.shape} for {len(runs)} runs",
            where="fusion",
            expected="one run at least, and a weight for each query and run",
        )
    query_ids = runs[0].query_ids
    lists = [aligned(run, query_ids) for run in runs]
    parts = []
    for start in range(0, len(query_ids), _BLOCK):
        lines = np.arange(start, min(start + _BLOCK, len(query_ids)))
        candidates, scores = candidate_scores(lists, lines, config)
        total = np.einsum("qcl,ql->qc", scores, weights[lines])
        parts.append(top_k(candidates, total, config.k))
    empty = np.zeros((0, config.k))
    return Run.of(
        query_ids,
        SearchResult(
            np.concatenate([empty.astype(np.int32), *(part.rows for part in parts)]),
            np.concatenate([empty.astype(np.float32), *(part.scores for part in parts)]),
        ),
    )


def candidate_scores(
    lists: Sequence[SearchResult],
    lines: Int[np.ndarray, " lines"],
    config: FusionConfig,
) -> tuple[Int[np.ndarray, "lines candidates"], Float[np.ndarray, "lines candidates lists"]]:
    """The union of some queries' lists, and each passage's score in every list.

    Args:
        lists: one per specialist; line i of each belongs to query i.
        lines: the queries.
        config: depth and normalisation.

    Returns:
        Rows of passages, which may repeat, with -1 for none; and their scores.
    """
    best = [top_k(result.rows[lines], result.scores[lines], config.depth) for result in lists]
    candidates = np.concatenate([result.rows for result in best], axis=1)
    scores = [_filled(result, candidates, config.normalization) for result in best]
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
            expected="runs of the same queries",
            fix="search them with the same query set; a query without results keeps its line",
        )
    order = np.array([line_of[query_id] for query_id in query_ids], np.int64)
    return SearchResult(run.rows[order], run.scores[order])


def _filled(
    result: SearchResult,
    candidates: Int[np.ndarray, "queries candidates"],
    normalization: ScoreNormalization,
) -> Float[np.ndarray, "queries candidates"]:
    """The list's score of each candidate row; its minimum where it has none."""
    found = result.rows >= 0
    some = found.any(axis=1, keepdims=True)
    low = np.where(found, result.scores, np.inf).min(axis=1, keepdims=True)
    low = np.where(some, low, 0.0).astype(np.float64)
    # One sorted array of (query, row) keys for all queries.
    span = max(int(candidates.max(initial=0)), int(result.rows.max(initial=0))) + 1
    lines = np.arange(len(candidates), dtype=np.int64)[:, None] * span
    keys, values = (lines + result.rows)[found], result.scores[found]
    order = np.argsort(keys)
    keys, values = np.append(keys[order], -1), np.append(values[order], 0.0)
    wanted = np.where(candidates >= 0, lines + candidates, -2)
    place = np.searchsorted(keys[:-1], wanted)
    known = keys[place] == wanted
    scores = np.where(known, values[place], low).astype(np.float64)
    if normalization is ScoreNormalization.MIN_MAX:
        high = np.where(found, result.scores, -np.inf).max(axis=1, keepdims=True)
        high = np.where(some, high, 1.0)
        spread = high - low
        scores = np.where(
            spread > 0, (scores - (low + high) / 2) / np.where(spread > 0, spread, 1.0), 0.0
        )
    return scores
