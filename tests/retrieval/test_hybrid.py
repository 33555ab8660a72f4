"""Hybrid: by hand, and against a dictionary-based oracle over many random lists."""

import dataclasses

import numpy as np
import pytest

from taser_jax.retrieval.fusion import (
    SHARES,
    DevelopmentSet,
    HybridConfig,
    ScoreNormalization,
    choose_alpha,
    fuse,
    settle,
)
from taser_jax.retrieval.runs import Run, top_k
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import DevelopmentSets

INF = np.inf
# TASER, appendix D: 0.5 to 2 in steps of 0.1.
PAPER = tuple(i / 10 for i in range(5, 21))


def run(lists, width, names=None):
    """A run from one {row: score} a query."""
    rows = np.full((len(lists), width), -1, np.int64)
    scores = np.full((len(lists), width), -INF, np.float32)
    for line, one in enumerate(lists):
        rows[line, : len(one)] = list(one.keys())
        scores[line, : len(one)] = list(one.values())
    return Run.of(names or [f"q{i}" for i in range(len(lists))], top_k(rows, scores, width))


def listed(fused, line=0):
    return [
        (row, score)
        for row, score in zip(fused.rows[line].tolist(), fused.scores[line].tolist(), strict=True)
        if row >= 0
    ]


def oracle(dense, sparse, alpha, k, depth, normalization):
    def best(one):
        return dict(sorted(one.items(), key=lambda item: (-item[1], item[0]))[:depth])

    def score(one, row):
        low, high = (min(one.values()), max(one.values())) if one else (0.0, 1.0)
        value = one.get(row, low)
        if normalization is ScoreNormalization.MIN_MAX:
            return (value - (low + high) / 2) / (high - low) if high > low else 0.0
        return value

    dense, sparse = best(dense), best(sparse)
    total = {row: score(dense, row) + alpha * score(sparse, row) for row in {*dense, *sparse}}
    return sorted(total.items(), key=lambda item: (-np.float32(item[1]), item[0]))[:k]


def test_by_hand():
    dense, sparse = run([{7: 3, 4: 1}], 2), run([{4: 6, 9: 2}], 3)
    assert listed(fuse(dense, sparse, alpha=0.5, k=5)) == [(4, 4.0), (7, 4.0), (9, 2.0)]
    assert listed(fuse(dense, sparse, alpha=1.0, k=2)) == [(4, 7.0), (7, 5.0)]


def test_min_max_by_hand():
    # dense 3, 1 -> +0.5, -0.5 (missing -0.5); sparse 6, 2 -> +0.5, -0.5 (missing -0.5).
    config = HybridConfig(normalization=ScoreNormalization.MIN_MAX)
    dense, sparse = run([{7: 3, 4: 1}], 2), run([{4: 6, 9: 2}], 3)
    fused = listed(fuse(dense, sparse, alpha=0.5, k=5, config=config))
    assert fused == [(7, 0.25), (4, -0.25), (9, -0.75)]


def test_lists_with_one_result_or_none():
    dense, sparse = run([{3: 2.0}, {3: 2.0}, {}, {}], 2), run([{}, {5: -4.0}, {5: 1.5}, {}], 2)
    fused = fuse(dense, sparse, alpha=2.0, k=3)
    assert listed(fused, 0) == [(3, 2.0)]
    assert listed(fused, 1) == [(3, -6.0), (5, -6.0)]
    assert listed(fused, 2) == [(5, 3.0)]
    assert listed(fused, 3) == []
    normalized = fuse(
        dense, sparse, alpha=2.0, k=3, config=HybridConfig(normalization=ScoreNormalization.MIN_MAX)
    )
    assert np.isfinite(normalized.scores[normalized.rows >= 0]).all()
    assert listed(normalized, 1) == [(3, 0.0), (5, 0.0)]


@pytest.mark.parametrize("normalization", ScoreNormalization)
def test_equals_dictionaries(normalization):
    rng = np.random.default_rng(0)

    def lists(size):
        # Quarters are exact in float32, so ties are ties in both.
        return [
            dict(
                zip(
                    rng.permutation(40)[: rng.integers(0, size)].tolist(),
                    (rng.integers(-20, 20, size) / 4).tolist(),
                    strict=False,
                )
            )
            for _ in range(60)
        ]

    dense, sparse = lists(20), lists(30)
    for alpha, k, depth in [(0.5, 10, 100), (1.3, 50, 8), (2.0, 3, 15)]:
        config = HybridConfig(depth=depth, normalization=normalization)
        fused = fuse(run(dense, 20), run(sparse, 30), alpha=alpha, k=k, config=config)
        for line in range(60):
            expected = oracle(dense[line], sparse[line], alpha, k, depth, normalization)
            assert [row for row, _ in listed(fused, line)] == [row for row, _ in expected]
            np.testing.assert_allclose(
                [score for _, score in listed(fused, line)],
                [score for _, score in expected],
                rtol=1e-6,
                atol=1e-6,
            )


def test_queries_are_matched_by_id():
    dense = run([{1: 1.0}, {2: 1.0}], 1, ["a", "b"])
    sparse = run([{2: 5.0}, {1: 5.0}], 1, ["b", "a"])
    fused = fuse(dense, sparse, alpha=1.0, k=1)
    assert fused.query_ids == ["a", "b"]
    assert fused.rows.tolist() == [[1], [2]]
    with pytest.raises(DataError, match="2 queries are in one run only, 'a' say"):
        fuse(dense, run([{2: 5.0}, {1: 5.0}], 1, ["b", "c"]), alpha=1.0, k=1)


