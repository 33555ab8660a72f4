"""Confidence and its calibration: by hand, against float64 NumPy, and what must hold."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import DataError
from taser_jax.systems.muf.confidence import (
    choose_temperature,
    confidence,
    mutual_information,
    query_confidence,
    reliability,
)

MEMBERS, QUERIES, K, DIM = 5, 7, 6, 4


def oracle(logits, temperature):
    """A query's confidence in float64, by SciPy's entropies; `logits` are [members, passages]."""
    if not logits.size:
        return 0.0
    p = softmax(np.float64(logits) / temperature, axis=1)
    information = entropy(p.mean(axis=0)) - entropy(p, axis=1).mean()
    return 1 - information / np.log(MEMBERS)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(MEMBERS, QUERIES, DIM)).astype(np.float32)
    vectors = rng.normal(size=(40, DIM)).astype(np.float32)
    rows = np.stack([rng.permutation(40)[:K] for _ in range(QUERIES)]).astype(np.int32)
    rows[1, 4:], rows[2] = -1, -1
    return members, vectors, SearchResult(rows, np.zeros(rows.shape, np.float32))


def test_by_hand():
    p = jnp.array([[0.75, 0.25], [0.25, 0.75]])
    assert float(mutual_information(p)) == pytest.approx(0.130812, abs=1e-6)
    w = confidence(jnp.log(p)[None], jnp.ones((1, 2), bool), temperature=1.0)
    assert float(w[0]) == pytest.approx(0.811278, abs=1e-6)


def confidences(members, vectors, result, **options):
    """At temperatures 0.1 and 1."""
    queries = np.arange(QUERIES, dtype=np.float32)[:, None].repeat(DIM, axis=1)

    def embed(block):
        return jnp.array(members)[:, block[:, 0].astype(int)]

    options = {"temperatures": (0.1, 1.0), "k": K, **options}
    return query_confidence(embed, queries, vectors.__getitem__, result, **options)


def test_blocks_and_temperatures_change_nothing():
    members, vectors, result = problem()
    whole = confidences(members, vectors, result)
    exists = result.rows >= 0
    logits = np.einsum("mqd,qkd->qmk", members, vectors[result.rows], dtype=np.float64)
    for line, temperature in enumerate((0.1, 1.0)):
        of_queries = zip(logits, exists, strict=True)
        expected = [oracle(query[:, there], temperature) for query, there in of_queries]
        np.testing.assert_allclose(whole[line], expected, atol=2e-5)
    in_blocks = confidences(members, vectors, result, block_bytes=4 * K * DIM * 3)
    np.testing.assert_allclose(in_blocks, whole, atol=1e-6)
    assert (whole[:, 2] == 0).all()


def test_members_that_agree_have_confidence_1_for_any_distribution():
    member = np.random.default_rng(0).normal(size=(QUERIES, 1, K))
    logits, exists = jnp.array(member.repeat(MEMBERS, axis=1)), jnp.ones((QUERIES, K), bool)
    for temperature in (1e-3, 1.0):
        w = confidence(logits, exists, temperature=temperature)
        np.testing.assert_allclose(w, 1, atol=1e-6)


def test_the_order_of_members_does_not_matter_and_w_stays_between_0_and_1():
    rng = np.random.default_rng(1)
    logits = jnp.array(rng.normal(scale=30, size=(200, MEMBERS, K)))
    exists = jnp.ones((200, K), bool)
    for temperature in (1e-3, 0.1, 10.0):
        w = confidence(logits, exists, temperature=temperature)
        assert bool(((w >= 0) & (w <= 1)).all())
        permuted = confidence(logits[:, ::-1], exists, temperature=temperature)
        np.testing.assert_allclose(permuted, w, atol=1e-6)


def test_embeddings_that_are_not_numbers_name_the_query():
    members, vectors, result = problem()
    members[0, 3] = np.nan
    with pytest.raises(DataError, match="the confidence of query 3 is not a number"):
        confidences(members, vectors, result)


def calibration_error(confidence, correct):
    """ECE in float64, bin by bin, lower edges open."""
    error = 0.0
    for number in range(10):
        inside = (confidence > number / 10) & (confidence <= (number + 1) / 10)
        inside |= (number == 0) & (confidence == 0)
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    return error


def test_reliability_by_hand():
    calibration = reliability(np.array([0.15, 0.2, 0.95]), np.array([True, False, False]))
    assert calibration.count.tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(calibration.confidence[[1, 9]], [0.175, 0.95])
    np.testing.assert_allclose(calibration.accuracy[[1, 9]], [0.5, 0.0])
    assert calibration.error == pytest.approx(2 / 3 * 0.325 + 1 / 3 * 0.95)


def test_a_confidence_on_an_edge_is_below_it_also_in_float32():
    for dtype in (np.float32, np.float64):
        edges = (np.arange(11) / 10).astype(dtype)
        counts = reliability(edges, np.ones(11, bool)).count
        assert counts.tolist() == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def test_equals_a_loop_over_bins():
    rng = np.random.default_rng(0)
    for size in (1, 7, 500):
        confidence, correct = rng.random(size), rng.random(size) < 0.4
        expected = calibration_error(confidence, correct)
        assert reliability(confidence, correct).error == pytest.approx(expected)


def test_the_temperature_with_the_lowest_error(caplog):
    correct = np.array([True, True, False, False])
    confidences = np.array([[0.8] * 4, [0.95, 0.95, 0.05, 0.05], [0.9] * 4])
    with caplog.at_level(logging.WARNING, logger="taser"):
        choice = choose_temperature(confidences, correct, (0.003, 0.002, 0.001), name="squad")
    assert choice.temperature == 0.002
    assert choice.temperatures == (0.001, 0.002, 0.003)
    np.testing.assert_allclose(choice.errors, [0.4, 0.05, 0.3], atol=1e-12)
    assert not caplog.records


def test_an_edge_of_the_grid_is_warned_of(caplog):
    correct = np.array([True, False])
    confidences = np.array([[1.0, 0.0], [0.9, 0.9]])
    with caplog.at_level(logging.WARNING, logger="taser"):
        choice = choose_temperature(confidences, correct, (0.001, 0.002), name="squad")
    assert choice.temperature == 0.001
    assert "squad: the best temperature, 0.001" in caplog.text
    caplog.clear()
    choose_temperature(confidences[:1], correct, (0.001,))
    assert not caplog.records


def test_no_validation_queries():
    with pytest.raises(DataError, match="no validation queries"):
        choose_temperature(np.zeros((2, 0)), np.zeros(0, bool), (0.001, 0.002))
