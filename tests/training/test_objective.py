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

DIM = 8
RNG = np.random.default_rng(0)
QUERIES, PASSAGES = (RNG.normal(size=(rows, DIM)).astype(np.float32) for rows in (16, 48))
BATCH = tiny_batch(16, negatives=2)
# As false negatives are.
BATCH.ignore[:] = RNG.random(BATCH.ignore.shape) < 0.15


def objective_of(config, normalization=Normalization.NONE):
    fitted = config.for_model(dim=DIM, normalization=normalization)

    def loss(queries, passages, batch):
        return fitted(*(Encoded(jnp.asarray(side), None) for side in (queries, passages)), batch)

    return loss


def oracle(config, normalization):
    """The objective, term by term, in float64."""
    total = 0.0
    for dim in config.matryoshka_dims or (DIM,):
        sides = [side[:, :dim].astype(np.float64) for side in (QUERIES, PASSAGES)]
        if dim < DIM and normalization is Normalization.L2:
            sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
        scores = sides[0] @ sides[1].T / config.temperature
        losses, _ = contrastive_oracle(scores, BATCH.positive_index, BATCH.ignore)
        total += losses.mean()
    return total


EVERYTHING = ObjectiveConfig(temperature=0.5, matryoshka_dims=(2, 5, DIM))
COSINES = ObjectiveConfig(temperature=0.1, matryoshka_dims=(3, 4))
CASES = {
    "plain": (ObjectiveConfig(), Normalization.NONE),
    "temperature": (ObjectiveConfig(temperature=2.0), Normalization.NONE),
    "matryoshka": (ObjectiveConfig(matryoshka_dims=(3, DIM)), Normalization.NONE),
    "matryoshka, cosines": (COSINES, Normalization.L2),
    "everything": (EVERYTHING, Normalization.L2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_float64_oracle(name):
    loss, metrics = jax.jit(objective_of(*CASES[name]))(QUERIES, PASSAGES, BATCH)
    expected = {other: oracle(*case) for other, case in CASES.items()}
    assert float(loss) == pytest.approx(expected[name], rel=2e-5)
    assert all(np.isfinite(value) for value in metrics.values())
    assert len(set(expected.values())) == len(expected), "every option changes the loss"


def test_eight_devices_give_the_loss_and_gradients_of_one():
    objective = objective_of(EVERYTHING, Normalization.L2)
    function = jax.jit(jax.value_and_grad(lambda *batch: objective(*batch)[0], (0, 1)))
    loss, gradients = function(QUERIES, PASSAGES, BATCH)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    placed = jax.device_put((QUERIES, PASSAGES, BATCH), sharding)
    sharded_loss, sharded_gradients = function(*placed)
    assert len(placed[0].sharding.device_set) == 8
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-6)
    assert min(np.abs(gradient).max() for gradient in gradients) > 1e-3
    assert_close(sharded_gradients, gradients)


def test_metrics_are_those_of_the_whole_embedding():
    _, plain = objective_of(ObjectiveConfig())(QUERIES, PASSAGES, BATCH)
    _, cut = objective_of(ObjectiveConfig(matryoshka_dims=(4, 2)))(QUERIES, PASSAGES, BATCH)
    assert {name: cut[name] for name in plain} == plain
    assert {"nll/dim_4", "nll/dim_2"} == cut.keys() - plain.keys()
    for dim in (4, 2):
        _, alone = objective_of(ObjectiveConfig())(QUERIES[:, :dim], PASSAGES[:, :dim], BATCH)
        assert float(cut[f"nll/dim_{dim}"]) == pytest.approx(float(alone["nll"]), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": np.nan}, "temperature is nan"),
        ({"matryoshka_dims": (4, 4)}, r"matryoshka_dims \[4, 4\]"),
        ({"matryoshka_dims": (0,)}, r"matryoshka_dims \[0\]"),
        ({"matryoshka_dims": (2, 5, 8)}, r"\[2, 5, 8\] of a model with 6 dimensions"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ObjectiveConfig(**settings).for_model(dim=6, normalization=Normalization.L2)
