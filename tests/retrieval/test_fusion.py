"""Fusion of specialists' lists, and of dense with sparse ones: by hand, against dictionaries."""

import dataclasses
import math
import re

import numpy as np
import pytest

from taser_jax.retrieval import fusion
from taser_jax.retrieval.runs import Run, top_k
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import DevelopmentSets

# TASER, appendix D: 0.5 to 2 in steps of 0.1.
PAPER = tuple(i / 10 for i in range(5, 21))
MIN_MAX = fusion.HybridConfig(normalization=fusion.ScoreNormalization.MIN_MAX)
PLAIN = fusion.HybridConfig(normalization=fusion.ScoreNormalization.NONE, alphas=PAPER)


def run(lists, names=None):
    """A run from one {row: score} per query."""
    width = max(map(len, lists), default=0)
    rows = np.full((len(lists), width), -1, np.int64)
    scores = np.full((len(lists), width), -np.inf, np.float32)
    for line, scored in enumerate(lists):
        rows[line, : len(scored)] = list(scored.keys())
        scores[line, : len(scored)] = list(scored.values())
    return Run.of(names or [f"q{i}" for i in range(len(lists))], top_k(rows, scores, width))


def listed(fused, line=0):
    pairs = zip(fused.rows[line].tolist(), fused.scores[line].tolist(), strict=True)
    return [(row, score) for row, score in pairs if row >= 0]


def random_lists(rng, queries, size):
    # Quarters are exact in float32, so ties are ties in both.
    rows = [rng.permutation(60)[: rng.integers(0, size)].tolist() for _ in range(queries)]
    return [{row: float(rng.integers(-20, 20)) / 4 for row in of_query} for of_query in rows]


