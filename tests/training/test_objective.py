"""The contrastive loss, routing terms and objective: by hand and against float64 loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import contrastive_oracle
from tiny_models import assert_close, tiny_batch

from taser_jax.models.batch import Encoded, Normalization, RoutingStatistics
from taser_jax.storage.errors import ConfigError
from taser_jax.training.objective import (
    Distillation,
    ObjectiveConfig,
    RoutingMeasure,
    RoutingRegularizer,
    contrastive_loss,
    kl_divergence,
    own_logits,
    positive_rank,
    regularization,
    routing_measure,
)


def random_problem(queries=8, passages=24, dim=6, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(queries, dim)).astype(np.float32)
    p = rng.normal(size=(passages, dim)).astype(np.float32)
    positive = rng.permutation(passages)[:queries].astype(np.int32)
    ignore = rng.random((queries, passages)) < 0.2
    ignore[np.arange(queries), positive] = False
    return q, p, positive, ignore


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


def test_worked_example_of_the_contrastive_loss():
    queries = [[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0]]
    result = loss_of(queries, np.eye(4), [0, 2])
    np.testing.assert_allclose(result.per_query_loss, [0.493812, 2.210998], atol=2e-6)
    assert result.loss == pytest.approx(1.352405, abs=2e-6)
    assert result.rank.tolist() == [1, 2]
    assert result.accuracy == 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_contrastive_loss_equals_the_float64_oracle(temperature):
    q, p, positive, ignore = random_problem()
    result = loss_of(q, p, positive, ignore, temperature=temperature)
    scores = q.astype(np.float64) @ p.T / temperature
    losses, ranks = contrastive_oracle(scores, positive, ignore)
    np.testing.assert_allclose(result.per_query_loss, losses, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(result.loss, losses.mean(), rtol=2e-5)
    np.testing.assert_array_equal(result.rank, ranks)


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
    losses, _ = contrastive_oracle(np.float64(q16) @ np.float64(p16).T, positive)
    assert result.loss.dtype == jnp.float32
    np.testing.assert_allclose(result.per_query_loss, losses, rtol=2e-5)


def test_nan_scores_never_rank_well():
    scores = jnp.array([[jnp.nan, 1.0, 2.0], [3.0, jnp.nan, 1.0]])
    index = jnp.array([0, 0])
    rank = positive_rank(scores, positive_index=index, positive_score=scores[:, 0])
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


@pytest.mark.parametrize("kind", [RoutingMeasure.BATCH_MARGINAL, RoutingMeasure.INFORMATION])
def test_gradient_is_finite_where_an_expert_is_never_chosen(kind):
    def measure(p):
        return routing_measure(kind, sums_of(p), sums_of(p))

    assert np.isfinite(jax.jit(jax.grad(measure))(jnp.array(COLLAPSED))).all()


DIM, NEGATIVES = 8, 2


def make_batch(queries=8, seed=0):
    """Embeddings, and a batch with false negatives to ignore and unscored random negatives."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    scores = normal(queries, 1 + NEGATIVES)
    scores[:, 1:][rng.random((queries, NEGATIVES)) < 0.3] = np.nan
    batch = tiny_batch(queries, NEGATIVES, teacher_scores=scores)
    passages = len(batch.passage_rows)
    batch.ignore[:] = rng.random((queries, passages)) < 0.15
    batch.ignore[np.arange(queries), batch.positive_index] = False
    return normal(queries, DIM), normal(passages, DIM), batch


def objective_of(config, normalization=Normalization.NONE):
    def loss(queries, passages, batch):
        sides = (Encoded(jnp.asarray(side), None) for side in (queries, passages))
        return config(*sides, batch, normalization=normalization)

    return loss


