"""Calibration: by hand, against a loop over bins, and the choice of a temperature."""

import logging

import numpy as np
import pytest

from taser_jax.storage.errors import DataError
from taser_jax.systems.muf.confidence import choose_temperature, reliability


def oracle(confidence, correct):
    """ECE in float64, bin by bin, lower edges open."""
    error = 0.0
    for number in range(10):
        inside = (confidence > number / 10) & (confidence <= (number + 1) / 10)
        inside |= (number == 0) & (confidence == 0)
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    return error


def test_by_hand():
    found = reliability(np.array([0.15, 0.2, 0.95]), np.array([True, False, False]))
    assert found.count.tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(found.confidence[[1, 9]], [0.175, 0.95])
    np.testing.assert_allclose(found.accuracy[[1, 9]], [0.5, 0.0])
    assert found.error == pytest.approx(2 / 3 * 0.325 + 1 / 3 * 0.95)


def test_a_confidence_on_an_edge_is_below_it_also_in_float32():
    for dtype in (np.float32, np.float64):
        edges = (np.arange(11) / 10).astype(dtype)
        counts = reliability(edges, np.ones(11, bool)).count
        assert counts.tolist() == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def test_equals_a_loop_over_bins():
    rng = np.random.default_rng(0)
    for size in (1, 7, 500):
        confidence, correct = rng.random(size), rng.random(size) < 0.4
        assert reliability(confidence, correct).error == pytest.approx(oracle(confidence, correct))


def test_confidences_that_are_frequencies_have_no_error():
    confidence = np.repeat([0.25, 0.75], 400)
    correct = np.concatenate([np.arange(400) % 4 == 0, np.arange(400) % 4 != 0])
    assert reliability(confidence, correct).error == pytest.approx(0.0, abs=1e-12)


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
    assert choice.is_at_edge
    assert "squad: the best temperature, 0.001" in caplog.text
    assert not choose_temperature(confidences[:1], correct, (0.001,)).is_at_edge


def test_no_validation_queries():
    with pytest.raises(DataError, match="no validation queries"):
        choose_temperature(np.zeros((2, 0)), np.zeros(0, bool), (0.001, 0.002))