def test_weights_by_hand():
    w = np.array([[0.9, 0.3], [0.0, 0.0], [0.2, 0.6]])
    np.testing.assert_allclose(fusion.weights_of(w), [[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    squared = fusion.weights_of(w, fusion.FusionConfig(power=2.0))
    np.testing.assert_allclose(squared, [[0.9, 0.1], [0.5, 0.5], [0.1, 0.9]])
    equal = fusion.weights_of(w, fusion.FusionConfig(weighting=fusion.Weighting.EQUAL))
    assert equal.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("normalization", fusion.ScoreNormalization)
@pytest.mark.parametrize(("depth", "k"), [(9, 14), (100, 50), (15, 3)])
def test_equals_dictionaries(normalization, depth, k):
    rng = np.random.default_rng(0)
    sizes, queries = (12, 20, 30), 200
    lists = [random_lists(rng, queries, size) for size in sizes]
    weights = rng.integers(1, 9, (queries, 3)) / 8
    config = fusion.FusionConfig(depth=depth, k=k)
    runs = [run(by_query) for by_query in lists]
    [fused] = fusion.fuse_runs(runs, [weights], config, normalization=normalization)
    for line in range(queries):
        best = [
            dict(sorted(by_query[line].items(), key=lambda item: (-item[1], item[0]))[:depth])
            for by_query in lists
        ]

        def score(scored, row):
            low, high = (min(scored.values()), max(scored.values())) if scored else (0.0, 1.0)
            value = scored.get(row, low)
            if normalization is fusion.ScoreNormalization.MIN_MAX:
                return (value - (low + high) / 2) / (high - low) if high > low else 0.0
            return value

        total = {
            row: sum(w * score(scored, row) for w, scored in zip(weights[line], best, strict=True))
            for row in set().union(*best)
        }
        expected = sorted(total.items(), key=lambda item: (-np.float32(item[1]), item[0]))[:k]
        np.testing.assert_allclose(listed(fused, line), expected, rtol=1e-6, atol=1e-6)


def test_bad_input():
    lists = [run([{1: 1.0}]), run([{2: 1.0}], ["other"])]
    with pytest.raises(DataError, match="2 queries are in one run only, 'other' say"):
        fusion.fuse_runs(lists, [np.ones((1, 2))], fusion.FusionConfig())


def test_hybrid_by_hand():
    dense, sparse = run([{7: 3, 4: 1}]), run([{4: 6, 9: 2}])
    assert listed(fusion.fuse(dense, sparse, alpha=0.5, k=5)) == [(4, 4.0), (7, 4.0), (9, 2.0)]
    assert listed(fusion.fuse(dense, sparse, alpha=1.0, k=2)) == [(4, 7.0), (7, 5.0)]
    # dense 3, 1 -> +0.5, -0.5 (missing -0.5); sparse 6, 2 -> +0.5, -0.5 (missing -0.5).
    by_min_max = fusion.fuse(dense, sparse, alpha=0.5, k=5, config=MIN_MAX)
    assert listed(by_min_max) == [(7, 0.25), (4, -0.25), (9, -0.75)]


def test_queries_are_matched_by_id():
    dense, sparse = run([{1: 1.0}, {2: 1.0}], ["a", "b"]), run([{2: 5.0}, {1: 5.0}], ["b", "a"])
    fused = fusion.fuse(dense, sparse, alpha=1.0, k=1)
    assert (fused.query_ids, fused.rows.tolist()) == (["a", "b"], [[1], [2]])


def gold_first(fused):
    """Row 0 is gold."""
    return (fused.rows[:, 0] == 0).astype(np.float64)


def development_set(dense_lead, sparse_lead, queries=1):
    """score(0) - score(1) = dense_lead - α·sparse_lead, of so many queries."""
    ids = [f"q{i}" for i in range(queries)]
    dense = run([{0: dense_lead, 1: 0.0}] * queries, ids)
    return fusion.DevelopmentSet(dense, run([{0: 0.0, 1: sparse_lead}] * queries, ids), gold_first)


def test_alpha_by_the_mean_over_tasks_or_over_all_queries():
    """One query wants α of at least 1.6, three of another set one below 1."""
    few, many = development_set(-1.55, -1.0), development_set(0.95, 1.0, queries=3)
    both = [few, few, many]
    apart = fusion.choose_alpha(both, k=1, config=PLAIN)
    expected = [(float(a <= 0.9) + 2 * (a >= 1.6)) / 3 for a in PAPER]
    np.testing.assert_allclose(apart.metric, expected)
    assert (apart.alpha, apart.alphas) == (1.6, PAPER)
    config = dataclasses.replace(PLAIN, sets=DevelopmentSets.COMBINED)
    combined = fusion.choose_alpha(both, k=1, config=config)
    assert (combined.alpha, combined.metric[0]) == (0.5, pytest.approx(3 / 5))


def test_cosines_are_brought_to_one_range_and_dot_products_are_not():
    sparse = run([{0: 30.0, 1: 10.0}, {}])
    cosines = run([{0: -0.2, 1: 0.9}, {2: 1.0}])
    settled = fusion.settle(fusion.HybridConfig(), [(cosines, sparse)])
    assert settled.normalization is fusion.ScoreNormalization.MIN_MAX
    assert settled.alphas == fusion.SHARES
    # One score above 1 in any set, and none is a cosine: widths 1.6 and 0, and twice 20 and 0.
    products = run([{0: -0.2, 1: 1.4}, {2: 1.0}])
    settled = fusion.settle(fusion.HybridConfig(), [(cosines, sparse), (products, sparse)])
    assert settled.normalization is fusion.ScoreNormalization.NONE
    assert settled.alphas[0] == pytest.approx(0.1 * 2.7 / 40, rel=0.05)
    assert settled.alphas[-1] == pytest.approx(3 * 2.7 / 40, rel=0.05)


def test_the_candidates_follow_the_scale_of_the_scores():
    """Dense scores a hundred times as wide: alphas a hundred times as large, and the same lists."""
    dense = run([{0: 3.0, 1: 1.0}, {0: 1.5, 1: 1.0, 2: 0.5}])
    wide = run([{0: 300.0, 1: 100.0}, {0: 150.0, 1: 100.0, 2: 50.0}])
    sparse = run([{1: 4.0, 0: 2.0}, {2: 6.0, 1: 2.0}])

    def chosen(dense):
        development = fusion.DevelopmentSet(dense, sparse, lambda fused: fused.rows[:, 0] == 1.0)
        return fusion.choose_alpha([development], k=3)

    near, far = chosen(dense), chosen(wide)
    np.testing.assert_allclose(np.array(far.alphas), 100 * np.array(near.alphas), rtol=1e-6)
    assert far.metric == near.metric
    assert far.alpha == pytest.approx(100 * near.alpha)


def test_what_is_set_is_not_decided():
    cosines, sparse = run([{0: 0.5, 1: 0.1}]), run([{0: 9.0}])
    config = fusion.HybridConfig(normalization=fusion.ScoreNormalization.NONE, alphas=(0.25,))
    assert fusion.settle(config, [(cosines, sparse)]) == config
    assert listed(fusion.fuse(cosines, sparse, alpha=1.0, k=1, config=config))[0] == (0, 9.5)
    # Lists of one score have no width: the candidates stay as they are.
    single = run([{0: 5.0}])
    assert fusion.settle(fusion.HybridConfig(), [(single, sparse)]).alphas == fusion.SHARES
    for alphas in ((), (-1.0, 1.0), (math.nan,)):
        with pytest.raises(ConfigError, match=rf"alphas is {re.escape(str(alphas))}"):
            fusion.HybridConfig(alphas=alphas)
