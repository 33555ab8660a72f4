"""The Bayesian oracle: weights of each query's lists that put a relevant passage first.

DPR-MUF's table 3 (Li et al., Findings of EMNLP 2021, section 6.2) searches each question's weights
with scikit-optimize, one question after the other. Here the same search, a Gaussian process with
expected improvement, runs for many questions at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from taser_jax.commands.evaluate import EvaluationConfig, Judge
from taser_jax.commands.inputs import answer_matcher
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.retrieval.fusion import FusionConfig, aligned, candidate_scores
from taser_jax.retrieval.runs import Run, among
from taser_jax.storage.errors import ConfigError
from taser_jax.training.state import named_key

_BLOCK = 256
# Passages of each list that are judged; those further down count as not relevant.
_DEPTH = 100
# Weights among which expected improvement chooses in each step.
_CANDIDATES = 128
# Of the Matérn kernel; each step takes the most likely one.
_LENGTH_SCALES = (0.1, 0.3, 1.0)
# Added to the variance of each observation: two equal points would make the matrix singular.
_NOISE = 1e-6
# The least improvement over the best point that is sought (scikit-optimize's ξ).
_MARGIN = 0.01


@dataclasses.dataclass(frozen=True)
class BayesianConfig:
    """How long the oracle searches; less takes less time and finds worse weights.

    Attributes:
        evaluations: number of weights tried for each query, random ones included.
        initial: number of random weights tried before the Gaussian process chooses.
    """

    evaluations: int = 50
    initial: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.initial < self.evaluations:
            problem = f"{self.initial} of {self.evaluations} evaluations are random"
            fix = "set fewer random ones than evaluations"
            raise ConfigError(problem, where="BayesianConfig", fix=fix)


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
        search: number of evaluations.
        evaluation: the criterion for hits.

    Source: DPR-MUF, section 6.2; it names no objective.
    """
    ids = runs[0].query_ids
    lists = [aligned(run, ids) for run in runs]
    query_of = {query.id: query for query in queries}
    weights = np.zeros((len(ids), len(runs)))
    first = np.arange(min(_DEPTH, config.depth))
    columns = np.concatenate([i * config.depth + first for i in range(len(runs))])
    matcher = answer_matcher(store, queries.task, evaluation.regex_tasks)
    for start in range(0, len(ids), _BLOCK):
        # The last block is padded, so that all blocks share one compiled program.
        lines = np.minimum(np.arange(start, start + _BLOCK), len(ids) - 1)
        rows, scores = candidate_scores(lists, lines, config)
        order = np.argsort(rows[:, columns], axis=1, kind="stable")
        rows = np.take_along_axis(rows[:, columns], order, axis=1)
        scores = np.take_along_axis(scores[:, columns], order[:, :, None], axis=1)
        exists = rows >= 0
        exists[:, 1:] &= rows[:, 1:] != rows[:, :-1]
        block = [query_of[ids[line]] for line in lines]
        if evaluation.judge_of(queries.task) is Judge.ANSWERS:
            hits = matcher.hits(rows, [query.answers for query in block])
        else:
            hits = among(rows, [query.positives for query in block])
        own_alone = np.eye(len(runs), dtype=np.float32)[own]
        best = best_weights(
            scores.astype(np.float32), exists, hits, own_alone, first=start, config=search
        )
        weights[start : start + _BLOCK] = np.asarray(best)[: len(ids) - start]
    return weights


