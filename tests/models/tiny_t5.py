"""A small T5 with large random weights, so that a wrong term cannot hide."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig


def tiny_t5(**changes):
    config = T5Config(
        vocab_size=50,
        embed_dim=16,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        head_dim=6,
        mlp_dim=24,
        num_buckets=8,
        max_distance=12,
    )
    return dataclasses.replace(config, **changes)


def one_block(**changes):
    """Of each stack: compiles in half the time."""
    return tiny_t5(num_layers=1, num_decoder_layers=1, **changes)


def tiny_t5_model(*, t5=None, **changes):
    return DualEncoder(T5DualEncoderConfig(t5=t5 or tiny_t5(), **changes))


def random_t5_params(model, seed=0):
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(centre, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(model))
