"""Lengths, buckets, steps and budgets of `taser compare`, against figures by hand."""

from __future__ import annotations

import pytest

from taser_jax.commands.pipelines.compare_plan import (
    Costs,
    Plan,
    default_steps,
    fit_length,
    length_buckets,
    padded_length,
    plan,
)

COSTS = Costs(
    step_seconds=1.0,
    start_seconds=30.0,
    encode_seconds=120.0,
    blocks=6,
    systems=1,
    untrained=True,
)


def test_the_95th_percentile_is_rounded_up_and_bounded():
    counts = [*range(1, 101)]
    found = fit_length(counts, longest=256)
    assert (found.tokens, found.cut, found.median) == (96, 0.04, 50)
    assert found.mean == pytest.approx((sum(range(1, 97)) + 4 * 96) / 100)
    assert fit_length(counts, longest=64).tokens == 64
    assert fit_length(counts, longest=64).cut == 0.36
    assert fit_length(counts, longest=64, given=8).tokens == 8


def test_buckets_save_a_quarter_or_are_left_out():
    query, passage = (
        fit_length([10] * 20, longest=64),
        fit_length([40] * 80 + [200] * 20, longest=256),
    )
    assert (query.tokens, passage.tokens) == (16, 208)
    assert length_buckets(query, passage) == [16, 48]
    assert length_buckets(query, query) == []


def test_half_of_the_texts_are_padded_to_the_bucket_of_the_median():
    short, long = fit_length([10] * 20, longest=64), fit_length([40] * 80 + [200] * 20, longest=256)
    assert padded_length(short, [16, 48]) == 16
    assert padded_length(long, [16, 48]) == (48 + 208) / 2
    assert padded_length(long, []) == 208


def test_three_epochs_within_bounds():
    assert default_steps(320, 32) == 100
    assert default_steps(4000, 32) == 375
    assert default_steps(10**6, 32) == 1000


def test_without_a_budget_the_time_is_the_sum_of_the_parts():
    found = plan(COSTS, steps=200, minutes=None, pretrained=True)
    # Two trainings; three encodings, one of them of the untrained model; one minute for the rest.
    assert found.seconds == 60 + 2 * (30 + 200) + 3 * 120
    assert (found.steps, found.frozen_blocks, found.rounds) == (200, 0, 2)


@pytest.mark.parametrize(
    ("minutes", "steps", "frozen", "rounds", "seconds"),
    [
        (30, 200, 0, 2, 880),
        # 60 + 2 x 30 + 3 x 120 s are fixed, a step of both rounds takes 2 s.
        (13, 150, 0, 2, 780),
        # 90 steps would fit. With half of the blocks a step of both rounds takes 1 s; the states
        # cost half an encoding once, and three half encodings read them.
        (11, 200, 3, 2, 560),
        # 60 steps would fit. One round: 60 + 30 + 1.5 x 120 s are fixed, a step takes 0.5 s.
        (7, 200, 3, 1, 370),
        (5, 60, 3, 1, 300),
        (2, 20, 3, 1, 280),
    ],
)
def test_a_budget_costs_steps_then_blocks_then_a_round(
    minutes: float, steps: int, frozen: int, rounds: int, seconds: float
):
    found = plan(COSTS, steps=200, minutes=minutes, pretrained=True)
    assert found == Plan(steps, frozen, rounds, seconds)


def test_random_weights_are_not_frozen():
    found = plan(COSTS, steps=200, minutes=5, pretrained=False)
    assert (found.frozen_blocks, found.rounds) == (0, 1)
