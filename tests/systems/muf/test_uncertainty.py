"""Uncertainty of specialists: by hand."""

import csv

import numpy as np
import pytest

from taser_jax.systems.muf.calibration import reliability
from taser_jax.systems.muf.uncertainty import (
    SpecialistUncertainty,
    effective_specialists,
    uncertainty_csv,
    uncertainty_figures,
)

ONE = SpecialistUncertainty(
    "A",
    ("x",),
    {"x": np.array([0.9, 0.5, 0.7]), "y": np.array([0.6, 0.2])},
    {"x": np.array([True, False, True]), "y": np.array([False, False])},
    reliability(np.array([0.15, 0.95]), np.array([False, True])),
)


def test_areas_by_hand():
    assert ONE.error_auroc("x") == 1.0
    assert ONE.error_auroc("y") is None
    # Of six pairs of an own and a foreign query one is the wrong way round: .5 against .6.
    assert ONE.domain_auroc() == pytest.approx(5 / 6)


def test_a_line_per_specialist_and_task():
    first, second = csv.DictReader(uncertainty_csv([ONE]).splitlines())
    assert first["mean_w"] == "0.7000"
    assert first["accuracy"] == "0.6667"
    assert first["own"] == "True"
    assert (first["auroc_of_errors"], second["auroc_of_errors"]) == ("1.0000", "")
    assert second["auroc_of_own_queries"] == "0.8333"


def test_how_many_specialists_share_a_query():
    weights = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    np.testing.assert_allclose(effective_specialists(weights), [2, 1, 3])


def test_figures():
    figures = uncertainty_figures([ONE, ONE], {"x": np.full((4, 2), 0.5)})
    assert set(figures) == {"confidence.png", "abstention.png", "weights.png", "reliability.png"}
    assert len(figures["confidence.png"].axes) == 2
    bars = figures["reliability.png"].axes[0].patches
    assert [bar.get_height() for bar in bars] == [0.0, 1.0]
