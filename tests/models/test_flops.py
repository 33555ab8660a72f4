"""FLOPs by hand, and against every matrix product that JAX really traces."""

import jax
import jax.numpy as jnp
import pytest
from tiny_models import encode, tiny_model, tiny_t5, tiny_t5_model

from taser_jax.devices.compiler import matrix_products
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig, Routing, SequenceSummary
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding


def test_bert_base_by_hand():
    # A block of 256 tokens: 8·256·768² projections, 4·256²·768 attention, 4·256·768·3072 FFN.
    block = 1_207_959_552 + 201_326_592 + 2_415_919_104
    mean = DualEncoderConfig(pooling=Pooling.MEAN)
    assert mean.forward_flops(batch_size=1, length=256) == 12 * block
    # [CLS] alone in the last block: keys and values 4·256·768², query and out 4·768², one row of
    # attention 4·256·768, one FFN 4·768·3072.
    last = 603_979_776 + 2_359_296 + 786_432 + 9_437_184
    cls = DualEncoderConfig()
    assert cls.forward_flops(batch_size=2, length=256) == 2 * (11 * block + last)


def test_routing_by_hand():
    def difference(num_experts, routing, summary=SequenceSummary.CLS):
        bert = BertConfig(num_layers=3)
        experts = ExpertConfig(num_experts=num_experts, routing=routing, sequence_summary=summary)
        plain, routed = DualEncoderConfig(bert=bert), DualEncoderConfig(bert=bert, experts=experts)
        return routed.forward_flops(batch_size=1, length=10) - plain.forward_flops(
            batch_size=1, length=10
        )

    assert difference(2, Routing.DETERMINISTIC) == 0
    assert difference(4, Routing.SEQUENCE) == 2 * 768 * 4
    # Tok-R computes all ten tokens of the last block, which [CLS] pooling else leaves out.
    nine_tokens = 9 * (4 * 768**2 + 4 * 768 * 3072) + 9 * 4 * 10 * 768
    assert difference(2, Routing.TOKEN) == nine_tokens + 10 * 2 * 768 * 2
    # So does a router that reads the mean of them.
    by_mean = difference(2, Routing.SEQUENCE, SequenceSummary.MEAN)
    assert by_mean == nine_tokens + 2 * 768 * 2


def test_t5_base_by_hand():
    # An encoder block of 160 tokens: 8·160·768² projections, 4·160²·768 attention, 4·160·768·3072.
    block = 754_974_720 + 78_643_200 + 1_509_949_440
    mean = T5DualEncoderConfig(embedding=T5Embedding.ENCODER_MEAN)
    assert mean.forward_flops(batch_size=1, length=160) == 12 * block
    # A decoder block: 4·768² of self-attention, 8·768² and 4·12·160·768 of cross-attention, FFN.
    decoder = 12 * 768**2 + 4 * 12 * 160 * 768 + 4 * 768 * 3072
    both = T5DualEncoderConfig()
    assert both.forward_flops(batch_size=2, length=160) == 2 * 12 * (block + decoder)


TRACED = {
    **{
        pooling.value: lambda pooling=pooling: tiny_model(
            experts={"num_experts": 2}, pooling=pooling
        )
        for pooling in Pooling
    },
    "t5": lambda: tiny_t5_model(t5=tiny_t5(dropout_rate=0.0)),
    "t5 1.1": lambda: tiny_t5_model(
        t5=tiny_t5(dropout_rate=0.0, mlp_activations=("gelu", "linear"))
    ),
    "t5, mean": lambda: tiny_t5_model(
        t5=tiny_t5(dropout_rate=0.0), embedding=T5Embedding.ENCODER_MEAN, projection_dim=5
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_equals_what_jax_traces(name):
    model = TRACED[name]()
    tokens = Tokens(jnp.zeros((3, 7), jnp.int32), jnp.ones((3, 7), bool))

    def forward(params):
        return encode(model, params, tokens, Role.PASSAGE).embeddings.sum()

    expected = model.config.forward_flops(batch_size=3, length=7)
    params = abstract_params(model)
    for function, flops in ((forward, expected), (jax.grad(forward), 3 * expected)):
        products = matrix_products(jax.make_jaxpr(function)(params))
        assert sum(product.flops for product in products) == flops