def test_one_alpha_for_all_sets_by_the_mean():
    # Row 0 is gold. Set one wants α below 1 (dense is right), set two above 1.5, set three at
    # least 1: the mean is highest where two of them agree.
    def gold_first(fused):
        return (fused.rows[:, 0] == 0).astype(np.float64)

    def one(dense_lead, sparse_lead):
        dense = run([{0: dense_lead, 1: 0.0}], 2)
        return DevelopmentSet(dense, run([{0: 0.0, 1: sparse_lead}], 2), gold_first)

    # score(0) - score(1) = dense_lead - α·sparse_lead
    sets = [one(0.95, 1.0), one(-1.55, -1.0), one(-1.05, -1.0)]
    plain = ScoreNormalization.NONE
    choice = choose_alpha(sets, k=1, config=HybridConfig(normalization=plain, alphas=PAPER))
    assert choice.alphas == PAPER
    expected = [(float(a <= 0.9) + (a >= 1.6) + (a >= 1.1)) / 3 for a in PAPER]
    np.testing.assert_allclose(choice.metric, expected)
    assert choice.alpha == 1.6


def test_alpha_by_the_mean_over_tasks_or_over_all_queries():
    """One query wants α of at least 1.6, three of another set one below 1."""

    def gold_first(fused):
        return (fused.rows[:, 0] == 0).astype(np.float64)

    def one(dense_lead, sparse_lead, queries):
        ids = [f"q{i}" for i in range(queries)]
        dense = run([{0: dense_lead, 1: 0.0}] * queries, 2, ids)
        return DevelopmentSet(dense, run([{0: 0.0, 1: sparse_lead}] * queries, 2, ids), gold_first)

    few, many = one(-1.55, -1.0, 1), one(0.95, 1.0, 3)
    both = [few, few, many]
    config = HybridConfig(normalization=ScoreNormalization.NONE, alphas=PAPER)
    apart = choose_alpha(both, k=1, config=config)
    assert (apart.alpha, apart.metric[0]) == (1.6, pytest.approx(1 / 3))
    config = dataclasses.replace(config, sets=DevelopmentSets.COMBINED)
    combined = choose_alpha(both, k=1, config=config)
    assert (combined.alpha, combined.metric[0]) == (0.5, pytest.approx(3 / 5))


def test_choosing_needs_development_data():
    with pytest.raises(ConfigError, match="no development set"):
        choose_alpha([], k=10)


def test_cosines_are_brought_to_one_range_and_dot_products_are_not():
    sparse = run([{0: 30.0, 1: 10.0}, {}], 2)
    cosines = run([{0: -0.2, 1: 0.9}, {2: 1.0}], 2)
    settled = settle(HybridConfig(), [(cosines, sparse)])
    assert settled.normalization is ScoreNormalization.MIN_MAX
    assert settled.alphas == SHARES
    # One score above 1 in any set, and none is a cosine: widths 1.6 and 0, and twice 20 and 0.
    products = run([{0: -0.2, 1: 1.4}, {2: 1.0}], 2)
    settled = settle(HybridConfig(), [(cosines, sparse), (products, sparse)])
    assert settled.normalization is ScoreNormalization.NONE
    assert (settled.alphas[0], settled.alphas[-1]) == (
        pytest.approx(0.1 * 2.7 / 40, rel=0.05),
        pytest.approx(3 * 2.7 / 40, rel=0.05),
    )


def test_the_candidates_follow_the_scale_of_the_scores():
    """Dense scores a hundred times as wide: alphas a hundred times as large, and the same lists."""
    dense = run([{0: 3.0, 1: 1.0}, {0: 1.5, 1: 1.0, 2: 0.5}], 3)
    wide = run([{0: 300.0, 1: 100.0}, {0: 150.0, 1: 100.0, 2: 50.0}], 3)
    sparse = run([{1: 4.0, 0: 2.0}, {2: 6.0, 1: 2.0}], 3)

    def gold_first(fused):
        return (fused.rows[:, 0] == 1).astype(np.float64)

    near, far = (choose_alpha([DevelopmentSet(d, sparse, gold_first)], k=3) for d in (dense, wide))
    np.testing.assert_allclose(np.array(far.alphas), 100 * np.array(near.alphas), rtol=1e-6)
    assert far.metric == near.metric
    assert far.alpha == pytest.approx(100 * near.alpha)


def test_what_is_set_is_not_decided():
    cosines, sparse = run([{0: 0.5, 1: 0.1}], 2), run([{0: 9.0}], 1)
    config = HybridConfig(normalization=ScoreNormalization.NONE, alphas=(0.25,))
    assert settle(config, [(cosines, sparse)]) == config
    assert listed(fuse(cosines, sparse, alpha=1.0, k=1, config=config))[0] == (0, 9.5)
    # Lists of one score have no width: the candidates stay as they are.
    one = run([{0: 5.0}], 1)
    assert settle(HybridConfig(), [(one, sparse)]).alphas == SHARES
    with pytest.raises(ConfigError, match="and one alpha"):
        HybridConfig(alphas=())
