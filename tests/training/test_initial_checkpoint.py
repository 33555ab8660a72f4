"""Towers that start as copies of another model's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.storage.errors import ConfigError
from taser_jax.training.checkpoint_directory import restore_initial_params
from taser_jax.training.checkpoints import Checkpoints
from taser_jax.training.state import TrainState

Q_SPEC = ("query_encoder_nq", "query_encoder_fever", "passage_encoder")


def tower(seed, size=6):
    keys = jax.random.split(jax.random.key(seed))
    return {
        "layers_0": {"kernel": jax.random.normal(keys[0], (size, 4))},
        "bias": jax.random.normal(keys[1], (4,)),
    }


def saved(folder, **towers):
    checkpoints = Checkpoints(folder)
    checkpoints.save(TrainState(jnp.int32(1), towers, {}), step=1, about={})
    checkpoints.close()
    return folder / "checkpoint_1"


def abstract(*names, size=6):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: tower(0, size))
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes
    )
    return dict.fromkeys(names, placed)


@pytest.mark.parametrize(
    ("have", "want", "sources"),
    [
        (["encoder"], ["encoder"], ["encoder"]),
        (["encoder"], Q_SPEC, ["encoder"] * 3),
        (["encoder"], ["query_encoder", "passage_encoder"], ["encoder"] * 2),
        (
            ["query_encoder", "passage_encoder"],
            Q_SPEC,
            ["query_encoder", "query_encoder", "passage_encoder"],
        ),
        (Q_SPEC, Q_SPEC, Q_SPEC),
    ],
)
def test_each_tower_is_a_copy_of_the_nearest_saved_one(tmp_path, have, want, sources):
    params = {name: tower(seed) for seed, name in enumerate(have)}
    checkpoint = saved(tmp_path, **params)
    found = restore_initial_params(checkpoint, abstract_params=abstract(*want))
    assert tuple(found) == tuple(want)
    for name, source in zip(want, sources, strict=True):
        jax.tree.map(np.testing.assert_array_equal, found[name], params[source])
    leaves = jax.tree.leaves(found)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(
    ("have", "want", "size", "message"),
    [
        (["encoder"], Q_SPEC, 8, r"(?s)encoder/layers_0/kernel has shape \(6, 4\).*\(8, 4\)"),
        (Q_SPEC, ["encoder"], 6, "(?s)parameter encoder/bias has shape None"),
        # A query tower that no task of the model takes is not dropped in silence.
        (Q_SPEC, Q_SPEC[1:], 6, r"query_encoder_nq/bias has shape \(4,\).*"),
        (["passage_encoder"], Q_SPEC, 6, "query_encoder_fever/bias has shape None"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, have, want, size, message):
    checkpoint = saved(tmp_path, **{name: tower(seed) for seed, name in enumerate(have)})
    with pytest.raises(ConfigError, match=message):
        restore_initial_params(checkpoint, abstract_params=abstract(*want, size=size))


def test_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint here"):
        restore_initial_params(tmp_path / "checkpoint_3", abstract_params=abstract(*Q_SPEC))
