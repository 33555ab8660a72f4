import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from taser_jax.training.losses import contrastive_loss, positive_rank


def random_problem(queries=8, passages=24, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(queries, dim)).astype(np.float32)
    p = rng.normal(size=(passages, dim)).astype(np.float32)
    positive = rng.permutation(passages)[:queries].astype(np.int32)
    ignore = rng.random((queries, passages)) < 0.2
    ignore[np.arange(queries), positive] = False
    return q, p, positive, ignore


def oracle(q, p, positive, ignore, temperature):
    """The formula, query by query, in float64."""
    losses, ranks = [], []
    for i in range(len(q)):
        scores = [float(np.dot(q[i].astype(np.float64), row)) / temperature for row in p]
        kept = [j for j in range(len(p)) if j == positive[i] or not ignore[i, j]]
        gold = scores[positive[i]]
        losses.append(np.log(sum(np.exp(scores[j]) for j in kept)) - gold)
        ordered = sorted(kept, key=lambda j: (-scores[j], j))
        ranks.append(ordered.index(positive[i]) + 1)
    return np.array(losses), np.array(ranks)


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


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_equals_the_float64_oracle(temperature):
    q, p, positive, ignore = random_problem()
    result = loss_of(q, p, positive, ignore, temperature=temperature)
    losses, ranks = oracle(q, p, positive, ignore, temperature)
    np.testing.assert_allclose(result.per_query_loss, losses, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(result.loss, losses.mean(), rtol=2e-5)
    np.testing.assert_array_equal(result.rank, ranks)


def test_eight_devices_give_the_loss_and_gradients_of_one():
    arrays = [jnp.asarray(array) for array in random_problem(queries=16, passages=32)]
    function = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1)))
    loss, gradients = function(*arrays)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    sharded = [jax.device_put(array, sharding) for array in arrays]
    sharded_loss, sharded_gradients = function(*sharded)
    assert len(sharded[0].sharding.device_set) == 8
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-6)
    for one, eight in zip(gradients, sharded_gradients, strict=True):
        np.testing.assert_allclose(eight, one, rtol=1e-5, atol=1e-7)


def test_ignoring_a_passage_equals_leaving_it_out():
    q, p, positive, _ = random_problem()
    dropped = next(j for j in range(len(p)) if j not in positive)
    ignore = np.zeros((len(q), len(p)), bool)
    ignore[:, dropped] = True
    masked = loss_of(q, p, positive, ignore)
    kept = loss_of(q, np.delete(p, dropped, axis=0), positive - (positive > dropped))
    np.testing.assert_allclose(masked.per_query_loss, kept.per_query_loss, rtol=1e-6)
    np.testing.assert_array_equal(masked.rank, kept.rank)
    gradient = jax.jit(jax.grad(mean_loss, argnums=1))(*map(jnp.asarray, (q, p, positive, ignore)))
    assert not gradient[dropped].any()
    assert np.isfinite(gradient).all()


def test_ignore_never_applies_to_the_positive():
    q, p, positive, _ = random_problem()
    result = loss_of(q, p, positive, np.ones((len(q), len(p)), bool))
    np.testing.assert_array_equal(result.per_query_loss, np.zeros(len(q)))
    np.testing.assert_array_equal(result.rank, np.ones(len(q)))


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


def test_bfloat16_embeddings_give_a_float32_loss():
    q, p, positive, _ = random_problem()
    q16, p16 = jnp.asarray(q, jnp.bfloat16), jnp.asarray(p, jnp.bfloat16)
    result = loss_of(q16, p16, positive)
    none = np.zeros((len(q), len(p)), bool)
    losses, _ = oracle(np.float32(q16), np.float32(p16), positive, none, 1.0)
    assert result.loss.dtype == jnp.float32
    np.testing.assert_allclose(result.per_query_loss, losses, rtol=2e-5)


def test_nan_scores_never_rank_well():
    scores = jnp.array([[jnp.nan, 1.0, 2.0], [3.0, jnp.nan, 1.0]])
    index = jnp.array([0, 0])
    rank = positive_rank(scores, positive_index=index, positive_score=scores[:, 0])
    assert rank.tolist() == [3, 2]
