import jax
import jax.numpy as jnp
import pytest
from tiny_encoder import TinyEncoder, init
from tiny_models import tiny_batch

from taser_jax.models.batch import Role
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import check_chunks, encode_groups
from taser_jax.training.losses import RoutingRegularizer, contrastive_loss, regularization

REGULARIZER = RoutingRegularizer(weight=0.5)


def encoder(model, role):
    def encode(params, tokens, key):
        dropout, routing = jax.random.split(key)
        out = model.apply(
            {"params": params},
            tokens,
            role=role,
            train=True,
            rngs={"dropout": dropout, "routing": routing},
            method="encode",
        )
        return out.embeddings, out.routing

    return encode


def loss_with(model, encode_batch):
    def loss(params, batch, key):
        sides = [(Role.QUERY, batch.queries), (Role.PASSAGE, batch.passages)]
        (q, q_sums), (p, p_sums) = [
            encode_batch(encoder(model, role), params, tokens, jax.random.fold_in(key, index))
            for index, (role, tokens) in enumerate(sides)
        ]
        nll = contrastive_loss(q, p, positive_index=jnp.asarray(batch.positive_index)).loss
        return nll + regularization(REGULARIZER, q_sums, p_sums)

    return loss


def cached(num_chunks):
    def encode_batch(encode, params, tokens, key):
        (rows,), sums = encode_groups(encode, params, [tokens], [key], num_chunks=num_chunks)
        return rows, sums

    return encode_batch


def direct(num_chunks):
    """The same chunks and keys without scan and without rematerialisation."""

    def encode_batch(encode, params, tokens, key):
        n = len(tokens.ids)
        outputs = []
        for c in range(num_chunks):
            chunk = jax.tree.map(lambda array, c=c: array[c::num_chunks], tokens)
            outputs.append(encode(params, chunk, jax.random.fold_in(key, c)))
        rows = jnp.zeros((n, outputs[0][0].shape[1]))
        for c, (embeddings, _) in enumerate(outputs):
            rows = rows.at[c::num_chunks].set(embeddings)
        return rows, jax.tree.map(lambda *leaves: sum(leaves), *[sums for _, sums in outputs])

    return encode_batch


def max_relative_difference(a, b):
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(b))
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs) / scale


@pytest.fixture(scope="module")
def problem():
    model = TinyEncoder()
    params = jax.jit(init, static_argnums=0)(model, jax.random.key(0))
    return model, params, tiny_batch(16), jax.random.key(1)


def test_gradients_are_exact_with_dropout_and_routing_noise(problem):
    model, params, batch, key = problem
    num_chunks = 2
    in_chunks = jax.jit(jax.value_and_grad(loss_with(model, cached(num_chunks))))
    loss, gradient = in_chunks(params, batch, key)
    expected_loss, expected = jax.jit(jax.value_and_grad(loss_with(model, direct(num_chunks))))(
        params, batch, key
    )
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert max_relative_difference(gradient, expected) < 1e-6
    assert float(jnp.abs(gradient["router"]["kernel"]).max()) > 1e-4
    assert float(in_chunks(params, batch, jax.random.key(2))[0]) != float(loss)


def test_one_chunk_is_the_plain_step(problem):
    model, params, batch, key = problem

    def plain(encode, params, tokens, key):
        return encode(params, tokens, key)

    programs = [
        str(jax.make_jaxpr(jax.grad(loss_with(model, encode_batch)))(params, batch, key))
        for encode_batch in (cached(1), plain, cached(2))
    ]
    assert programs[0] == programs[1] != programs[2]


def test_rows_of_a_chunk_and_their_order():
    seen = []

    def encode(params, inputs, key):
        jax.debug.callback(lambda rows: seen.append(rows.tolist()), inputs, ordered=True)
        return inputs * params, inputs.sum()

    (rows,), total = encode_groups(
        encode, jnp.float32(10.0), [jnp.arange(6.0)], [jax.random.key(0)], num_chunks=2
    )
    jax.effects_barrier()
    assert seen == [[0, 2, 4], [1, 3, 5]]
    assert rows.tolist() == [0, 10, 20, 30, 40, 50]
    assert total == 15


WIDE = TinyEncoder(dim=32, hidden=512, dropout=0.0)


def compiled_step(num_chunks):
    params = jax.eval_shape(lambda key: init(WIDE, key), jax.random.key(0))
    batch = tiny_batch(64, length=16)
    step = jax.jit(jax.grad(loss_with(WIDE, cached(num_chunks))))
    return step.lower(params, batch, jax.random.key(0)).compile()


def temporary_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_falls_with_the_number_of_chunks():
    assert temporary_bytes(compiled_step(8)) < 0.25 * temporary_bytes(compiled_step(1))


def test_chunks_must_divide(problem):
    model, params, batch, key = problem
    with pytest.raises(ConfigError, match="16 rows in 3 chunks"):
        loss_with(model, cached(3))(params, batch, key)
    with pytest.raises(ConfigError, match="0 chunks"):
        check_chunks(16, 0)
    check_chunks(16, 2, num_shards=8)
    with pytest.raises(ConfigError, match="16 rows in 4 chunks on 8 devices"):
        check_chunks(16, 4, num_shards=8)
