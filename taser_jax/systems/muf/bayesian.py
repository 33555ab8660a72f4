"""The best weights of each query's lists, searched for by Bayesian optimisation: an oracle.

DPR-MUF's table 3 (Li et al., Findings of EMNLP 2021, section 6.2) searches each question's weights
with scikit-optimize, one question after the other. Here the same search, a Gaussian process with
expected improvement, runs for many questions at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from taser_jax.storage.errors import ConfigError

# Added to the variance of each observation: two equal points would make the matrix singular.
_NOISE = 1e-6
# The least improvement over the best point that is sought (scikit-optimize's ξ).
_MARGIN = 0.01


@dataclasses.dataclass(frozen=True)
class BayesianConfig:
    """Settings of the search for weights.

    Attributes:
        evaluations: number of weights tried for each query, initial ones included.
        initial: number of random weights tried before the Gaussian process chooses.
        candidates: number of weights among which expected improvement chooses in each step.
        length_scales: length scales of the Matérn kernel; each step takes the most likely one.
        seed: seed of all draws.
    """

    evaluations: int = 50
    initial: int = 10
    candidates: int = 128
    length_scales: tuple[float, ...] = (0.1, 0.3, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.initial < self.evaluations and self.candidates > 1):
            raise ConfigError(
                f"{self.evaluations} evaluations, {self.initial} of them random, "
                f"{self.candidates} candidates",
                where="BayesianConfig",
                expected="fewer random evaluations than evaluations, two candidates at least",
            )
        if not self.length_scales or min(self.length_scales) <= 0:
            raise ConfigError(
                f"length scales {self.length_scales}",
                where="BayesianConfig",
                expected="one at least, all above 0",
            )


def best_weights(
    scores: Float[np.ndarray, "queries candidates lists"],
    exists: Bool[np.ndarray, "queries candidates"],
    hits: Bool[np.ndarray, "queries candidates"],
    start: Float[np.ndarray, " lists"],
    *,
    first: int = 0,
    config: BayesianConfig | None = None,
) -> Float[np.ndarray, "queries lists"]:
    """The weights found, on the simplex, that rank each query's first hit highest.

    Args:
        scores: score of each candidate passage in each list.
        exists: whether there is a candidate.
        hits: whether it is relevant.
        start: the weights that are tried first; they win ties.
        first: number of the first query; draws depend on a query's number.
        config: settings of the search.

    Returns:
        Each query's weights; `start` where no candidate is relevant.
    """
    config = config or BayesianConfig()
    numbers, start = np.arange(first, first + len(scores)), np.asarray(start, np.float32)
    found = _search(numbers, scores, exists, hits, start, config=config)
    return np.asarray(found, np.float64)


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
    known: Float[Array, "points lists"],
    values: Float[Array, " points"],
    is_known: Bool[Array, " points"],
    candidates: Float[Array, "candidates lists"],
    length_scale: Float[Array, ""],
) -> tuple[Float[Array, " candidates"], Float[Array, " candidates"], Float[Array, ""]]:
    """Mean and standard deviation of a Gaussian process, and the log likelihood of its points.

    The covariance is Matérn's with ν = 5/2: (1 + d + d²/3) exp(-d), d = √5 |x - y| / length.
    Points that are not known yet count as independent ones of value 0, which change nothing.

    Source: Rasmussen and Williams 2006, algorithm 2.1.
    """
    both = is_known[:, None] & is_known[None, :]
    covariance = jnp.where(both, _matern(known, known, length_scale), 0.0)
    factor = jnp.linalg.cholesky(covariance + jnp.diag(jnp.where(is_known, _NOISE, 1.0)))
    values = jnp.where(is_known, values, 0.0)
    solved = jax.scipy.linalg.cho_solve((factor, True), values)
    cross = jnp.where(is_known[:, None], _matern(known, candidates, length_scale), 0.0)
    reduced = jax.scipy.linalg.solve_triangular(factor, cross, lower=True)
    variance = jnp.maximum(1.0 - (reduced**2).sum(axis=0), 1e-12)
    count = is_known.sum()
    likelihood = -0.5 * values @ solved - jnp.log(jnp.diagonal(factor)).sum()
    return solved @ cross, jnp.sqrt(variance), likelihood - 0.5 * count * math.log(2 * math.pi)


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


@functools.partial(jax.jit, static_argnames="config")
def _search(
    numbers: Int[Array, " queries"],
    scores: Float[Array, "queries candidates lists"],
    exists: Bool[Array, "queries candidates"],
    hits: Bool[Array, "queries candidates"],
    start: Float[Array, " lists"],
    *,
    config: BayesianConfig,
) -> Float[Array, "queries lists"]:
    """The search for every query."""
    search = functools.partial(_search_one, start=start, config=config)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(config.seed)))(numbers)
    return jax.vmap(search)(keys, scores, exists, hits)


def _search_one(
    key: PRNGKeyArray,
    scores: Float[Array, "candidates lists"],
    exists: Bool[Array, " candidates"],
    hits: Bool[Array, " candidates"],
    *,
    start: Float[Array, " lists"],
    config: BayesianConfig,
) -> Float[Array, " lists"]:
    """The search for one query."""
    uniform, lists = jnp.ones(len(start)), len(start)
    drawn = jax.random.dirichlet(jax.random.fold_in(key, 0), uniform, (config.initial,))
    known = jnp.zeros((config.evaluations, lists))
    known = known.at[0].set(start).at[1 : config.initial + 1].set(drawn)
    values = jax.vmap(lambda weights: reciprocal_rank(weights, scores, exists, hits))(known)

    def step(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        known, values = state
        weights = _proposed(jax.random.fold_in(key, number), known, values, number, config)
        value = reciprocal_rank(weights, scores, exists, hits)
        return known.at[number].set(weights), values.at[number].set(value)

    state = jax.lax.fori_loop(config.initial + 1, config.evaluations, step, (known, values))
    known, values = state
    return known[values.argmax()]


def _proposed(
    key: PRNGKeyArray,
    known: Float[Array, "points lists"],
    values: Float[Array, " points"],
    count: Array,
    config: BayesianConfig,
) -> Float[Array, " lists"]:
    """The candidate with the highest expected improvement; half are drawn near the best weights."""
    is_known = jnp.arange(len(values)) < count
    best = jnp.where(is_known, values, -jnp.inf).argmax()
    wide, share = jax.random.split(key)
    drawn = jax.random.dirichlet(wide, jnp.ones(known.shape[1]), (config.candidates,))
    near = jax.random.uniform(share, (config.candidates // 2, 1), maxval=0.3)
    local = (1.0 - near) * known[best] + near * drawn[: config.candidates // 2]
    candidates = jnp.concatenate([local, drawn[config.candidates // 2 :]])
    mean = (values * is_known).sum() / count
    deviation = jnp.sqrt((((values - mean) * is_known) ** 2).sum() / count)
    scaled = (values - mean) / jnp.where(deviation > 0, deviation, 1.0)
    means, deviations, likelihoods = jax.vmap(
        lambda length: posterior(known, scaled, is_known, candidates, length)
    )(jnp.asarray(config.length_scales))
    likely = likelihoods.argmax()
    gain = expected_improvement(means[likely], deviations[likely], scaled[best])
    return candidates[gain.argmax()]
