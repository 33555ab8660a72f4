"""The choice among candidates: by hand, against an oracle in fractions, and as properties."""

import fractions
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taser_jax.commands.pipelines.compare_plan import (
    Gain,
    fold_numbers,
    paired_gain,
    recommend,
    shrunk_alpha,
)
from taser_jax.retrieval.fusion import DEFAULT_SHARE, SHARES, HybridConfig, default_alpha

UNITS = st.integers(0, 8).map(lambda n: n / 8)
PAIRS = st.lists(st.tuples(UNITS, UNITS), min_size=2, max_size=12)


def test_a_gain_by_hand():
    first = {"a": np.array([1.0, 0.5, 0.0, 0.5]), "b": np.array([0.5, 0.5])}
    second = {"a": np.array([0.0, 0.5, 0.0, 0.5]), "b": np.array([0.25, 0.75])}
    # Differences 1, 0, 0, 0 and 1/4, -1/4: means 1/4 and 0; variances 1/4 and 1/8.
    gain = paired_gain(first, second)
    assert gain.mean == 0.125
    assert gain.error == pytest.approx(math.sqrt(0.25 / 4 + 0.125 / 2) / 2, rel=1e-12)


def test_one_query_tells_nothing():
    gain = paired_gain({"a": np.array([1.0])}, {"a": np.array([0.0])})
    assert gain == Gain(1.0, math.inf)
    assert recommend({"trained": gain}, "untrained") == "untrained"


@given(st.lists(PAIRS, min_size=1, max_size=3))
def test_gains_are_those_of_exact_arithmetic(tasks):
    first = {str(n): np.array([a for a, _ in pairs]) for n, pairs in enumerate(tasks)}
    second = {str(n): np.array([b for _, b in pairs]) for n, pairs in enumerate(tasks)}
    exact = [[fractions.Fraction(a) - fractions.Fraction(b) for a, b in pairs] for pairs in tasks]
    mean = statistics.mean(statistics.mean(each) for each in exact)
    variance = sum(statistics.variance(each) / len(each) for each in exact) / len(exact) ** 2
    gain = paired_gain(first, second)
    assert gain.mean == pytest.approx(float(mean), abs=1e-12)
    assert gain.error == pytest.approx(math.sqrt(variance), abs=1e-9)
    other_way = paired_gain(second, first)
    assert other_way.mean == pytest.approx(-gain.mean, abs=1e-12)
    assert other_way.error == pytest.approx(gain.error, abs=1e-12)


def test_a_sure_gain_is_recommended_before_a_large_one():
    gains = {
        "large, unsure": Gain(0.05, 0.06),
        "sure": Gain(0.02, 0.005),
        "sure loss": Gain(-0.02, 0.001),
    }
    assert recommend(gains, "untrained") == "sure"
    assert recommend({"large, unsure": gains["large, unsure"]}, "untrained") == "untrained"
    assert recommend({}, "untrained") == "untrained"
    assert recommend({"same": Gain(0.0, 0.0)}, "untrained") == "untrained"


@given(
    st.dictionaries(
        st.sampled_from(["shared", "taser", "hybrid"]),
        st.tuples(st.floats(-1, 1), st.floats(0, 1)).map(lambda pair: Gain(*pair)),
    )
)
def test_what_is_recommended_gains_more_than_its_error(gains):
    best = recommend(gains, "untrained")
    if best == "untrained":
        assert all(gain.mean <= gain.error + 1e-9 for gain in gains.values())
    else:
        assert gains[best].mean > gains[best].error
        lead = gains[best].mean - gains[best].error
        assert all(gain.mean - gain.error <= lead for gain in gains.values())


def test_alpha_is_shrunk_by_hand():
    assert shrunk_alpha(2.0, default=0.5, queries=30) == pytest.approx(1.0)
    assert shrunk_alpha(2.0, default=0.5, queries=0) == pytest.approx(0.5)
    # Seven queries of Cranfield: log α = (7 log 0.1 + 30 log 0.5) / 37.
    seven = math.exp((7 * math.log(0.1) + 30 * math.log(0.5)) / 37)
    assert shrunk_alpha(0.1, default=0.5, queries=7) == pytest.approx(seven)
    assert seven > 0.35
    # The dense list alone may be a candidate.
    assert shrunk_alpha(0.0, default=0.5, queries=7) == 0.0
    assert shrunk_alpha(0.5, default=0.0, queries=7) == 0.0


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.integers(0, 10_000), st.integers(1, 1000))
def test_alpha_is_between_default_and_choice_and_nears_the_choice(best, default, queries, more):
    alpha = shrunk_alpha(best, default=default, queries=queries)
    assert min(best, default) * (1 - 1e-9) <= alpha <= max(best, default) * (1 + 1e-9)
    nearer = shrunk_alpha(best, default=default, queries=queries + more)
    assert abs(math.log(nearer / best)) <= abs(math.log(alpha / best)) + 1e-12


def test_the_default_alpha_is_the_stated_share():
    shares = HybridConfig(alphas=tuple(20 * share for share in SHARES))
    assert default_alpha(shares) == 20 * DEFAULT_SHARE
    assert default_alpha(HybridConfig(alphas=(1.0, 4.0, 9.0))) == 4.0


@given(st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1), st.integers(2, 5))
def test_folds_part_the_queries_and_keep_equal_texts_together(texts, folds):
    numbers = fold_numbers(texts, folds)
    assert len(numbers) == len(texts)
    assert set(numbers.tolist()) <= set(range(folds))
    assert len({(text, fold) for text, fold in zip(texts, numbers.tolist(), strict=True)}) == len(
        set(texts)
    )
    # The distinct texts are spread evenly.
    one_each = dict(zip(texts, numbers.tolist(), strict=True))
    sizes = [list(one_each.values()).count(fold) for fold in range(folds)]
    assert max(sizes) - min(sizes) <= 1
