import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.expert_use import (
    RoutingStatistics,
    entropy,
    expert_shares,
    input_information,
    role_information,
)


def sums_of(probabilities):
    """Statistics of P(expert | input), shape [blocks, inputs, experts]."""
    p = np.asarray(probabilities, np.float32)
    chosen = np.eye(p.shape[-1], dtype=np.float32)[p.argmax(-1)]
    entropies = -(p * np.log(np.where(p > 0, p, 1.0))).sum((1, 2))
    count = np.full(len(p), p.shape[1], np.float32)
    return RoutingStatistics(*map(jnp.asarray, (p.sum(1), entropies, chosen.sum(1), count)))


def choices(*blocks):
    """So many inputs of each block sent to each of two experts, with certainty."""
    return sums_of([[[1, 0]] * first + [[0, 1]] * second for first, second in blocks])


CERTAIN = [[[1.0, 0.0], [0.0, 1.0]]]
UNDECIDED = [[[0.5, 0.5], [0.5, 0.5]]]
COLLAPSED = [[[1.0, 0.0], [1.0, 0.0]]]


def test_entropy_by_hand():
    found = entropy(jnp.array([[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]]))
    np.testing.assert_allclose(found, [np.log(2), 0.0, 0.5623351], rtol=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "shares"),
    [
        (CERTAIN, [[0.5, 0.5]]),
        (COLLAPSED, [[1.0, 0.0]]),
        (CERTAIN + COLLAPSED, [[0.5, 0.5], [1.0, 0.0]]),
    ],
)
def test_shares_by_hand(probabilities, shares):
    np.testing.assert_allclose(expert_shares(sums_of(probabilities)), shares)


def test_shares_of_no_input_are_none():
    np.testing.assert_array_equal(expert_shares(sums_of(np.zeros((2, 0, 2)))), np.zeros((2, 2)))


def test_input_information_by_hand():
    # One query to expert 0 and two passages to expert 1: H(1/3, 2/3).
    found = input_information(sums_of([[[1.0, 0.0]]]), sums_of([[[0.0, 1.0], [0.0, 1.0]]]))
    assert found == pytest.approx(np.log(3) - 2 / 3 * np.log(2), rel=1e-5)
    for alike in (UNDECIDED, COLLAPSED):
        assert input_information(sums_of(alike), sums_of(alike)) == pytest.approx(0.0, abs=1e-6)


def test_role_information_by_hand():
    # Blocks: never meet; always the same; 3 : 1 against 1 : 3 (passages twice as many).
    queries = choices((4, 0), (4, 0), (3, 1))
    passages = choices((0, 8), (8, 0), (2, 6))
    expected = [np.log(2), 0.0, 0.75 * np.log(1.5) + 0.25 * np.log(0.5)]
    np.testing.assert_allclose(role_information(queries, passages), expected, rtol=1e-6, atol=1e-12)
