"""Weights by Bayesian optimisation: the Gaussian process, the objective, and what it finds."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from taser_jax.commands.evaluate import EvaluationConfig
from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.retrieval.fusion import FusionConfig
from taser_jax.retrieval.runs import Run
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query
from taser_jax.systems.muf.oracle import (
    BayesianConfig,
    best_weights,
    expected_improvement,
    oracle_weights,
    posterior,
    reciprocal_rank,
)


def questions(count, *, lists=3, candidates=40, seed=0):
    """Few hits, each of which some list ranks well."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(count, candidates, lists)).astype(np.float32)
    hits = rng.random((count, candidates)) < 0.05
    hits[:, 0] = True
    return scores, rng.random((count, candidates)) < 0.9, hits


def values_of(weights, scores, exists, hits):
    """Reciprocal ranks of all questions' first hits, by sorting in float64; 0 without a hit."""
    fused = np.einsum("qcl,ql->qc", scores.astype(np.float64), weights)
    order = np.argsort(np.where(exists, -fused, np.inf), axis=1, kind="stable")
    ranked_hits = np.take_along_axis(exists & hits, order, axis=1)
    return np.where(ranked_hits.any(axis=1), 1 / (1 + ranked_hits.argmax(axis=1)), 0.0)


def test_the_objective_by_hand():
    scores = jnp.array([[3.0, 0.0], [0.0, 4.0], [1.0, 1.0], [9.0, 9.0]])
    exists = jnp.array([True, True, True, False])
    hits = jnp.array([False, True, False, True])
    # The missing candidate is no hit. The other is third, first, and tied with the one after it.
    for weights, value in (((1.0, 0.0), 1 / 3), ((0.0, 1.0), 1.0), ((0.75, 0.25), 1 / 2)):
        assert reciprocal_rank(jnp.array(weights), scores, exists, hits) == pytest.approx(value)
    tied = jnp.array([[1.0, 1.0]] * 4)
    assert reciprocal_rank(jnp.array([0.5, 0.5]), tied, exists, hits) == 0.5
    assert reciprocal_rank(jnp.array([0.5, 0.5]), tied, exists, jnp.zeros(4, bool)) == 0


def test_the_posterior_is_that_of_scikit_learn():
    rng = np.random.default_rng(1)
    tried, values = rng.dirichlet(np.ones(4), 20), rng.normal(size=20)
    candidates = rng.dirichlet(np.ones(4), 30)
    theirs = GaussianProcessRegressor(Matern(0.3, nu=2.5), alpha=1e-6, optimizer=None)
    theirs.fit(tried[:12], values[:12])
    mean, deviation = theirs.predict(candidates, return_std=True)
    given = (tried, values, np.arange(20) < 12, candidates, np.float32(0.3))
    ours = posterior(*map(jnp.asarray, given))
    np.testing.assert_allclose(ours[0], mean, atol=2e-4)
    np.testing.assert_allclose(ours[1], deviation, atol=2e-3)
    assert ours[2] == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-2)


def test_passages_of_all_lists_are_judged_where_lists_are_short(tmp_path):
    """The relevant passage is the second list's first."""
    scores = np.array([[3.0, 2.0, 1.0]], np.float32)
    runs = [Run(["q"], np.array([rows], np.int32), scores) for rows in ([1, 2, 3], [9, 4, 5])]
    store = write_collection(tmp_path, "ten", [Passage(f"p{row}", "text") for row in range(10)])
    query = Query("q", "?", "task", positives=(9,))
    queries = write_queries(tmp_path, "ten", "task", "test", [query])
    options = {"search": BayesianConfig(5, 3), "evaluation": EvaluationConfig()}
    weights = oracle_weights(runs, queries, store, own=0, config=FusionConfig(), **options)
    assert weights[0, 1] > 0.5


def test_expected_improvement_is_the_integral():
    means, deviations = jnp.array([0.2, -1.0]), jnp.array([0.5, 2.0])
    improvements = expected_improvement(means, deviations, jnp.array(0.1))
    grid = np.linspace(-30, 30, 600_001)
    for value, mean, deviation in zip(improvements, means, deviations, strict=True):
        gain = np.maximum(grid - 0.11, 0) * stats.norm.pdf(grid, mean, deviation)
        assert value == pytest.approx(np.trapezoid(gain, grid), abs=1e-5)


@pytest.mark.slow
def test_it_finds_nearly_what_a_fine_grid_finds_and_more_than_chance():
    count, tried = 12, 30
    scores, exists, hits = questions(count)
    start = np.array([1.0, 0.0, 0.0])
    weights = np.asarray(best_weights(scores, exists, hits, start, config=BayesianConfig(tried)))
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
    values = values_of(weights, scores, exists, hits)
    grid = np.array([w for w in itertools.product(range(21), repeat=3) if sum(w) == 20]) / 20
    best = np.max([values_of([point] * count, scores, exists, hits) for point in grid], axis=0)
    drawn = np.random.default_rng(0).dirichlet(np.ones(3), tried)
    chance = np.max([values_of([point] * count, scores, exists, hits) for point in drawn], axis=0)
    first = values_of([start] * count, scores, exists, hits)
    assert (values >= first).all()
    # A grid of 231 points against 30; a twentieth of the way may be missing.
    assert values.mean() >= best.mean() - 0.05 * (best.mean() - first.mean())
    assert values.mean() >= chance.mean() - 0.005


def test_a_query_does_not_depend_on_its_neighbours_and_keeps_its_start_without_a_hit():
    scores, exists, hits = questions(6, seed=3)
    hits[4] = False
    config = BayesianConfig(evaluations=15, initial=5)
    start = np.array([0.0, 1.0, 0.0])
    together = best_weights(scores, exists, hits, start, config=config)
    np.testing.assert_array_equal(together[4], start)
    others = (np.roll(array, -2, axis=0) for array in (scores, exists, hits))
    rest = best_weights(*others, start, first=2, config=config)
    np.testing.assert_allclose(rest[:4], together[2:], atol=1e-6)
    with pytest.raises(ConfigError, match="10 of 10 evaluations are random"):
        BayesianConfig(evaluations=10, initial=10)
