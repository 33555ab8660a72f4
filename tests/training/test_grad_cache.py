"""Chunks: the gradients of one pass, each row in its place, and less memory."""

import jax
import jax.numpy as jnp
import pytest
from tiny_encoder import TinyEncoder, init
from tiny_models import assert_close, tiny_batch

from taser_jax.storage.errors import ConfigError
from taser_jax.training import batch_loss
from taser_jax.training.losses import RoutingRegularizer
from taser_jax.training.objective import ObjectiveConfig

MODEL = TinyEncoder()
OBJECTIVE = ObjectiveConfig(regularizer=RoutingRegularizer(weight=0.5))


def loss_of(num_chunks, model=MODEL, batch=None):
    loss = batch_loss.make_loss(model, objective=OBJECTIVE, num_chunks=num_chunks)
    batch = batch or tiny_batch(16)
    return lambda params, step: loss(params, batch, step=step)[0]


def one_after_another(encode, params, groups, keys, *, num_chunks):
    """`encode_groups` of one group, with the same keys, but no scan and no rematerialisation."""
    (tokens,), (key,) = groups, keys
    if num_chunks == 1:
        rows, sums = encode(params, tokens, key)
        return [rows], sums

    def encode_chunk(c):
        chunk = jax.tree.map(lambda array: array[c::num_chunks], tokens)
        return encode(params, chunk, jax.random.fold_in(key, c))

    parts, sums = zip(*map(encode_chunk, range(num_chunks)), strict=True)
    rows = jnp.stack(parts, axis=1).reshape(len(tokens.ids), -1)
    return [rows], jax.tree.map(lambda *leaves: sum(leaves), *sums)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init, static_argnums=0)(MODEL, jax.random.key(0))


def test_gradients_are_exact_with_dropout_and_routing_noise(params, monkeypatch):
    in_chunks = jax.jit(jax.value_and_grad(loss_of(2)))
    loss, gradient = in_chunks(params, 0)
    assert float(in_chunks(params, 1)[0]) != float(loss)
    assert float(jnp.abs(gradient["router"]["kernel"]).max()) > 1e-4
    monkeypatch.setattr(batch_loss, "encode_groups", one_after_another)
    expected = jax.jit(jax.value_and_grad(loss_of(2)))(params, 0)
    assert_close((loss, gradient), expected, rtol=1e-6, atol=1e-6)


def test_one_chunk_is_the_plain_step(params, monkeypatch):
    def program(num_chunks):
        return str(jax.make_jaxpr(jax.grad(loss_of(num_chunks)))(params, 0))

    one_chunk, two_chunks = program(1), program(2)
    monkeypatch.setattr(batch_loss, "encode_groups", one_after_another)
    assert one_chunk == program(1) != two_chunks


@pytest.mark.slow
def test_memory_falls_with_the_number_of_chunks():
    wide, batch = TinyEncoder(dim=32, hidden=512, dropout=0.0), tiny_batch(64, length=16)
    shapes = jax.eval_shape(lambda key: init(wide, key), jax.random.key(0))

    def temporary_bytes(num_chunks):
        step = jax.jit(jax.grad(loss_of(num_chunks, wide, batch)))
        return step.lower(shapes, 0).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < 0.25 * temporary_bytes(1)


def test_chunks_must_divide(params):
    with pytest.raises(ConfigError, match="16 rows in 3 chunks"):
        loss_of(3)(params, jnp.int32(0))
    with pytest.raises(ConfigError, match="0 chunks"):
        batch_loss.check_chunks(16, 0)
    batch_loss.check_chunks(16, 2, num_shards=8)
    with pytest.raises(ConfigError, match="16 rows in 4 chunks on 8 devices"):
        batch_loss.check_chunks(16, 4, num_shards=8)
