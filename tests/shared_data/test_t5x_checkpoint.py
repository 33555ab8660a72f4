"""A real T5X dual encoder, written by T5X itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.interop.pretrained import Pretrained, pretrained_t5, read_pretrained
from taser_jax.models.batch import Normalization, Role, Tokens
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding


def test_golden_embeddings(shared_data):
    """What T5X's own dual encoder gives for this checkpoint (flaxformer, float32)."""
    directory = shared_data / "t5x_checkpoint" / "test_de_t5_tiny.checkpoint_1000"
    t5 = pretrained_t5(directory)
    assert (t5.num_heads, t5.head_dim, t5.mlp_activations) == (2, 2, ("relu",))
    config = T5DualEncoderConfig(
        t5=t5,
        embedding=T5Embedding.ENCODER_MEAN,
        projection_dim=768,
        normalization=Normalization.L2,
    )
    model = DualEncoder(config)
    weights = Pretrained(str(directory))
    params = read_pretrained(weights, config=config, params=abstract_params(model))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, abstract_params(model))
    ids = [[71, 1712, 1566, 1, 0, 0, 0, 0], [8, 3, 9, 10, 11, 12, 13, 1]]
    tokens = Tokens(np.array(ids, np.int32), np.array(ids) > 0)
    params = jax.tree.map(jnp.asarray, params)
    embeddings = model.apply(
        {"params": params}, tokens, role=Role.PASSAGE, method="encode"
    ).embeddings
    expected = [
        [0.03877842, 0.02883413, -0.04040583, -0.01480171],
        [0.03740956, -0.00147253, -0.05738756, -0.01737572],
    ]
    np.testing.assert_allclose(embeddings[:, :4], expected, atol=2e-7)
    assert float(embeddings[0] @ embeddings[1]) == pytest.approx(0.7833494, abs=1e-6)
