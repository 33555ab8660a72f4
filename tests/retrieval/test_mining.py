"""Hard negatives on a hand-made run, against a loop, and the promises that hold for any run."""

import dataclasses

import numpy as np
import pytest

from taser_jax.data.token_store.arrays import Ragged
from taser_jax.evaluation.metrics import AnswerMatcher
from taser_jax.retrieval.mining import (
    AnswerContaining,
    Choice,
    Excluded,
    MiningConfig,
    MiningStatistics,
    Reason,
    mine_negatives,
)
from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import ConfigError

INF = np.inf


def result_of(rows, scores):
    return SearchResult(np.array(rows, np.int32), np.array(scores, np.float32))


# Ranked: 8 3 5 4 9 | 1 (its only result) | 2 6 7 0 5; ties by row; the last is beyond depth 4.
RESULT = result_of(
    [[3, 8, 4, 5, 9], [-1, 1, -1, -1, -1], [0, 2, 5, 7, 6]],
    [[4, 5, 2, 3, 1], [-INF, 1, -INF, -INF, -INF], [3, 9, 1, 4, 4]],
)
POSITIVES = [[3, 4], [1], []]
TEXTS = {8: "Paris", 3: "Paris", 5: "Rome", 4: "Bern", 9: "Oslo", 2: "a", 6: "b", 7: "a", 0: "c"}


def contains_answer(queries, rows):
    matcher = AnswerMatcher(lambda passage_rows: [TEXTS.get(row, "") for row in passage_rows])
    answers = [("Paris",), ("Rome",), ()]
    return matcher.hits(rows, [answers[query] for query in queries])


def four_a_page(rows):
    return [f"page {row // 4}" for row in rows]


GOLD, PAGES = ({"excluded": excluded, "count": 9} for excluded in (Excluded.GOLD, Excluded.PAGES))
DROP = {"answer_containing": AnswerContaining.DROP}
QUARTER, HALF = ({"relative_margin": margin, "depth": 5} for margin in (0.25, 0.5))


@pytest.mark.parametrize(
    ("options", "rows", "left_out"),
    [
        ({}, [[8, 5], [], [2, 6]], {Reason.POSITIVE: 3}),
        ({"count": 9, "depth": 5}, [[8, 5, 9], [], [2, 6, 7, 0, 5]], {Reason.POSITIVE: 3}),
        (GOLD, [[8, 5, 4], [], [2, 6, 7, 0]], {Reason.POSITIVE: 2}),
        # Query 0 has positives on pages 0 and 1: of 8 3 5 4 only 8 is on another one.
        (PAGES, [[8], [], [2, 6, 7, 0]], {Reason.POSITIVE: 3, Reason.PAGE: 1}),
        (DROP, [[5], [], [2, 6]], {Reason.POSITIVE: 3, Reason.ANSWER: 1}),
        # Positive 3 scores 4, so that a negative may score 3, or 2; query 2 has no positive.
        (QUARTER, [[5, 9], [], []], {Reason.POSITIVE: 3, Reason.MARGIN: 1 + 5}),
        (HALF, [[9], [], []], {Reason.POSITIVE: 3, Reason.MARGIN: 2 + 5}),
    ],
)
@pytest.mark.parametrize("form", [list, Ragged.from_lists])
def test_golden(options, rows, left_out, form):
    config = MiningConfig(**{"depth": 4, "count": 2, **options})
    look_up = {"contains_answer": contains_answer, "pages_of": four_a_page}
    mined = mine_negatives(RESULT, form(POSITIVES), config=config, **look_up)
    assert mined.rows == rows
    left_out = dict.fromkeys(Reason, 0) | left_out
    lengths = [len(line) for line in rows]
    below = sum(length < config.count for length in lengths)
    # Query 2 has no positive; the run has those of the others.
    statistics = MiningStatistics(3, sum(lengths), left_out, below, lengths.count(0), 1)
    assert mined.statistics == statistics
    assert mined.positive_scores.tolist() == [4, 1, -INF]
    for query, line in enumerate(rows):
        score_of = dict(zip(RESULT.rows[query], RESULT.scores[query], strict=True))
        assert mined.scores[query] == [score_of[row] for row in line]


