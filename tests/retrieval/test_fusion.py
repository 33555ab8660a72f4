"""Fusion of specialists' lists: by hand, and against dictionaries."""

import numpy as np
import pytest

from taser_jax.retrieval.fusion import (
    FusionConfig,
    ScoreNormalization,
    Weighting,
    fuse,
    fuse_runs,
    weights_of,
)
from taser_jax.retrieval.runs import Run, top_k
from taser_jax.storage.errors import ConfigError, DataError


def run(lists, names=None):
    """A run from one {row: score} per query."""
    width = max(map(len, lists), default=0)
    rows = np.full((len(lists), width), -1, np.int64)
    scores = np.full((len(lists), width), -np.inf, np.float32)
    for line, one in enumerate(lists):
        rows[line, : len(one)] = list(one.keys())
        scores[line, : len(one)] = list(one.values())
    return Run.of(names or [f"q{i}" for i in range(len(lists))], top_k(rows, scores, width))


def listed(fused, line=0):
    found = zip(fused.rows[line].tolist(), fused.scores[line].tolist(), strict=True)
    return [(row, score) for row, score in found if row >= 0]


def random_lists(rng, queries, size):
    # Quarters are exact in float32, so ties are ties in both.
    return [
        dict(
            zip(
                rng.permutation(60)[: rng.integers(0, size)].tolist(),
                (rng.integers(-20, 20, size) / 4).tolist(),
                strict=False,
            )
        )
        for _ in range(queries)
    ]


def test_by_hand():
    weights = weights_of(np.array([[0.9, 0.3]]))
    np.testing.assert_allclose(weights.values, [[0.75, 0.25]])
    lists = [run([{7: 3, 4: 1}]), run([{4: 6, 9: 2}])]
    fused = fuse_runs(lists, weights.values, FusionConfig(k=5))
    assert listed(fused) == [(7, 2.75), (4, 2.25), (9, 1.25)]


def test_weights_by_hand():
    w = np.array([[0.9, 0.3], [0.0, 0.0], [0.2, 0.6]])
    squared = weights_of(w, FusionConfig(power=2.0))
    np.testing.assert_allclose(squared.values, [[0.9, 0.1], [0.5, 0.5], [0.1, 0.9]])
    assert squared.undecided == 1
    equal = weights_of(w, FusionConfig(weighting=Weighting.EQUAL))
    assert equal.values.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("normalization", ScoreNormalization)
def test_equals_dictionaries(normalization):
    rng = np.random.default_rng(0)
    sizes, queries, depth, k = (12, 20, 30), 300, 9, 14
    lists = [random_lists(rng, queries, size) for size in sizes]
    weights = rng.integers(1, 9, (queries, 3)) / 8
    config = FusionConfig(depth=depth, k=k)
    runs = [run(one) for one in lists]
    fused = fuse_runs(runs, weights, config, normalization=normalization)
    for line in range(queries):
        best = [
            dict(sorted(one[line].items(), key=lambda item: (-item[1], item[0]))[:depth])
            for one in lists
        ]

        def score(one, row):
            low, high = (min(one.values()), max(one.values())) if one else (0.0, 1.0)
            value = one.get(row, low)
            if normalization is ScoreNormalization.MIN_MAX:
                return (value - (low + high) / 2) / (high - low) if high > low else 0.0
            return value

        total = {
            row: sum(w * score(one, row) for w, one in zip(weights[line], best, strict=True))
            for row in set().union(*best)
        }
        expected = sorted(total.items(), key=lambda item: (-np.float32(item[1]), item[0]))[:k]
        assert [row for row, _ in listed(fused, line)] == [row for row, _ in expected]
        np.testing.assert_allclose(
            [s for _, s in listed(fused, line)], [s for _, s in expected], rtol=1e-6, atol=1e-6
        )


def test_one_specialist_is_its_own_run():
    rng = np.random.default_rng(1)
    alone = run(random_lists(rng, 20, 10))
    fused = fuse_runs([alone], np.ones((20, 1)), FusionConfig(k=alone.rows.shape[1]))
    np.testing.assert_array_equal(fused.rows, alone.rows)
    np.testing.assert_array_equal(fused.scores, alone.scores)


def test_two_lists_are_the_hybrid():
    rng = np.random.default_rng(2)
    first, second = run(random_lists(rng, 40, 10)), run(random_lists(rng, 40, 15))
    fused = fuse_runs([first, second], np.full((40, 2), [1.0, 1.3]), FusionConfig(k=10))
    joined = fuse(first, second, alpha=1.3, k=10)
    np.testing.assert_array_equal(fused.rows, joined.rows)
    np.testing.assert_array_equal(fused.scores, joined.scores)


def test_the_order_of_specialists_does_not_matter():
    rng = np.random.default_rng(3)
    lists = [run(random_lists(rng, 30, size)) for size in (8, 12, 16)]
    weights = rng.integers(1, 9, (30, 3)) / 8
    config = FusionConfig(k=20)
    forward = fuse_runs(lists, weights, config)
    backward = fuse_runs(lists[::-1], weights[:, ::-1], config)
    np.testing.assert_array_equal(forward.rows, backward.rows)


def test_bad_input():
    lists = [run([{1: 1.0}]), run([{2: 1.0}], ["other"])]
    with pytest.raises(DataError, match="2 queries are in one run only, 'other' say"):
        fuse_runs(lists, np.ones((1, 2)), FusionConfig())
    with pytest.raises(ConfigError, match="one run at least"):
        fuse_runs([], np.ones((0, 0)), FusionConfig())
    with pytest.raises(ConfigError, match="a weight for each query and run"):
        fuse_runs(lists[:1], np.ones((1, 2)), FusionConfig())
    for wrong in (np.nan, -0.1, 1.1):
        with pytest.raises(DataError, match="of query 1"):
            weights_of(np.array([[0.5, 0.5], [0.5, wrong]]))
    with pytest.raises(ConfigError, match="a power above 0"):
        FusionConfig(power=0.0)
