"""FLOPs by hand, and against every matrix product that JAX really traces."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tiny_models import (
    augmented,
    bert_fusion,
    encode,
    t5_fusion,
    tiny_batch,
    tiny_model,
    tiny_t5,
    tiny_t5_model,
)

from taser_jax.devices.compiler import matrix_products
from taser_jax.models.batch import DocumentsShape, Embedded, Role, Tokens, abstract_batch
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.fusion import FusedStates
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig, Routing, SequenceSummary
from taser_jax.models.t5_dual_encoder import T5Embedding


def test_routing_by_hand():
    def difference(num_experts, routing, summary=SequenceSummary.CLS):
        bert = BertConfig(num_layers=3)
        experts = ExpertConfig(num_experts=num_experts, routing=routing, sequence_summary=summary)
        plain, routed = DualEncoderConfig(bert=bert), DualEncoderConfig(bert=bert, experts=experts)
        flops = [sum(each.block_flops(10)) for each in (plain, routed)]
        return flops[1] - flops[0]

    assert difference(2, Routing.DETERMINISTIC) == 0
    assert difference(4, Routing.SEQUENCE) == 2 * 768 * 4
    # Tok-R computes all ten tokens of the last block, which [CLS] pooling else leaves out.
    nine_tokens = 9 * (4 * 768**2 + 4 * 768 * 3072) + 9 * 4 * 10 * 768
    assert difference(2, Routing.TOKEN) == nine_tokens + 10 * 2 * 768 * 2
    # So does a router that reads the mean of them.
    assert difference(2, Routing.SEQUENCE, SequenceSummary.MEAN) == nine_tokens + 2 * 768 * 2


T5 = tiny_t5(dropout_rate=0.0)
GATED = tiny_t5(dropout_rate=0.0, mlp_activations=("gelu", "linear"))
TRACED = {
    **{each.value: tiny_model(experts={"num_experts": 2}, pooling=each) for each in Pooling},
    "t5": tiny_t5_model(t5=T5),
    "t5 1.1": tiny_t5_model(t5=GATED),
    "t5, mean": tiny_t5_model(t5=T5, embedding=T5Embedding.ENCODER_MEAN, projection_dim=5),
}


def traced(model, texts, role, transform=lambda function: function):
    """FLOPs of the matrix products of a forward pass, or of what becomes of it."""

    def forward(params):
        return encode(model, params, texts, role).embeddings.sum()

    products = matrix_products(jax.make_jaxpr(transform(forward))(abstract_params(model)))
    return sum(product.flops for product in products)


@pytest.mark.parametrize("model", TRACED.values(), ids=TRACED)
def test_equals_what_jax_traces(model):
    tokens = Tokens(jnp.zeros((3, 7), jnp.int32), jnp.ones((3, 7), bool))
    flops = 3 * sum(model.config.block_flops(7))
    assert traced(model, tokens, Role.PASSAGE) == flops
    assert traced(model, tokens, Role.PASSAGE, jax.grad) == 3 * flops


@pytest.mark.parametrize(
    "model",
    [t5_fusion(), bert_fusion(), bert_fusion(documents=FusedStates.EMBEDDINGS)],
    ids=["t5", "bert", "bert, late"],
)
def test_fused_queries_cost_what_jax_traces(model):
    texts, shape = augmented(batch=3), model.config.documents_shape(2, 7)
    if shape.dim:
        texts = dataclasses.replace(texts, documents=jnp.zeros((3, 2, 16)))
    length = texts.mask.shape[1]
    for memory, queries in ((shape, texts), (DocumentsShape(0, 1), texts.query)):
        flops = 3 * sum(model.config.query_flops(length, memory))
        assert flops == traced(model, queries, Role.QUERY)

    # Of three forward passes, the frozen block keeps one: a block for queries and each document.
    batch = abstract_batch((3, length), (6, 8), memory=shape)
    all_trained = model.config.training_flops(batch)
    frozen = 3 * model.config.query_flops(length, shape)[0] + 6 * model.config.block_flops(8)[0]
    for has_states, passes in ((False, 2), (True, 3)):
        flops = model.config.training_flops(batch, frozen_blocks=1, has_states=has_states)
        assert flops == all_trained - passes * frozen


@pytest.mark.parametrize("model", [tiny_model(), tiny_t5_model()], ids=["bert", "t5"])
def test_embedded_passages_cost_no_encoder(model):
    batch = tiny_batch(queries=4)
    queries = 4 * sum(model.config.block_flops(5))
    scores = 4 * 8 * 2 * model.config.embedding_dim
    embedded = dataclasses.replace(batch, passages=Embedded(jnp.zeros((8, 16))))
    assert model.config.training_flops(embedded) == 3 * (queries + scores)
