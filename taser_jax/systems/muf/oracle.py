"""The Bayesian oracle: weights of specialists' lists that put a relevant passage first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from taser_jax.commands.evaluate import EvaluationConfig, Judge
from taser_jax.commands.inputs import answer_matcher
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.retrieval.fusion import FusionConfig, aligned, candidate_scores
from taser_jax.retrieval.runs import Run
from taser_jax.systems.muf.bayesian import BayesianConfig, best_weights

_BLOCK = 256
# Passages of each list that are judged; those further down count as not relevant.
_DEPTH = 100


def oracle_weights(
    runs: Sequence[Run],
    queries: QuerySet,
    store: PassageStore,
    *,
    own: int,
    config: FusionConfig,
    search: BayesianConfig,
    evaluation: EvaluationConfig,
) -> Float[np.ndarray, "queries lists"]:
    """Each query's weights by Bayesian optimisation of its first hit's reciprocal rank.

    Args:
        runs: one run per specialist.
        queries: the queries, with their answers or positives.
        store: the collection.
        own: number of the task's own specialist; the search starts from its list alone.
        config: how lists are joined.
        search: number of evaluations and candidates.
        evaluation: the criterion for hits.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), section 6.2; it names no objective.
    """
    ids = runs[0].query_ids
    lists = [aligned(run, ids) for run in runs]
    known = {query.id: query for query in queries}
    found = np.zeros((len(ids), len(runs)))
    depth = min(config.depth, lists[0].rows.shape[1])
    columns = np.concatenate([i * depth + np.arange(min(_DEPTH, depth)) for i in range(len(runs))])
    with answer_matcher(store, evaluation.match_of(queries.task)) as matcher:
        for start in range(0, len(ids), _BLOCK):
            # The last block is padded, so that all blocks share one compiled program.
            lines = np.minimum(np.arange(start, start + _BLOCK), len(ids) - 1)
            rows, scores = candidate_scores(lists, lines, config)
            order = np.argsort(rows[:, columns], axis=1, kind="stable")
            rows = np.take_along_axis(rows[:, columns], order, axis=1)
            scores = np.take_along_axis(scores[:, columns], order[:, :, None], axis=1)
            exists = rows >= 0
            exists[:, 1:] &= rows[:, 1:] != rows[:, :-1]
            asked = [known[ids[line]] for line in lines]
            if evaluation.judge_of(queries.task) is Judge.ANSWERS:
                hits = matcher.hits(rows, [query.answers for query in asked])
            else:
                hits = _positives(rows, [query.positives for query in asked])
            weights = best_weights(
                scores.astype(np.float32),
                exists,
                hits,
                np.eye(len(runs))[own],
                first=start,
                config=search,
            )
            found[start : start + _BLOCK] = weights[: len(ids) - start]
    return found


def _positives(
    rows: Int[np.ndarray, "queries candidates"], positives: Sequence[Sequence[int]]
) -> Bool[np.ndarray, "queries candidates"]:
    return np.stack([np.isin(line, known) for line, known in zip(rows, positives, strict=True)])
