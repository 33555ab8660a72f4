import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import contrastive_oracle

from taser_jax.models.batch import RoutingStatistics
from taser_jax.training.losses import (
    RoutingMeasure,
    RoutingRegularizer,
    contrastive_loss,
    positive_rank,
    regularization,
    routing_measure,
)

RNG = np.random.default_rng(0)
Q, P = (RNG.normal(size=(rows, 6)).astype(np.float32) for rows in (8, 24))
POSITIVE = RNG.permutation(24)[:8].astype(np.int32)
IGNORE = RNG.random((8, 24)) < 0.2
# The positives of these two are ignored as well, and count all the same.
IGNORE[0] = True
IGNORE[1, POSITIVE[1]] = True

compiled_loss = jax.jit(contrastive_loss, static_argnames="temperature")


def loss_of(q, p, positive, ignore=None, **options):
    """Of NumPy's arrays."""
    if ignore is not None:
        options["ignore"] = jnp.asarray(ignore)
    return compiled_loss(
        jnp.asarray(q), jnp.asarray(p), positive_index=jnp.asarray(positive, jnp.int32), **options
    )


def mean_loss(q, p, positive, ignore):
    return loss_of(q, p, positive, ignore).loss


def test_worked_example_of_the_docstring():
    queries = [[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0]]
    result = loss_of(queries, np.eye(4), [0, 2])
    np.testing.assert_allclose(result.per_query_loss, [0.493812, 2.210998], atol=2e-6)
    assert result.loss == pytest.approx(1.352405, abs=2e-6)
    assert result.rank.tolist() == [1, 2]
    assert result.accuracy == 0.5


@pytest.mark.parametrize(
    ("temperature", "dtype"), [(1.0, "float32"), (0.1, "float32"), (1.0, "bfloat16")]
)
def test_equals_the_float64_oracle(temperature, dtype):
    q, p = jnp.asarray(Q, dtype), jnp.asarray(P, dtype)
    result = loss_of(q, p, POSITIVE, IGNORE, temperature=temperature)
    scores = np.float64(q) @ np.float64(p).T / temperature
    losses, ranks = contrastive_oracle(scores, POSITIVE, IGNORE)
    np.testing.assert_allclose(result.per_query_loss, losses, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(result.loss, losses.mean(), rtol=2e-5)
    np.testing.assert_array_equal(result.rank, ranks)
    assert result.per_query_loss[0] == 0
    assert result.loss.dtype == jnp.float32


def test_ignoring_a_passage_equals_leaving_it_out():
    dropped = next(j for j in range(len(P)) if j not in POSITIVE)
    ignore = np.zeros_like(IGNORE)
    ignore[:, dropped] = True
    masked = loss_of(Q, P, POSITIVE, ignore)
    without = loss_of(Q, np.delete(P, dropped, axis=0), POSITIVE - (dropped < POSITIVE))
    np.testing.assert_allclose(masked.per_query_loss, without.per_query_loss, rtol=1e-6)
    np.testing.assert_array_equal(masked.rank, without.rank)
    gradient = jax.jit(jax.grad(mean_loss, argnums=1))(*map(jnp.asarray, (Q, P, POSITIVE, ignore)))
    assert not gradient[dropped].any()
    assert np.isfinite(gradient).all()


def test_a_duplicate_of_the_positive_ties_by_position_unless_ignored():

    def result(positive, ignore):
        return loss_of([[1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], [positive], [ignore])

    assert result(0, [False, False]).rank.tolist() == [1]
    assert result(1, [False, False]).rank.tolist() == [2]
    assert result(1, [False, False]).loss == pytest.approx(np.log(2), rel=1e-6)
    assert result(1, [True, False]).rank.tolist() == [1]
    assert result(1, [True, False]).loss == 0


def test_extreme_similarities_stay_finite():
    q = jnp.array([[1e4, 0.0], [0.0, 1e4]])
    p = jnp.array([[1e4, -1e4], [-1e4, 1e4], [1e4, 1e4]])
    positive, ignore = jnp.array([1, 1]), jnp.array([[False, False, True], [False] * 3])
    loss, gradients = jax.value_and_grad(mean_loss, argnums=(0, 1))(q, p, positive, ignore)
    assert loss == pytest.approx((2e8 + np.log(2)) / 2, rel=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_nan_scores_never_rank_well():
    scores = jnp.array([[jnp.nan, 1.0, 2.0], [3.0, jnp.nan, 1.0]])
    rank = positive_rank(scores, positive_index=jnp.array([0, 0]), positive_score=scores[:, 0])
    assert rank.tolist() == [3, 2]


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
        # A certain query and two undecided passages: H(3/4, 1/4) − ln 2 / 2.
        (FIRST, UNDECIDED, np.log(2) / 2, np.log(2) / 2, 0.5623351 - np.log(2) / 2),
    ],
)
def test_measures_by_hand(queries, passages, per_input, marginal, information):
    measured = all_measures(queries, passages)
    assert measured == pytest.approx([per_input, marginal, information], abs=1e-6)


@pytest.mark.parametrize("kind", RoutingMeasure)
@pytest.mark.parametrize("weight", [0.25, -0.25])
def test_regulariser_equals_the_float64_oracle(kind, weight):
    rng = np.random.default_rng(0)
    queries, passages = (rng.dirichlet(np.ones(4), size=(3, n)) for n in (5, 11))
    entropy = functools.partial(scipy.stats.entropy, axis=-1)
    q, p = queries.mean(1), passages.mean(1)
    per_input = (entropy(queries).mean(1) + entropy(passages).mean(1)) / 2
    of_blocks = {
        RoutingMeasure.PER_INPUT: per_input,
        RoutingMeasure.BATCH_MARGINAL: (entropy(q) + entropy(p)) / 2,
        RoutingMeasure.INFORMATION: entropy((q + p) / 2) - per_input,
    }[kind]
    regularizer = RoutingRegularizer(kind=kind, weight=weight)
    term = jax.jit(lambda q, p: regularization(regularizer, sums_of(q), sums_of(p)))
    assert term(queries, passages) == pytest.approx(-weight * of_blocks.mean(), rel=1e-5)


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


@pytest.mark.parametrize("kind", [RoutingMeasure.BATCH_MARGINAL, RoutingMeasure.INFORMATION])
def test_gradient_is_finite_where_an_expert_is_never_chosen(kind):
    def measure(p):
        return routing_measure(kind, sums_of(p), sums_of(p))

    assert np.isfinite(jax.jit(jax.grad(measure))(jnp.array(COLLAPSED))).all()
