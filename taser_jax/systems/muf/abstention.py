"""How well a confidence selects the queries to answer."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from taser_jax.storage.errors import DataError


def risk_coverage(
    confidence: Float[np.ndarray, " queries"], correct: Bool[np.ndarray, " queries"]
) -> Float[np.ndarray, " queries"]:
    """Share of errors among the n queries of highest confidence, for every n; stable for equals.

    Example:
        >>> risk_coverage(np.array([0.2, 0.9, 0.5]), np.array([False, True, False])).tolist()
        [0.0, 0.5, 0.6666666666666666]

    Args:
        confidence: higher is surer.
        correct: whether each query's result is right.

    Source: Geifman and El-Yaniv, NeurIPS 2017, "Selective classification for deep neural networks".
    """
    wrong = ~np.asarray(correct, bool)[np.argsort(-confidence, kind="stable")]
    return np.cumsum(wrong) / np.arange(1, len(wrong) + 1)


def auroc(
    confidence: Float[np.ndarray, " queries"], correct: Bool[np.ndarray, " queries"]
) -> float:
    """Probability that a right query is surer than a wrong one; equals count one half.

    Example:
        >>> auroc(np.array([0.9, 0.5, 0.5, 0.1]), np.array([True, True, False, False]))
        0.875

    Args:
        confidence: higher is surer.
        correct: the positive class: right results, or a specialist's own queries.

    Raises:
        DataError: all queries are of one class.
    """
    correct = np.asarray(correct, bool)
    positives, negatives = int(correct.sum()), int((~correct).sum())
    if not positives or not negatives:
        raise DataError(
            f"{positives} positives and {negatives} negatives",
            where="AUROC",
            expected="at least one of each",
            fix="compare tasks, or measure on queries of which some are wrong",
        )
    _, place, count = np.unique(confidence, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    wins = ranks[correct].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))
