import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.models.encoded import (
    RoutingStatistics,
    entropy,
    expert_shares,
    input_information,
    logit_offset,
    logit_spread,
)
from taser_jax.models.routing import routing_statistics


def sums_of(probabilities):
    """Statistics of P(expert | input), shape [blocks, inputs, experts]."""
    p = np.asarray(probabilities, np.float32)
    chosen = np.eye(p.shape[-1], dtype=np.float32)[p.argmax(-1)]
    entropies = -(p * np.log(np.where(p > 0, p, 1.0))).sum((1, 2))
    count = np.full(len(p), p.shape[1], np.float32)
    logits = np.zeros((len(p), p.shape[-1]), np.float32)
    sums = (p.sum(1), entropies, chosen.sum(1), count, logits, logits)
    return RoutingStatistics(*map(jnp.asarray, sums))


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
    # Roles that never meet: ln 2, however many passages there are for a query.
    found = input_information(sums_of([[[1.0, 0.0]]]), sums_of([[[0.0, 1.0], [0.0, 1.0]]]))
    assert found == pytest.approx(np.log(2), rel=1e-6)
    # A certain query and two undecided passages: H(3/4, 1/4) − ln 2 / 2.
    found = input_information(sums_of([[[1.0, 0.0]]]), sums_of(UNDECIDED))
    assert found == pytest.approx(0.5623351 - np.log(2) / 2, rel=1e-5)
    for alike in (UNDECIDED, COLLAPSED):
        assert input_information(sums_of(alike), sums_of(alike)) == pytest.approx(0.0, abs=1e-6)


def of_logits(logits):
    """Statistics of logits [blocks, inputs, experts]."""
    real = jnp.ones((1, np.shape(logits)[1]), bool)
    blocks = [routing_statistics(jnp.asarray([block], jnp.float32), real) for block in logits]
    return jax.tree.map(lambda *sums: jnp.stack(sums), *blocks)


def test_offset_and_spread_of_two_experts_by_hand():
    # Differences 1 and 3; −5 and −5.
    statistics = of_logits([[[1.0, 0.0], [3.0, 0.0]], [[0.0, 5.0], [2.0, 7.0]]])
    np.testing.assert_allclose(logit_offset(statistics), [2.0, 5.0], rtol=1e-6)
    np.testing.assert_allclose(logit_spread(statistics), [1.0, 0.0], atol=1e-6)


def test_offset_and_spread_are_those_of_all_pairs_of_experts():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 50, 4)) + 3 * rng.normal(size=(2, 1, 4))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    differences = np.stack([logits[..., i] - logits[..., j] for i, j in pairs])
    statistics = of_logits(logits)
    offset = np.sqrt(np.mean(differences.mean(-1) ** 2, axis=0))
    spread = np.sqrt(np.mean(differences.var(-1), axis=0))
    np.testing.assert_allclose(logit_offset(statistics), offset, rtol=1e-5)
    np.testing.assert_allclose(logit_spread(statistics), spread, rtol=1e-5)
    # What every input's logits have in common changes the offset alone.
    moved = of_logits(logits + np.array([5.0, 0, 0, 0]))
    np.testing.assert_allclose(logit_spread(moved), spread, rtol=1e-4)
    assert (np.asarray(logit_offset(moved)) > offset).any()
