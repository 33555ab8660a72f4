"""The objective's options: by hand, against float64 loops, sharded, and what holds of any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import contrastive_oracle
from tiny_models import assert_close, tiny_batch

from taser_jax.models.batch import Encoded, Normalization
from taser_jax.storage.errors import ConfigError
from taser_jax.training.objective import ObjectiveConfig

DIM, NEGATIVES = 8, 2


def make_batch(queries=8, seed=0):
    """Embeddings, and a batch with false negatives to ignore."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    batch = tiny_batch(queries, NEGATIVES)
    passages = len(batch.passage_rows)
    batch.ignore[:] = rng.random((queries, passages)) < 0.15
    batch.ignore[np.arange(queries), batch.positive_index] = False
    return normal(queries, DIM), normal(passages, DIM), batch


def objective_of(config, normalization=Normalization.NONE):
    def loss(queries, passages, batch):
        sides = (Encoded(jnp.asarray(side), None) for side in (queries, passages))
        return config(*sides, batch, normalization=normalization)

    return loss


def oracle(queries, passages, batch, config, normalization=Normalization.NONE):
    """The objective, term by term, in float64."""
    total = 0.0
    for dim in config.matryoshka_dims or (DIM,):
        sides = [side[:, :dim].astype(np.float64) for side in (queries, passages)]
        if dim < DIM and normalization is Normalization.L2:
            sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
        scores = sides[0] @ sides[1].T / config.temperature
        losses, _ = contrastive_oracle(scores, batch.positive_index, batch.ignore)
        total += losses.mean()
    return total


EVERYTHING = ObjectiveConfig(temperature=0.5, matryoshka_dims=(2, 5, DIM))
CONFIGS = {
    "plain": ObjectiveConfig(),
    "temperature": ObjectiveConfig(temperature=2.0),
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObjectiveConfig(temperature=0.0), "temperature is 0.0"),
        (lambda: ObjectiveConfig(temperature=np.nan), "temperature is nan"),
        (lambda: ObjectiveConfig(matryoshka_dims=(4, 4)), r"matryoshka_dims \[4, 4\]"),
        (lambda: ObjectiveConfig(matryoshka_dims=(0,)), r"matryoshka_dims \[0\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
