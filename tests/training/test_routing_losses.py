import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.expert_use import RoutingStatistics
from taser_jax.training.routing_losses import (
    Direction,
    EntropyKind,
    RoutingRegularizer,
    regularization,
    routing_entropy,
)


def sums_of(probabilities):
    """Statistics of P(expert | input), shape [blocks, inputs, experts]."""
    p = jnp.asarray(probabilities, jnp.float32)
    logs = jnp.log(jnp.where(p > 0, p, 1.0))
    return RoutingStatistics(
        probability_sum=p.sum(1),
        entropy_sum=-(p * logs).sum((1, 2)),
        choice_count=jax.nn.one_hot(p.argmax(-1), p.shape[-1]).sum(1),
        count=jnp.full(len(p), float(p.shape[1])),
    )


CERTAIN = [[[1.0, 0.0], [0.0, 1.0]]]
UNDECIDED = [[[0.5, 0.5], [0.5, 0.5]]]
COLLAPSED = [[[1.0, 0.0], [1.0, 0.0]]]


@pytest.mark.parametrize(
    ("probabilities", "per_input", "marginal"),
    [
        (CERTAIN, 0.0, np.log(2)),
        (UNDECIDED, np.log(2), np.log(2)),
        (COLLAPSED, 0.0, 0.0),
        (CERTAIN + COLLAPSED, 0.0, np.log(2) / 2),
    ],
)
def test_entropies_by_hand(probabilities, per_input, marginal):
    statistics = sums_of(probabilities)
    assert routing_entropy(statistics, EntropyKind.PER_INPUT) == pytest.approx(per_input)
    assert routing_entropy(statistics, EntropyKind.BATCH_MARGINAL) == pytest.approx(marginal)


def entropy64(p):
    return -sum(float(x) * np.log(x) for x in p if x > 0)


@pytest.mark.parametrize("kind", list(EntropyKind))
@pytest.mark.parametrize("direction", list(Direction))
def test_regulariser_equals_the_float64_oracle(kind, direction):
    rng = np.random.default_rng(0)
    sides = [rng.dirichlet(np.ones(4), size=(3, n)) for n in (5, 11)]
    total = 0.0
    for side in sides:
        for block in side:
            if kind is EntropyKind.PER_INPUT:
                value = np.mean([entropy64(p) for p in block])
            else:
                value = entropy64(block.mean(0))
            total += value / 3 / 2
    sign = -1 if direction is Direction.MAXIMIZE else 1
    regularizer = RoutingRegularizer(kind=kind, direction=direction, weight=0.25)
    result = regularization(regularizer, *map(sums_of, sides))
    assert result == pytest.approx(sign * 0.25 * total, rel=1e-5)


def test_sums_of_chunks_give_the_entropy_of_the_batch():
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 12))
    whole = sums_of(p)
    parts = jax.tree.map(lambda *leaves: sum(leaves), *[sums_of(p[:, i::3]) for i in range(3)])
    for kind in EntropyKind:
        np.testing.assert_allclose(
            routing_entropy(parts, kind), routing_entropy(whole, kind), rtol=1e-6
        )


def test_the_default_raises_entropy_when_minimised():
    def term(logits):
        side = sums_of_logits(logits)
        return regularization(RoutingRegularizer(), side, side)

    def sums_of_logits(logits):
        p = jax.nn.softmax(logits)
        return RoutingStatistics(
            p.sum(1), -(p * jnp.log(p)).sum((1, 2)), p.sum(1), jnp.full(1, 2.0)
        )

    logits = jnp.array([[[2.0, 0.0], [1.0, 0.0]]])
    stepped = logits - 10.0 * jax.grad(term)(logits)
    before, after = (
        routing_entropy(sums_of_logits(x), EntropyKind.PER_INPUT) for x in (logits, stepped)
    )
    assert after > before


def test_gradient_is_finite_where_an_expert_is_never_chosen():
    def marginal(p):
        return routing_entropy(sums_of(p), EntropyKind.BATCH_MARGINAL)

    assert np.isfinite(jax.grad(marginal)(jnp.array(COLLAPSED))).all()