def random_case(seed, queries=300, depth=20, passages=60):
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(passages)[:depth] for _ in range(queries)]).astype(np.int32)
    scores = rng.integers(-4, 4, rows.shape).astype(np.float32)
    missing = np.arange(depth) >= rng.integers(0, depth + 1, (queries, 1))
    rows[missing], scores[missing] = -1, -INF
    positives = [rng.permutation(passages)[: rng.integers(0, 6)].tolist() for _ in range(queries)]
    answered = rng.random((queries, passages)) < 0.3
    return SearchResult(rows, scores), positives, answered


def oracle(result, positives, answered, config):
    """The rules as loops over candidates by rank, in float64: negatives, and the best positive."""
    excluded = {
        Excluded.POSITIVES: lambda row, positive: row in positive,
        Excluded.GOLD: lambda row, positive: row in positive[:1],
        Excluded.PAGES: lambda row, positive: any(row // 4 == other // 4 for other in positive),
    }[config.excluded]
    drops_answers = config.answer_containing is AnswerContaining.DROP
    for query, positive in enumerate(positives):
        pairs = zip(result.scores[query].tolist(), result.rows[query].tolist(), strict=True)
        ranked = [pair for pair in sorted(pairs, key=lambda p: (-p[0], p[1])) if pair[1] >= 0]
        own = max((score for score, row in ranked if row in positive), default=-INF)
        # Without a positive in the run it is minus infinity, which no score is below.
        margin = config.relative_margin
        limit = INF if margin is None else own - margin * abs(own)
        negatives = [row for score, row in ranked[: config.depth] if score <= limit]
        negatives = [row for row in negatives if not excluded(row, positive)]
        yield [row for row in negatives if not (drops_answers and answered[query, row])], own


@pytest.mark.parametrize("answer_containing", list(AnswerContaining))
@pytest.mark.parametrize("excluded", list(Excluded))
@pytest.mark.parametrize(("depth", "margin"), [(7, None), (20, None), (15, 0.25)])
def test_equals_the_oracle(answer_containing, excluded, depth, margin):
    result, positives, answered = random_case(seed=depth)
    left_out = {"answer_containing": answer_containing, "excluded": excluded}
    config = MiningConfig(depth=depth, count=5, relative_margin=margin, **left_out)

    def look_up(queries, rows):
        return answered[queries[:, None], np.maximum(rows, 0)]

    expected, best = zip(*oracle(result, positives, answered, config), strict=True)
    options = {"contains_answer": look_up, "pages_of": four_a_page}
    mined = mine_negatives(result, positives, config=config, **options)
    assert mined.rows == [line[:5] for line in expected]
    assert mined.positive_scores.tolist() == list(best)
    assert mined.statistics.unranked_positives == best.count(-INF)
    assert mined.statistics.queries_below_count == sum(len(line) < 5 for line in expected)

    sampled_config = dataclasses.replace(config, choice=Choice.SAMPLE)
    sampled = mine_negatives(result, positives, config=sampled_config, **options)
    for line, candidates in zip(sampled.rows, expected, strict=True):
        assert len(line) == min(5, len(candidates))
        assert [row for row in candidates if row in line] == line, "not in rank order"
    assert sampled.rows != mined.rows
    # Neither the columns' order nor how many queries there are changes another query's sample.
    columns = np.random.default_rng(0).permutation(20)
    some = SearchResult(result.rows[:50][:, columns], result.scores[:50][:, columns])
    again = mine_negatives(some, positives[:50], config=sampled_config, **options)
    assert again.rows == sampled.rows[:50]
    other_seed = dataclasses.replace(sampled_config, seed=1)
    assert mine_negatives(result, positives, config=other_seed, **options).rows != sampled.rows


def test_samples_are_uniform():
    result = result_of([range(10)] * 3000, [np.arange(10.0)[::-1]] * 3000)
    config = MiningConfig(depth=10, count=2, choice=Choice.SAMPLE)
    mined = mine_negatives(result, [[0]] * 3000, config=config)
    counts = np.bincount(np.array(mined.rows).reshape(-1), minlength=10)
    assert counts[0] == 0
    # 9 candidates, 6,000 draws: 667 each, standard deviation about 23.
    np.testing.assert_allclose(counts[1:], 6000 / 9, atol=115)


def test_pages_must_be_known():
    config = MiningConfig(depth=4, count=9, excluded=Excluded.PAGES)
    with pytest.raises(ConfigError, match="pages are to be left out"):
        mine_negatives(RESULT, POSITIVES, config=config, pages_of=lambda rows: [""] * len(rows))
