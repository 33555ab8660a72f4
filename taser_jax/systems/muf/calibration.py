"""Calibration of confidences: reliability, expected calibration error, choice of temperature."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import logger

BINS = 10


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Queries by confidence, in equal bins (i/bins, (i+1)/bins]; 0 is in the first.

    Attributes:
        count: queries in each bin.
        confidence: their mean confidence; 0 where a bin is empty.
        accuracy: share of them that are right; 0 where a bin is empty.
    """

    count: Int[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]

    @property
    def error(self) -> float:
        """ECE = Σ_i |B_i|/N · |conf(B_i) − acc(B_i)| (Guo et al. 2017; DPR-MUF, equation 7)."""
        share = self.count / self.count.sum()
        return float(np.sum(share * np.abs(self.confidence - self.accuracy)))


@dataclasses.dataclass(frozen=True)
class TemperatureChoice:
    """The chosen temperature and the curve it was chosen from.

    Attributes:
        temperature: the one with the lowest error; the smallest of equal ones.
        temperatures: the candidates, ascending.
        errors: ECE at each candidate.
        reliability: reliability at the chosen temperature.
    """

    temperature: float
    temperatures: tuple[float, ...]
    errors: tuple[float, ...]
    reliability: Reliability

    @property
    def is_at_edge(self) -> bool:
        """Whether the best is at the edge of the grid, beyond which a better one may lie."""
        ends = (self.temperatures[0], self.temperatures[-1])
        return len(self.temperatures) > 1 and self.temperature in ends


def reliability(
    confidence: Float[np.ndarray, " queries"],
    correct: Bool[np.ndarray, " queries"],
    bins: int = BINS,
) -> Reliability:
    """Mean confidence and accuracy in equal bins of confidence.

    Example:
        Confidences .15, .2, .95 with the first right: bin (.1, .2] has 2 queries, confidence .175,
        accuracy .5; bin (.9, 1] has one, .95 and 0; ECE = 2/3·.325 + 1/3·.95 = .533333.

    Args:
        confidence: between 0 and 1.
        correct: whether the specialist's first passage is right.
        bins: number of bins.

    Raises:
        DataError: no query.
    """
    confidence = np.asarray(confidence, np.float64)
    if not len(confidence):
        raise DataError(
            "no query",
            where="calibration",
            expected="validation queries",
            fix="calibrate on a task that has a validation split, or set a temperature",
        )
    # float32 confidences of .2 are .200000003: they belong to (.1, .2] all the same.
    edges = np.arange(1, bins) / bins
    place = np.searchsorted(edges, np.round(confidence, 6), side="left")
    count = np.bincount(place, minlength=bins)
    filled = np.maximum(count, 1)
    return Reliability(
        count,
        np.bincount(place, confidence, bins) / filled,
        np.bincount(place, np.asarray(correct, np.float64), bins) / filled,
    )


def choose_temperature(
    confidences: Float[np.ndarray, "temperatures queries"],
    correct: Bool[np.ndarray, " queries"],
    temperatures: Sequence[float],
    *,
    name: str = "",
) -> TemperatureChoice:
    """The temperature with the lowest calibration error on validation queries.

    Args:
        confidences: confidence of each query at each temperature.
        correct: whether the specialist's first passage is right.
        temperatures: the candidates.
        name: the specialist's name, for the warning that the best is at an edge of the grid.

    Raises:
        DataError: no query.

    Source: DPR-MUF, section 4.3.
    """
    order = np.argsort(temperatures, kind="stable")
    tables = [reliability(confidences[place], correct) for place in order]
    errors = tuple(table.error for table in tables)
    best = int(np.argmin(errors))
    choice = TemperatureChoice(
        temperature=float(temperatures[order[best]]),
        temperatures=tuple(float(temperatures[place]) for place in order),
        errors=errors,
        reliability=tables[best],
    )
    if choice.is_at_edge:
        logger.warning(
            "%s: the best temperature, %g (ECE %.4f), is at an edge of the grid %g to %g; scores "
            "of another scale want another grid",
            *(name or "calibration", choice.temperature, errors[best]),
            *(choice.temperatures[0], choice.temperatures[-1]),
        )
    return choice