@functools.partial(jax.jit, static_argnames="config")
def best_weights(
    scores: Float[Array, "queries candidates lists"],
    exists: Bool[Array, "queries candidates"],
    hits: Bool[Array, "queries candidates"],
    start: Float[Array, " lists"],
    *,
    first: int | Int[Array, ""] = 0,
    config: BayesianConfig = BayesianConfig(),
) -> Float[Array, "queries lists"]:
    """The best weights of each query that were tried, on the simplex.

    Args:
        scores: score of each candidate passage in each list.
        exists: whether there is a candidate.
        hits: whether it is relevant.
        start: the weights that are tried first; they win ties.
        first: number of the first query; draws depend on a query's number.
        config: how long to search.

    Returns:
        Each query's weights; `start` where no candidate is relevant.
    """

    def search(number: Array, *judged: Array) -> Array:
        key = jax.random.fold_in(named_key(0, "oracle"), number)
        drawn = jax.random.dirichlet(
            jax.random.fold_in(key, 0), jnp.ones(len(start)), (config.initial,)
        )
        tried = jnp.zeros((config.evaluations, len(start)))
        tried = tried.at[0].set(start).at[1 : config.initial + 1].set(drawn)
        values = jax.vmap(lambda weights: reciprocal_rank(weights, *judged))(tried)

        def step(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            tried, values = state
            weights = _proposed(jax.random.fold_in(key, number), tried, values, number)
            value = reciprocal_rank(weights, *judged)
            return tried.at[number].set(weights), values.at[number].set(value)

        state = (tried, values)
        tried, values = jax.lax.fori_loop(config.initial + 1, config.evaluations, step, state)
        return tried[values.argmax()]

    return jax.vmap(search)(first + jnp.arange(len(scores)), scores, exists, hits)


def reciprocal_rank(
    weights: Float[Array, " lists"],
    scores: Float[Array, "candidates lists"],
    exists: Bool[Array, " candidates"],
    hits: Bool[Array, " candidates"],
) -> Float[Array, ""]:
    """1 / rank of the first hit by the weighted sum of scores; 0 without a hit.

    Among equal scores the earlier candidate comes first.
    """
    total = jnp.where(exists, scores @ weights, -jnp.inf)
    of_hits = jnp.where(hits & exists, total, -jnp.inf)
    best, place = of_hits.max(), of_hits.argmax()
    before = (total > best) | ((total == best) & (jnp.arange(len(total)) < place))
    return jnp.where(jnp.isfinite(best), 1.0 / (1.0 + before.sum()), 0.0)


def posterior(
    tried: Float[Array, "points lists"],
    values: Float[Array, " points"],
    is_tried: Bool[Array, " points"],
    candidates: Float[Array, "candidates lists"],
    length_scale: Float[Array, ""],
) -> tuple[Float[Array, " candidates"], Float[Array, " candidates"], Float[Array, ""]]:
    """Mean and standard deviation of a Gaussian process, and the log likelihood of its points.

    The covariance is Matérn's with ν = 5/2: (1 + d + d²/3) exp(-d), d = √5 |x - y| / length.
    Points that are not tried yet count as independent ones of value 0, which change nothing.

    Source: Rasmussen and Williams 2006, algorithm 2.1.
    """
    both = is_tried[:, None] & is_tried[None, :]
    covariance = jnp.where(both, _matern(tried, tried, length_scale), 0.0)
    factor = jnp.linalg.cholesky(covariance + jnp.diag(jnp.where(is_tried, _NOISE, 1.0)))
    values = jnp.where(is_tried, values, 0.0)
    solved = jax.scipy.linalg.cho_solve((factor, True), values)
    cross = jnp.where(is_tried[:, None], _matern(tried, candidates, length_scale), 0.0)
    reduced = jax.scipy.linalg.solve_triangular(factor, cross, lower=True)
    variance = jnp.maximum(1.0 - (reduced**2).sum(axis=0), 1e-12)
    likelihood = -0.5 * values @ solved - jnp.log(jnp.diagonal(factor)).sum()
    likelihood = likelihood - 0.5 * is_tried.sum() * math.log(2 * math.pi)
    return solved @ cross, jnp.sqrt(variance), likelihood


def expected_improvement(
    mean: Float[Array, " candidates"],
    deviation: Float[Array, " candidates"],
    best: Float[Array, ""],
) -> Float[Array, " candidates"]:
    """E[max(0, f - best - ξ)] of a normal f.

    Source: Jones et al. 1998, equation 15.
    """
    gain = mean - best - _MARGIN
    z = gain / deviation
    return gain * jax.scipy.stats.norm.cdf(z) + deviation * jax.scipy.stats.norm.pdf(z)


def _matern(
    first: Float[Array, "m lists"], second: Float[Array, "n lists"], length_scale: Float[Array, ""]
) -> Float[Array, "m n"]:
    squared = ((first[:, None] - second[None, :]) ** 2).sum(axis=-1)
    distance = jnp.sqrt(5.0 * squared) / length_scale
    return (1.0 + distance + distance**2 / 3.0) * jnp.exp(-distance)


def _proposed(
    key: PRNGKeyArray,
    tried: Float[Array, "points lists"],
    values: Float[Array, " points"],
    count: Array,
) -> Float[Array, " lists"]:
    """The candidate with the highest expected improvement; half are drawn near the best weights."""
    is_tried = jnp.arange(len(values)) < count
    best = jnp.where(is_tried, values, -jnp.inf).argmax()
    wide, share = jax.random.split(key)
    drawn = jax.random.dirichlet(wide, jnp.ones(tried.shape[1]), (_CANDIDATES,))
    half = _CANDIDATES // 2
    near = jax.random.uniform(share, (half, 1), maxval=0.3)
    local = (1.0 - near) * tried[best] + near * drawn[:half]
    candidates = jnp.concatenate([local, drawn[half:]])
    mean = (values * is_tried).sum() / count
    deviation = jnp.sqrt((((values - mean) * is_tried) ** 2).sum() / count)
    scaled = (values - mean) / jnp.where(deviation > 0, deviation, 1.0)
    means, deviations, likelihoods = jax.vmap(
        lambda length: posterior(tried, scaled, is_tried, candidates, length)
    )(jnp.asarray(_LENGTH_SCALES))
    likely = likelihoods.argmax()
    gain = expected_improvement(means[likely], deviations[likely], scaled[best])
    return candidates[gain.argmax()]
