"""The objective's options: by hand, against float64 loops, sharded, and what holds of any batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import contrastive_oracle
from tiny_models import assert_close, tiny_batch

from taser_jax.models.batch import Encoded, Normalization
from taser_jax.storage.errors import ConfigError
from taser_jax.training.objective import (
    Distance,
    Distillation,
    ObjectiveConfig,
    kl_divergence,
    margin_mse,
    own_logits,
)

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
    divergences, squares = [], []
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
        gold = [j for j, _ in pairs].index(positive)
        squares += [
            ((student[gold] - student[n]) - (teacher[gold] - teacher[n])) ** 2
            for n in range(len(pairs))
            if n != gold
        ]
    return np.mean(divergences) if config.distance is Distance.KL else np.mean(squares)


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
    distillation=Distillation(Distance.KL, weight=1.3, temperature=2.0),
    matryoshka_dims=(2, 5, DIM),
)
CONFIGS = {
    "plain": ObjectiveConfig(),
    "kl": ObjectiveConfig(distillation=OWN_KL),
    "kl alone": ObjectiveConfig(label_weight=0.0, distillation=OWN_KL, temperature=2.0),
    "margin-mse": ObjectiveConfig(distillation=Distillation(Distance.MARGIN_MSE, weight=0.1)),
    "matryoshka": ObjectiveConfig(matryoshka_dims=(3, DIM)),
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
    loss = margin_mse(jnp.array([[3.0, 1.0]]), jnp.array([[5.0, 2.0]]), every)
    assert loss == 1.0


def test_a_student_that_agrees_with_its_teacher_loses_nothing():
    _, _, batch = make_batch()
    rng = np.random.default_rng(2)
    student = rng.normal(size=batch.teacher_scores.shape).astype(np.float32)
    shift = rng.normal(size=(len(student), 1)).astype(np.float32)
    scored = jnp.isfinite(batch.teacher_scores)
    student, shift = jnp.asarray(student), jnp.asarray(shift)
    for distance in (
        lambda s, t: kl_divergence(s, t, scored),
        lambda s, t: margin_mse(s, t, scored),
    ):
        # Neither sees what all of a query's scores have in common.
        assert distance(student, student + shift) == pytest.approx(0, abs=1e-6)
        other = student + rng.normal(size=student.shape).astype(np.float32)
        assert distance(student, other) > 0.1
        # An unscored candidate counts in neither.
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
        (lambda: ObjectiveConfig(temperature=0.0), "temperature"),
        (lambda: ObjectiveConfig(label_weight=0.0), "label_weight is 0.0"),
        (lambda: ObjectiveConfig(label_weight=-1.0), "label_weight is -1.0"),
        (lambda: ObjectiveConfig(matryoshka_dims=(4, 4)), r"matryoshka_dims \[4, 4\]"),
        (lambda: ObjectiveConfig(matryoshka_dims=(0,)), r"matryoshka_dims \[0\]"),
        (lambda: Distillation(weight=0.0), "weight is 0.0"),
        (lambda: Distillation(temperature=np.nan), "temperature is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
