"""Lengths, budgets and choices of `taser compare`: by hand, against oracles, and as properties."""

import dataclasses
import fractions
import functools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taser_jax.commands.pipelines import compare_plan
from taser_jax.commands.pipelines.compare_plan import Costs, Gain, Plan, plan, shrunk_alpha
from taser_jax.retrieval.fusion import DEFAULT_SHARE, SHARES, HybridConfig, default_alpha

COSTS = Costs(
    step_seconds=1.0, start_seconds=30.0, encode_seconds=120.0, blocks=6, systems=1, pretrained=True
)
SIX_BLOCKS = {"validation": 20, "blocks": 6, "width": 384, "batch_size": 32}
decided = functools.partial(compare_plan.defaults, **SIX_BLOCKS)
WANTED = Plan(batch_size=32, steps=200, learning_rate=5e-5, frozen_blocks=0, rounds=2, folds=0)


def plain(planned: Plan) -> Plan:
    """Without the rate, and without seconds, which nothing has estimated."""
    return dataclasses.replace(planned, learning_rate=0, seconds=0)


@pytest.mark.parametrize(
    ("counts", "options", "fitted"),
    [
        # The 95th percentile is rounded up and bounded.
        (range(1, 101), {"longest": 256}, (96, 0.04, 50)),
        (range(1, 101), {"longest": 64}, (64, 0.36, 50)),
        (range(1, 101), {"longest": 64, "given": 8}, (8, 0.92, 50)),
        # Tokenising refuses it.
        (range(1, 101), {"longest": 64, "given": 0}, (0, 1.0, 50)),
        # Nothing is cut below the length of a pretrained model.
        ([10] * 99 + [200], {"longest": 256, "share": 1.0}, (208, 0.0, 10)),
        ([10] * 99 + [300], {"longest": 256, "share": 1.0}, (256, 0.01, 10)),
    ],
)
def test_lengths_follow_the_texts(counts, options, fitted):
    assert dataclasses.astuple(compare_plan.fit_length(counts, **options)) == fitted


QUERY = compare_plan.fit_length([10] * 20, longest=64)
PASSAGE = compare_plan.fit_length([40] * 80 + [200] * 20, longest=256)


def test_buckets_save_a_quarter_and_half_of_the_texts_are_padded_to_that_of_the_median():
    assert (QUERY.tokens, PASSAGE.tokens) == (16, 208)
    assert compare_plan.length_buckets(QUERY, PASSAGE) == [16, 48]
    assert compare_plan.length_buckets(QUERY, QUERY) == []
    assert compare_plan.padded_length(QUERY, [16, 48]) == 16
    assert compare_plan.padded_length(PASSAGE, [16, 48]) == (48 + 208) / 2
    assert compare_plan.padded_length(PASSAGE, []) == 208


@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        # Batches of at most half of the queries; half of the blocks, at twice 7.5e-5 · sqrt(1/20).
        (50, Plan(16, 20, 1.5e-4 * 0.05**0.5, 3, 1, 5)),
        (250, Plan(32, 32, 1.5e-4 * 0.25**0.5, 3, 1, 5)),
        (490, Plan(32, 62, 1.5e-4 * 0.49**0.5, 3, 1, 2)),
        (4000, Plan(32, 500, 7.5e-5, 0, 2, 2)),
        (10**6, Plan(32, 1000, 7.5e-5, 0, 2, 2)),
        # Too few for folds.
        (9, Plan(4, 20, 1.5e-4 * 0.009**0.5, 3, 1, 0)),
    ],
)
def test_training_follows_the_number_of_distinct_queries(queries, expected):
    planned = decided(queries)
    assert planned.learning_rate == pytest.approx(expected.learning_rate, rel=0.05)
    assert plain(planned) == plain(expected)


