import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from taser_jax.models.batch import RoutingStatistics
from taser_jax.training.losses import (
    RoutingMeasure,
    RoutingRegularizer,
    regularization,
    routing_measure,
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
        logit_sum=jnp.zeros_like(p[:, 0]),
        logit_square_sum=jnp.zeros_like(p[:, 0]),
    )


CERTAIN = [[[1.0, 0.0], [0.0, 1.0]]]
UNDECIDED = [[[0.5, 0.5], [0.5, 0.5]]]
COLLAPSED = [[[1.0, 0.0], [1.0, 0.0]]]


@jax.jit
def measures(queries, passages):
    sums = sums_of(queries), sums_of(passages)
    return [routing_measure(kind, *sums) for kind in RoutingMeasure]


def all_measures(queries, passages):
    return [float(measure) for measure in measures(np.array(queries), np.array(passages))]


FIRST, SECOND = [[[1.0, 0.0]]], [[[0.0, 1.0]]]


@pytest.mark.parametrize(
    ("queries", "passages", "per_input", "marginal", "information"),
    [
        (CERTAIN, CERTAIN, 0, np.log(2), np.log(2)),
        (UNDECIDED, UNDECIDED, np.log(2), np.log(2), 0),
        (COLLAPSED, COLLAPSED, 0, 0, 0),
        (CERTAIN + COLLAPSED, CERTAIN + COLLAPSED, 0, np.log(2) / 2, np.log(2) / 2),
        # As Det-R: each role has an expert of its own.
        (FIRST, SECOND, 0, 0, np.log(2)),
    ],
)
def test_measures_by_hand(queries, passages, per_input, marginal, information):
    found = all_measures(queries, passages)
    assert found == pytest.approx([per_input, marginal, information], abs=1e-6)


def entropy64(p):
    return -sum(float(x) * np.log(x) for x in p if x > 0)


@pytest.mark.parametrize("kind", RoutingMeasure)
@pytest.mark.parametrize("weight", [0.25, -0.25])
def test_regulariser_equals_the_float64_oracle(kind, weight):
    rng = np.random.default_rng(0)
    queries, passages = (rng.dirichlet(np.ones(4), size=(3, n)) for n in (5, 11))
    values = []
    for q, p in zip(queries, passages, strict=True):
        per_input = (np.mean([entropy64(x) for x in q]) + np.mean([entropy64(x) for x in p])) / 2
        values.append(
            {
                RoutingMeasure.PER_INPUT: per_input,
                RoutingMeasure.BATCH_MARGINAL: (entropy64(q.mean(0)) + entropy64(p.mean(0))) / 2,
                RoutingMeasure.INFORMATION: entropy64((q.mean(0) + p.mean(0)) / 2) - per_input,
            }[kind]
        )
    regularizer = RoutingRegularizer(kind=kind, weight=weight)
    result = jax.jit(lambda q, p: regularization(regularizer, sums_of(q), sums_of(p)))(
        queries, passages
    )
    assert result == pytest.approx(-weight * np.mean(values), rel=1e-5)


@pytest.mark.parametrize("kind", RoutingMeasure)
def test_sums_of_chunks_or_devices_give_the_measure_of_the_batch(kind):
    p = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 16)).astype(np.float32)
    q = p[:, ::-1][:, :8]

    @jax.jit
    def measure(q, *parts):
        sums = jax.tree.map(lambda *leaves: sum(leaves), *map(sums_of, parts))
        return routing_measure(kind, sums_of(q), sums)

    whole = measure(q, p)
    parts = [p[:, i::3] for i in range(3)]
    np.testing.assert_allclose(measure(q, *parts), whole, rtol=1e-5)
    by_input = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(None, "data"))
    sharded = measure(jax.device_put(q, by_input), jax.device_put(p, by_input))
    np.testing.assert_allclose(sharded, whole, rtol=1e-5)


def test_information_is_between_0_and_the_entropy_of_the_mean_and_names_do_not_matter():
    rng = np.random.default_rng(1)
    for experts in (2, 3, 5):
        q, p = (rng.dirichlet(np.full(experts, 0.3), size=(2, n)) for n in (4, 9))
        _, _, information = all_measures(q, p)
        assert 0 < information < np.log(experts)
        order = rng.permutation(experts)
        assert all_measures(q[..., order], p[..., order])[2] == pytest.approx(information, rel=1e-5)
        # Queries and passages in each other's place.
        assert all_measures(p, q)[2] == pytest.approx(information, rel=1e-5)


def test_the_default_raises_entropy_when_minimised():
    def term(logits):
        side = sums_of_logits(logits)
        return regularization(RoutingRegularizer(), side, side)

    def sums_of_logits(logits):
        p = jax.nn.softmax(logits)
        zeros = jnp.zeros((1, 2))
        return RoutingStatistics(
            p.sum(1), -(p * jnp.log(p)).sum((1, 2)), p.sum(1), jnp.full(1, 2.0), zeros, zeros
        )

    logits = jnp.array([[[2.0, 0.0], [1.0, 0.0]]])
    stepped = logits - 10.0 * jax.jit(jax.grad(term))(logits)
    before, after = (
        routing_measure(RoutingMeasure.PER_INPUT, side, side)
        for side in (sums_of_logits(logits), sums_of_logits(stepped))
    )
    assert after > before


@pytest.mark.parametrize("kind", [RoutingMeasure.BATCH_MARGINAL, RoutingMeasure.INFORMATION])
def test_gradient_is_finite_where_an_expert_is_never_chosen(kind):
    def measure(p):
        return routing_measure(kind, sums_of(p), sums_of(p))

    assert np.isfinite(jax.jit(jax.grad(measure))(jnp.array(COLLAPSED))).all()
