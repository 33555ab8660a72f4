"""Risk-coverage and AUROC, against loops over pairs and prefixes."""

import numpy as np
import pytest

from taser_jax.storage.errors import DataError
from taser_jax.systems.muf.abstention import auroc, risk_coverage


def test_by_hand():
    confidence, correct = np.array([0.2, 0.9, 0.5]), np.array([False, True, False])
    np.testing.assert_allclose(risk_coverage(confidence, correct), [0, 1 / 2, 2 / 3])
    assert auroc(confidence, correct) == 1.0
    assert auroc(-confidence, correct) == 0.0


def test_equal_loops():
    rng = np.random.default_rng(0)
    for size in (5, 60):
        confidence = rng.integers(0, 8, size) / 8
        correct = rng.random(size) < 0.5
        correct[:2] = True, False
        pairs = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a in confidence[correct]
            for b in confidence[~correct]
        ]
        assert auroc(confidence, correct) == pytest.approx(np.mean(pairs))
        order = sorted(range(size), key=lambda place: (-confidence[place], place))
        expected = [1 - correct[order[: n + 1]].mean() for n in range(size)]
        np.testing.assert_allclose(risk_coverage(confidence, correct), expected)


def test_confidences_without_information_are_a_coin():
    correct = np.array([True, False, True, False])
    assert auroc(np.full(4, 0.3), correct) == 0.5


def test_one_class_alone_has_no_area():
    with pytest.raises(DataError, match="2 positives and 0 negatives"):
        auroc(np.array([0.1, 0.2]), np.array([True, True]))
