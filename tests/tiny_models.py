"""Small models with large random weights, so that a wrong term cannot hide, and texts for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.models.batch import Augmented, Batch, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.fusion import BertFusionConfig, T5FusionConfig
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig

NUM_HEADS = 2
BLOCKS = (2,)


def tiny_bert(**changes):
    config = BertConfig(
        vocab_size=50,
        embed_dim=16,
        num_layers=2,
        num_heads=NUM_HEADS,
        head_dim=8,
        mlp_dim=24,
        max_length=12,
        # Its random bits double the time of compiling.
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    return dataclasses.replace(config, **changes)


def tiny_model(*, bert=None, experts=None, **changes):
    """Block 1 is shared; block 2 is specialised where `experts` says so."""
    experts = ExpertConfig(**({"blocks": BLOCKS} | (experts or {})))
    return DualEncoder(DualEncoderConfig(bert=bert or tiny_bert(), experts=experts, **changes))


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


def t5_fusion(t5=None):
    return DualEncoder(T5FusionConfig(t5=t5 or one_block()))


def bert_fusion(**changes):
    return DualEncoder(BertFusionConfig(bert=tiny_bert(num_layers=1), **changes))


def random_params(model, seed=0):
    """Every parameter random, experts all different."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        # Routers loud enough that inputs differ in what they choose.
        scale = 2.0 if path[-2].key == "router" and path[-1].key == "kernel" else 0.3
        return jnp.asarray(rng.normal(centre, scale, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(model))


def tiny_tokens(batch=5, length=9, seed=1):
    """Rows of different lengths, one of them full, one of [CLS] alone."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, length, batch)
    lengths[0], lengths[-1] = length, 1
    mask = np.arange(length) < lengths[:, None]
    return Tokens(np.where(mask, rng.integers(1, 50, mask.shape), 0).astype(np.int32), mask)


def tiny_batch(queries=16, negatives=1, length=5, seed=0, **changes):
    """Texts of different lengths; passage i·(1 + negatives) is query i's positive."""
    rng = np.random.default_rng(seed)
    passages = queries * (1 + negatives)

    def tokens(n):
        mask = np.arange(length) < rng.integers(1, length + 1, size=(n, 1))
        return Tokens(np.where(mask, rng.integers(1, 50, mask.shape), 0).astype(np.int32), mask)

    return Batch(
        **{
            "queries": tokens(queries),
            "passages": tokens(passages),
            "positive_index": np.arange(queries, dtype=np.int32) * (1 + negatives),
            "ignore": np.zeros((queries, passages), bool),
            "query_rows": np.arange(queries, dtype=np.int32),
            "passage_rows": np.arange(passages, dtype=np.int32),
        }
        | changes
    )


def augmented(batch=3, documents=2, length=7, seed=1):
    """Queries with documents of different lengths; the last query's last document is absent."""
    tokens = tiny_tokens(batch * documents, length, seed=seed + 1)
    shape = (batch, documents, length)
    present = np.ones((batch, documents), bool)
    present[-1, -1:] = False
    return Augmented(
        tiny_tokens(batch, seed=seed),
        Tokens(tokens.ids.reshape(shape), tokens.mask.reshape(shape)),
        present,
    )


def assert_close(actual, expected, *, rtol=1e-4, atol=1e-6):
    """Of trees of arrays."""

    def check(path, one, other):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=where)

    jax.tree_util.tree_map_with_path(check, actual, expected)


@functools.partial(jax.jit, static_argnames=("model", "role", "task", "train"))
def encode(model, params, tokens, role, task=None, *, train=False, rngs=None):
    return model.apply(
        {"params": params}, tokens, role=role, task=task, train=train, rngs=rngs, method="encode"
    )
