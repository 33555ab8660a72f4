"""MoMA's fusion: hand-made attention, and what must not change the embedding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from taser_jax.models.batch import Augmented, DocumentsShape, Role, Tokens, abstract_batch
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.fusion import (
    BertFusionConfig,
    FusedStates,
    T5FusionConfig,
    encode_with_attention,
    segment_attention,
)
from taser_jax.models.parameters import init_params
from taser_jax.models.t5 import T5Config
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.state import TrainState
from taser_jax.training.step import common_metrics

run = jax.jit(encode_with_attention, static_argnums=0)


def embed(model, params, texts, role=Role.QUERY):
    return tiny_models.encode(model, params, texts, role).embeddings


def test_no_documents_are_st5_encdec_to_the_bit():
    fusion = tiny_models.t5_fusion()
    plain = tiny_models.tiny_t5_model(t5=fusion.config.t5)
    params, tokens = tiny_models.random_params(plain), tiny_models.tiny_tokens()
    nothing = Tokens(np.zeros((5, 0, 7), np.int32), np.zeros((5, 0, 7), bool))
    texts = Augmented(tokens, nothing, np.zeros((5, 0), bool))
    for queries in (texts, tokens):
        np.testing.assert_array_equal(embed(fusion, params, queries), embed(plain, params, tokens))
    _, attention = run(fusion, params, texts)
    np.testing.assert_allclose(attention, 2.0, rtol=1e-5)


@pytest.mark.parametrize(
    "make", [tiny_models.t5_fusion, pytest.param(tiny_models.bert_fusion, marks=pytest.mark.slow)]
)
def test_order_padding_and_absent_documents_change_nothing(make):
    model, texts = make(), tiny_models.augmented(documents=3)
    params = tiny_models.random_params(model)
    embeddings, attention = run(model, params, texts)
    order = [2, 0, 1]
    reordered = jax.tree.map(lambda leaf: leaf[:, order], (texts.documents, texts.present))
    permuted = Augmented(texts.query, *reordered)
    moved = np.concatenate([attention[:, :1], attention[:, 1:][:, order]], axis=1)
    tiny_models.assert_close(run(model, params, permuted), (embeddings, moved), atol=2e-5)

    ids = np.array(texts.documents.ids)
    ids[~texts.documents.mask] = 7
    ids[~texts.present] = 9
    wide = Tokens(*(np.pad(a, ((0, 0), (0, 0), (0, 4))) for a in (ids, texts.documents.mask)))
    padded = dataclasses.replace(texts, documents=wide).resized(11)
    tiny_models.assert_close(run(model, params, padded), (embeddings, attention), atol=2e-5)
    # And documents do count.
    assert np.abs(embeddings - embed(model, params, texts.query)).max() > 0.01


def test_attention_by_hand():
    scores = np.full((1, 1, 1, 7), np.finfo(np.float32).min, np.float32)
    scores[0, 0, 0, [0, 1, 2, 3, 4]] = np.log([2, 2, 2, 2, 4])
    measure = functools.partial(segment_attention, jnp.asarray(scores), query_length=1, documents=2)
    np.testing.assert_allclose(measure(), [[1 / 6, 1 / 2, 1 / 3]], rtol=1e-6)
    nothing = segment_attention(jnp.asarray(scores[..., :4]), query_length=4, documents=0)
    np.testing.assert_allclose(nothing, [[1.0]], rtol=1e-6)
    # A third document is absent.
    padded = np.concatenate([scores, np.full_like(scores[..., :3], scores[..., -1:])], axis=-1)
    absent = segment_attention(jnp.asarray(padded), query_length=1, documents=3)
    np.testing.assert_allclose(absent, [[1 / 6, 1 / 2, 1 / 3, 0]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "documents"), [("tied", FusedStates.TOKENS), ("separate", FusedStates.EMBEDDINGS)]
)
def test_berts_fusion_starts_as_the_plain_encoder(towers, documents):
    model = tiny_models.bert_fusion(documents=documents, towers=Towers(towers))
    texts = tiny_models.augmented(length=6)
    if documents is FusedStates.EMBEDDINGS:
        rng = np.random.default_rng(0)
        texts = dataclasses.replace(texts, documents=rng.normal(size=(3, 2, 16)))
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    names = {name for tower in params for name in params[tower] if "fusion" in name}
    assert names == {"fusion", "fusion_norm", "fusion_projection"}
    if towers == "separate":
        assert not {"fusion", "fusion_norm"} & params["passage_encoder"].keys()
    passages = embed(model, params, texts.query, Role.PASSAGE)
    # Two programs: a processor may fuse their products differently.
    np.testing.assert_allclose(embed(model, params, texts), passages, rtol=1e-6)
    gradients = jax.jit(jax.grad(lambda params: embed(model, params, texts).sum()))(params)
    tower = gradients["encoder" if towers == "tied" else "query_encoder"]
    assert np.abs(tower["fusion_projection"]["kernel"]).max() > 0
    trained = tiny_models.random_params(model)
    absent = dataclasses.replace(texts, present=np.zeros((3, 2), bool))
    alone = embed(model, trained, texts.query), np.tile([4.0, 0, 0], (3, 1))
    tiny_models.assert_close(run(model, trained, absent), alone, atol=2e-5)


@pytest.mark.slow
def test_loss_and_chunks_take_documents():
    model, texts = tiny_models.t5_fusion(), tiny_models.augmented(batch=4)
    params = tiny_models.random_params(model)
    batch = dataclasses.replace(tiny_models.tiny_batch(4, 0, length=9), queries=texts)
    assert batch.memory == DocumentsShape(2, 7)
    abstract = abstract_batch((4, 9), (4, 9), memory=batch.memory)
    assert jax.tree.map(np.shape, abstract) == jax.tree.map(np.shape, batch)

    def loss_and_gradients(num_chunks):
        loss = make_loss(model, num_chunks=num_chunks, train=False)
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch, step=jnp.int32(0))

    tiny_models.assert_close(*map(loss_and_gradients, (2, 1)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [tiny_models.t5_fusion, tiny_models.bert_fusion])
def test_states_of_blocks_that_are_all_frozen_are_encoded_as_their_tokens(make):
    model, tokens = make().clone(frozen_blocks=1), tiny_models.tiny_tokens()
    params = tiny_models.random_params(model)
    states = model.apply({"params": params}, tokens, role=Role.QUERY, method="states")
    of_states, of_tokens = embed(model, params, states), embed(model, params, tokens)
    np.testing.assert_allclose(of_states, of_tokens, atol=1e-5)


def test_the_decoder_trains_on_states_of_blocks_that_are_all_frozen():
    model = DualEncoder(tiny_models.bert_fusion(decoder_layers=1).config, frozen_blocks=1)
    params, texts = tiny_models.random_params(model), tiny_models.augmented(batch=2)
    states = jax.jit(functools.partial(model.apply, method="states"), static_argnames="role")
    documents = states({"params": params}, texts.flat_documents, role=Role.PASSAGE)
    shape = texts.present.shape
    on_states = Augmented(
        states({"params": params}, texts.query, role=Role.QUERY),
        jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), documents),
        texts.present,
    )

    @jax.jit
    def gradients(params, texts):
        def total(params):
            encoded = model.apply({"params": params}, texts, role=Role.QUERY, method="encode")
            return (encoded.embeddings * jnp.arange(1.0, 17.0)).sum()

        return jax.value_and_grad(total)(params)

    value, moved = gradients(params, texts)
    np.testing.assert_allclose(gradients(params, on_states)[0], value, rtol=1e-5)
    query = moved["encoder"]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(query["fusion_projection"]))
    blocks = {name: query[name] for name in ("embeddings", "layers_0")}
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(blocks))


def test_flops_by_hand():
    """T5-base, K = 10, 32 and 128 tokens: 40.4 plain queries; 1.10 with documents' states kept."""
    t5 = T5FusionConfig(t5=T5Config())
    memory = DocumentsShape(per_query=10, length=128)
    plain = sum(t5.block_flops(32))
    fused = sum(t5.query_flops(32, memory))
    assert fused / plain == pytest.approx(40.4, abs=0.05)
    # Cross-attention to 1,280 more tokens: scores and mean of 12 heads, 768 wide, in 12 blocks.
    cross = 12 * 2 * 2 * 12 * 1280 * 768
    assert (plain + cross) / plain == pytest.approx(1.10, abs=0.005)
    documents = 10 * sum(t5.block_flops(128)[:12])
    assert fused == plain + documents + cross
    late = BertFusionConfig(documents=FusedStates.EMBEDDINGS)
    shape = DocumentsShape(per_query=10, length=1, dim=768)
    ratio = sum(late.query_flops(32, shape))
    assert 1.0 < ratio / sum(late.block_flops(32)) < 1.1


def test_a_step_counts_the_tokens_of_present_documents():
    texts = tiny_models.augmented(batch=4)
    late = Augmented(texts.query, np.zeros((4, 2, 16), np.float32), texts.present)
    # The last query's second document is absent.
    of_documents = texts.documents.mask.sum() - texts.documents.mask[-1, -1].sum()
    assert texts.documents.mask[-1, -1].any()
    for queries, expected in ((texts, of_documents), (late, 0), (texts.query, 0)):
        batch = dataclasses.replace(tiny_models.tiny_batch(4), queries=queries)
        measured = common_metrics(TrainState(jnp.int32(0), {}, ()), [batch], None)["tokens"]
        assert measured == texts.mask.sum() + batch.passages.mask.sum() + expected


def test_what_cannot_be_fused():
    with pytest.raises(ConfigError, match=r"(?s)fuses none.*t5_fusion"):
        tiny_models.encode(tiny_models.tiny_t5_model(), {}, tiny_models.augmented(), Role.QUERY)