@pytest.mark.parametrize(
    ("blocks", "width", "frozen", "rate"),
    # Twice as wide, half of the rate; a sixth of the blocks, six times the rate.
    [(12, 768, None, 7.5e-5 / 2), (6, 384, 5, 6 * 7.5e-5), (6, 384, 0, 7.5e-5)],
)
def test_wider_models_and_more_trained_blocks_take_a_lower_rate(blocks, width, frozen, rate):
    planned = decided(1000, blocks=blocks, width=width, frozen=frozen)
    assert planned.learning_rate == pytest.approx(rate, rel=0.05)
    assert planned.frozen_blocks == (frozen or 0)


def test_many_validation_queries_and_random_weights_need_no_folds():
    assert decided(5000, validation=300).folds == 0
    scratch = decided(50, validation=5, blocks=None)
    assert scratch.learning_rate == 1e-3
    assert plain(scratch) == plain(Plan(16, 100, 1e-3, 0, 2, 0))


def test_without_a_budget_the_time_is_the_sum_of_the_parts():
    planned = plan(COSTS, WANTED, minutes=None)
    # Two trainings, the second of which compiles nothing; three encodings, one of them of the
    # untrained model; one minute for the rest.
    assert planned.seconds == 60 + 1.5 * 30 + 2 * 200 + 3 * 120
    assert (planned.steps, planned.frozen_blocks, planned.rounds, planned.folds) == (200, 0, 2, 0)


def test_folds_train_and_encode_their_pools_and_time_counts_from_the_start():
    costs = dataclasses.replace(COSTS, spent_seconds=50.0, pool_share=0.25)
    with_folds = dataclasses.replace(WANTED, folds=5)
    planned = plan(costs, with_folds, minutes=None)
    # Seven trainings, five of them for four fifths of the steps, start in the time of four; three
    # encodings, and five of a quarter of the passages.
    assert planned.seconds == 50 + 60 + 4 * 30 + (2 + 4) * 200 + (3 + 5 / 4) * 120
    # 30 minutes: 50 + 60 + 4 * 30 + 4.25 * 120 s are fixed, a step of all trainings takes 6 s.
    assert plan(costs, with_folds, minutes=30 / 0.9).steps == (1800 - 740) // 6
    # Chunks are encoded once more: four passes of three. Validations read a tenth of the passages.
    costs = dataclasses.replace(costs, chunks=lambda each: 2, validation_share=0.1)
    planned = plan(costs, with_folds, minutes=None)
    encodings = 3 + 5 / 4 + 7 / 10
    assert planned.seconds == pytest.approx(50 + 60 + 4 * 30 + 6 * 200 * 4 / 3 + encodings * 120)


@pytest.mark.parametrize(
    ("minutes", "steps", "frozen", "rounds", "tokens", "seconds"),
    [
        (30, 200, 0, 2, None, 865),
        # 60 + 1.5 x 30 + 3 x 120 s are fixed, a step of both rounds takes 2 s.
        (13, 157, 0, 2, None, 779),
        # 97 steps would fit. With half of the blocks a step of both rounds takes 1 s; the states
        # cost half an encoding once, and three half encodings read them.
        (11, 200, 3, 2, None, 545),
        # 75 steps would fit. One round: 60 + 30 + 1.5 x 120 s are fixed, a step takes 0.5 s.
        (7, 200, 3, 1, None, 370),
        (5, 60, 3, 1, None, 300),
        # No step would fit. Half of the tokens cost half: 60 + 30 + 180 / 2 s, 0.25 s a step.
        (4, 200, 3, 1, 128, 230),
        # No step would fit. The last block alone: 60 + 30 + (5 + 2) / 6 x 120 / 2 s are fixed, a
        # step takes a twelfth of a second.
        (3, 200, 5, 1, 128, 160 + 200 / 12),
        (2.75, 60, 5, 1, 128, 165),
        # 60 + 30 + 140 / 4 s are fixed; no 20 steps fit.
        (2, 20, 5, 1, 64, 125 + 20 / 24),
    ],
)
def test_a_budget_costs_steps_then_blocks_then_a_round_then_tokens(
    minutes, steps, frozen, rounds, tokens, seconds
):
    costs = dataclasses.replace(COSTS, shorter={128: 0.5, 64: 0.25})
    planned = plan(costs, WANTED, minutes=minutes / 0.9)
    assert planned.seconds == pytest.approx(seconds)
    assert plain(planned) == plain(Plan(32, steps, 5e-5, frozen, rounds, 0, passage_tokens=tokens))
    # All blocks take 5e-5 in 200 steps, half of them twice as much; a quarter of the steps, or
    # fewer, twice as much, too.
    rate = 5e-5 * 6 / (6 - frozen) * min(2, (200 / steps) ** 0.5)
    assert planned.learning_rate == pytest.approx(rate, rel=0.05)