def softmax(values):
    exponentials = [np.exp(value - max(values)) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def teacher_oracle(scores, batch, config):
    """One candidate after another."""
    divergences = []
    for i, positive in enumerate(batch.positive_index):
        own = enumerate(batch.teacher_scores[i].astype(np.float64), start=positive)
        pairs = [(j, score) for j, score in own if not np.isnan(score)]
        student = [scores[i, j] for j, _ in pairs]
        teacher = [score / config.temperature for _, score in pairs]
        divergences.append(
            sum(
                p * (np.log(p) - np.log(q))
                for p, q in zip(softmax(teacher), softmax(student), strict=True)
            )
        )
    return np.mean(divergences)


def oracle(queries, passages, batch, config, normalization=Normalization.NONE):
    """The objective, term by term, in float64."""
    total = 0.0
    for dim in config.matryoshka_dims or (DIM,):
        sides = [side[:, :dim].astype(np.float64) for side in (queries, passages)]
        if dim < DIM and normalization is Normalization.L2:
            sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
        scores = sides[0] @ sides[1].T / config.temperature
        losses, _ = contrastive_oracle(scores, batch.positive_index, batch.ignore)
        total += config.label_weight * losses.mean()
        if config.distillation is not None:
            distance = teacher_oracle(scores, batch, config.distillation)
            total += config.distillation.weight * distance
    return total


OWN_KL = Distillation(weight=0.7, temperature=0.5)
EVERYTHING = ObjectiveConfig(
    temperature=0.5,
    label_weight=0.6,
    distillation=Distillation(weight=1.3, temperature=2.0),
    matryoshka_dims=(2, 5, DIM),
)
CONFIGS = {
    "plain": ObjectiveConfig(),
    "kl": ObjectiveConfig(distillation=OWN_KL),
    "kl alone": ObjectiveConfig(label_weight=0.0, distillation=OWN_KL, temperature=2.0),
    "matryoshka, cosines": ObjectiveConfig(matryoshka_dims=(3, 4), temperature=0.1),
    "everything": EVERYTHING,
}
NORMALIZATIONS = dict.fromkeys(CONFIGS, Normalization.NONE) | {
    "matryoshka, cosines": Normalization.L2,
    "everything": Normalization.L2,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_float64_oracle(name):
    queries, passages, batch = make_batch()
    objective = objective_of(CONFIGS[name], NORMALIZATIONS[name])
    loss, metrics = jax.jit(objective)(queries, passages, batch)
    expected = {
        other: oracle(queries, passages, batch, CONFIGS[other], NORMALIZATIONS[other])
        for other in CONFIGS
    }
    assert float(loss) == pytest.approx(expected[name], rel=2e-5)
    assert all(np.isfinite(value) for value in metrics.values())
    assert len(set(expected.values())) == len(expected), "every option changes the loss"


def test_eight_devices_give_the_loss_and_gradients_of_one():
    queries, passages, batch = make_batch(queries=16)
    function = jax.jit(
        jax.value_and_grad(lambda *a: objective_of(EVERYTHING, Normalization.L2)(*a)[0], (0, 1))
    )
    loss, gradients = function(queries, passages, batch)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    placed = jax.device_put((queries, passages, batch), sharding)
    sharded_loss, sharded_gradients = function(*placed)
    assert len(placed[0].sharding.device_set) == 8
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-6)
    assert min(np.abs(gradient).max() for gradient in gradients) > 1e-3
    assert_close(sharded_gradients, gradients)


def test_worked_examples_of_the_docstrings():
    positive = jnp.array([0, 2])
    numbers = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    own = own_logits(numbers, positive_index=positive, count=2)
    assert own.tolist() == [[1, 2], [7, 8]]
    teacher, student = jnp.array([[np.log(3.0), 0.0]]), jnp.zeros((1, 2))
    every = jnp.ones((1, 2), bool)
    assert kl_divergence(student, teacher, every) == pytest.approx(0.130812, abs=2e-6)


def test_a_student_that_agrees_with_its_teacher_loses_nothing():
    _, _, batch = make_batch()
    rng = np.random.default_rng(2)
    student = rng.normal(size=batch.teacher_scores.shape).astype(np.float32)
    shift = rng.normal(size=(len(student), 1)).astype(np.float32)
    scored = jnp.isfinite(batch.teacher_scores)
    student, shift = jnp.asarray(student), jnp.asarray(shift)

    def distance(student, teacher):
        return kl_divergence(student, teacher, scored)

    # It does not see what all of a query's scores have in common.
    assert distance(student, student + shift) == pytest.approx(0, abs=1e-6)
    other = student + rng.normal(size=student.shape).astype(np.float32)
    assert distance(student, other) > 0.1
    # An unscored candidate does not count.
    moved = jnp.where(scored, student, student + 100)
    np.testing.assert_allclose(distance(moved, other), distance(student, other), rtol=1e-5)
    gradient = jax.grad(distance)(student, other)
    assert np.isfinite(gradient).all()
    assert not gradient[~scored].any()


def test_the_teacher_gets_no_gradient():
    queries, passages, batch = make_batch()
    loss = objective_of(EVERYTHING, Normalization.L2)

    def of_teacher(scores):
        return loss(queries, passages, dataclasses.replace(batch, teacher_scores=scores))[0]

    assert not np.any(jax.grad(of_teacher)(batch.teacher_scores))


def test_metrics_are_those_of_the_whole_embedding():
    queries, passages, batch = make_batch()
    _, plain = objective_of(ObjectiveConfig())(queries, passages, batch)
    _, cut = objective_of(ObjectiveConfig(matryoshka_dims=(4, 2)))(queries, passages, batch)
    assert {name: float(cut[name]) for name in plain} == {
        name: float(value) for name, value in plain.items()
    }
    assert {"nll/dim_4", "nll/dim_2"} == cut.keys() - plain.keys()
    for dim in (4, 2):
        _, alone = objective_of(ObjectiveConfig())(queries[:, :dim], passages[:, :dim], batch)
        assert float(cut[f"nll/dim_{dim}"]) == pytest.approx(float(alone["nll"]), rel=1e-6)


def test_normalisation_is_the_models():
    config = ObjectiveConfig(matryoshka_dims=(4, DIM))
    fitted = config.for_model(dim=DIM, normalization=Normalization.L2)
    queries, passages, batch = make_batch()
    sides = (Encoded(jnp.asarray(side), None) for side in (queries, passages))
    expected = oracle(queries, passages, batch, config, Normalization.L2)
    assert float(fitted(*sides, batch)[0]) == pytest.approx(expected, rel=2e-5)
    with pytest.raises(ConfigError, match=rf"\[4, {DIM}\] of a model with 6 dimensions"):
        config.for_model(dim=6, normalization=Normalization.L2)


def test_a_batch_without_its_teacher_is_refused():
    queries, passages, batch = make_batch()
    with pytest.raises(ConfigError, match="taser mine"):
        objective_of(CONFIGS["kl"])(
            queries, passages, dataclasses.replace(batch, teacher_scores=None)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObjectiveConfig(label_weight=0.0), "label_weight is 0.0"),
        (lambda: ObjectiveConfig(matryoshka_dims=(4, 4)), r"matryoshka_dims \[4, 4\]"),
        (lambda: ObjectiveConfig(matryoshka_dims=(0,)), r"matryoshka_dims \[0\]"),
        (lambda: Distillation(temperature=np.nan), "temperature is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
