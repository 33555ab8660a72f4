"""FLOPs and bytes by hand, and against every matrix product that JAX really traces."""

import jax
import jax.numpy as jnp
import pytest
from test_flops import traced_flops
from tiny_bert import encode
from tiny_t5 import tiny_t5, tiny_t5_model

from taser_jax.models.batch import BatchShape, Role, Tokens
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding

SMALLEST = T5Config(
    vocab_size=9,
    embed_dim=2,
    num_layers=1,
    num_decoder_layers=1,
    num_heads=1,
    head_dim=3,
    mlp_dim=5,
)


def test_t5_base_by_hand():
    # An encoder block of 160 tokens: 8·160·768² projections, 4·160²·768 attention, 4·160·768·3072.
    block = 754_974_720 + 78_643_200 + 1_509_949_440
    mean = T5DualEncoderConfig(embedding=T5Embedding.ENCODER_MEAN)
    assert mean.forward_flops(batch_size=1, length=160) == 12 * block
    # A decoder block: 4·768² of self-attention, 8·768² and 4·12·160·768 of cross-attention, FFN.
    decoder = 12 * 768**2 + 4 * 12 * 160 * 768 + 4 * 768 * 3072
    both = T5DualEncoderConfig()
    assert both.forward_flops(batch_size=2, length=160) == 2 * 12 * (block + decoder)


def test_training_by_hand():
    # One token: 4 projections 12 each, 2 attention products 6 each, 2 FFN products 20 each; then
    # decoder 6 projections, 2 products with the encoder's one state 4 each, 2 FFN products.
    text = (48 + 12 + 40) + (72 + 8 + 40)
    shape = BatchShape(queries=2, query_length=1, passages=3, passage_length=1)
    scores = 2 * 2 * 3 * 2
    config = T5DualEncoderConfig(t5=SMALLEST)
    assert config.training_flops(shape) == 3 * (5 * text + scores)


@pytest.mark.parametrize(
    ("changes", "t5"),
    [
        ({}, {}),
        ({}, {"mlp_activations": ("gelu", "linear")}),
        ({"embedding": T5Embedding.ENCODER_MEAN, "projection_dim": 5}, {}),
    ],
)
def test_equals_what_jax_traces(changes, t5):
    model = tiny_t5_model(t5=tiny_t5(dropout_rate=0.0, **t5), **changes)
    tokens = Tokens(jnp.zeros((3, 7), jnp.int32), jnp.ones((3, 7), bool))

    def forward(params):
        return encode(model, params, tokens, Role.PASSAGE).embeddings.sum()

    expected = model.config.forward_flops(batch_size=3, length=7)
    params = abstract_params(model)
    assert traced_flops(jax.make_jaxpr(forward)(params).jaxpr) == expected
    assert traced_flops(jax.make_jaxpr(jax.grad(forward))(params).jaxpr) == 3 * expected