def test_passages_are_cut_to_quarters_of_their_length_and_cost_their_batches_tokens():
    # A batch has a query of 16 tokens and two passages of (48 + 208) / 2; of 160 tokens at most,
    # (48 + 160) / 2, and so on: 48 is at most three quarters of 64.
    shorter = compare_plan.shorter_passages(QUERY, PASSAGE)
    assert shorter == pytest.approx({160: 224 / 272, 112: 176 / 272, 64: 128 / 272})
    assert compare_plan.shorter_passages(QUERY, QUERY) == {}


def test_what_is_set_stays_as_it_is():
    # Not even the shortest plan fits: 20 steps of the last block, in one round.
    shortest = plan(COSTS, WANTED, minutes=2)
    assert (shortest.steps, shortest.frozen_blocks, shortest.rounds) == (20, 5, 1)
    assert shortest.seconds == pytest.approx(230 + 20 / 6)
    for name in ("steps", "rounds", "frozen_blocks", "learning_rate"):
        chosen = plan(COSTS, WANTED, minutes=2, fixed=[name])
        assert getattr(chosen, name) == getattr(WANTED, name)
        assert chosen.seconds > 120


def test_random_weights_are_not_frozen():
    planned = plan(dataclasses.replace(COSTS, pretrained=False), WANTED, minutes=5 / 0.9)
    assert (planned.frozen_blocks, planned.rounds) == (0, 1)


UNITS = st.integers(0, 8).map(lambda n: n / 8)
PAIRS = st.lists(st.tuples(UNITS, UNITS), min_size=2, max_size=12)


def test_one_query_tells_nothing():
    gain = compare_plan.paired_gain({"a": np.array([1.0])}, {"a": np.array([0.0])})
    assert gain == Gain(1.0, math.inf)
    assert compare_plan.recommend({"trained": gain}, "untrained") == "untrained"


@given(st.lists(PAIRS, min_size=1, max_size=3))
def test_gains_are_those_of_exact_arithmetic(tasks):
    first = {str(n): np.array([a for a, _ in pairs]) for n, pairs in enumerate(tasks)}
    second = {str(n): np.array([b for _, b in pairs]) for n, pairs in enumerate(tasks)}
    exact = [[fractions.Fraction(a) - fractions.Fraction(b) for a, b in pairs] for pairs in tasks]
    mean = statistics.mean(statistics.mean(each) for each in exact)
    variance = sum(statistics.variance(each) / len(each) for each in exact) / len(exact) ** 2
    gain = compare_plan.paired_gain(first, second)
    assert gain.mean == pytest.approx(float(mean), abs=1e-12)
    assert gain.error == pytest.approx(math.sqrt(variance), abs=1e-9)
    other_way = compare_plan.paired_gain(second, first)
    assert other_way.mean == pytest.approx(-gain.mean, abs=1e-12)
    assert other_way.error == pytest.approx(gain.error, abs=1e-12)


@given(
    st.dictionaries(
        st.sampled_from(["shared", "taser", "hybrid"]),
        st.tuples(st.floats(-1, 1), st.floats(0, 1)).map(lambda pair: Gain(*pair)),
    )
)
def test_what_is_recommended_gains_more_than_its_error(gains):
    best = compare_plan.recommend(gains, "untrained")
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
