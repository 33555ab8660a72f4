import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    encode,
    one_block,
    random_params,
    tiny_bert,
    tiny_model,
    tiny_t5_model,
    tiny_tokens,
)

from taser_jax.models import bert_layers
from taser_jax.models.batch import Normalization, Role, Tokens
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import DualEncoder, Towers, normalize
from taser_jax.models.parameters import abstract_params, in_dtype, init_params
from taser_jax.models.routing import Routing
from taser_jax.models.t5_dual_encoder import T5Embedding
from taser_jax.storage.errors import ConfigError

RNGS = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}
MODELS = {
    "det": {"num_experts": 2},
    "sequence": {"num_experts": 2, "routing": Routing.SEQUENCE},
    "token": {"num_experts": 2, "routing": Routing.TOKEN},
}


def test_experts_start_as_copies_and_routers_small():
    experts = {"num_experts": 4, "routing": Routing.SEQUENCE, "blocks": (1,)}
    model = tiny_model(bert=tiny_bert(embed_dim=200, num_layers=1), experts=experts)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    layer = params["encoder"]["layers_0"]
    for leaf in jax.tree.leaves(layer["experts"]):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    assert abs(float(layer["experts"]["wi"]["kernel"].std()) - 0.02) < 0.001
    assert abs(float(layer["router"]["kernel"].std()) - 0.02) < 0.002
    assert not layer["router"]["bias"].any()


def gradients(model, params, tokens, role, task=None):
    """Of the sum of the embeddings' first numbers."""

    def total(params):
        return encode(model, params, tokens, role, task=task).embeddings[:, 0].sum()

    return jax.jit(jax.grad(total))(params)


PADDED = {
    "shared": tiny_model(pooling=Pooling.MEAN),
    **{name: tiny_model(experts=experts) for name, experts in MODELS.items()},
    "t5": tiny_t5_model(t5=one_block()),
    "t5, mean": tiny_t5_model(t5=one_block(), embedding=T5Embedding.ENCODER_MEAN),
}


@pytest.mark.parametrize("model", PADDED.values(), ids=PADDED)
def test_padding_and_batch_mates_change_nothing(model):
    params, tokens = random_params(model), tiny_tokens(length=8)

    def apply(t):
        return np.asarray(encode(model, params, t, Role.QUERY).embeddings)

    plain = apply(tokens)
    # Ids under the mask are noise: what is masked must not be read.
    noise = np.random.default_rng(0).integers(1, 50, (5, 12)).astype(np.int32)
    noise[:, :8] = np.where(tokens.mask, tokens.ids, noise[:, :8])
    padded = apply(Tokens(noise, np.pad(tokens.mask, ((0, 0), (0, 4)))))
    np.testing.assert_allclose(padded, plain, atol=5e-6)
    order = np.array([3, 1, 4, 0, 2])
    shuffled = apply(Tokens(tokens.ids[order], tokens.mask[order]))
    np.testing.assert_allclose(shuffled, plain[order], atol=5e-6)


def test_rows_of_padding_alone_stay_finite():
    experts = MODELS["token"] | {"blocks": (1,)}
    model = tiny_model(bert=tiny_bert(num_layers=1), experts=experts, pooling=Pooling.MEAN)
    empty = Tokens(np.zeros((2, 4), np.int32), np.zeros((2, 4), bool))
    gradient = gradients(model, random_params(model), empty, Role.QUERY)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def bert_in(dtype):
    return tiny_model(bert=tiny_bert(dtype=dtype), experts=MODELS["sequence"])


def t5_in(dtype):
    return tiny_t5_model(t5=one_block(dtype=dtype), projection_dim=10)


@pytest.mark.parametrize("make", [bert_in, t5_in])
def test_bfloat16_activations_keep_float32_parameters_and_outputs(make):
    exact, model = make("float32"), make("bfloat16")
    params = random_params(model)
    encoded = encode(model, params, tiny_tokens(), Role.QUERY)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, encoded))} == {jnp.dtype("f4")}
    expected = encode(exact, params, tiny_tokens(), Role.QUERY)
    assert 1e-5 < np.abs(np.asarray(encoded.embeddings - expected.embeddings)).max() < 0.15
    # Kernels that are rounded beforehand change no bit of the output.
    rounded = in_dtype(params, "bfloat16")
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(rounded)]
    assert 10 < dtypes.count(jnp.bfloat16) < len(dtypes)
    again = encode(model, rounded, tiny_tokens(), Role.QUERY)
    jax.tree.map(np.testing.assert_array_equal, again, encoded)


def test_dropout_acts_in_training_only_and_in_attention_too(caplog, monkeypatch):
    caplog.set_level("INFO", logger="taser")
    bert_layers._log_once.cache_clear()
    params = random_params(tiny_model(bert=tiny_bert(num_layers=1)))

    def embeddings(*, train, **changes):
        rates = {"num_layers": 1, "attention_dropout_rate": 0.5, "dtype": "bfloat16", **changes}
        model = tiny_model(bert=tiny_bert(**rates))
        rngs = RNGS if train else {}
        return encode(model, params, tiny_tokens(), Role.QUERY, train=train, rngs=rngs).embeddings

    plain, dropped = embeddings(train=False), embeddings(train=True)
    assert np.abs(np.asarray(plain - dropped)).max() > 1e-2
    # CUDNN gives way without a GPU and, having no attention dropout of its own, while training.
    np.testing.assert_array_equal(embeddings(train=False, attention=AttentionKernel.CUDNN), plain)
    assert caplog.text.count("needs an NVIDIA GPU") == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_array_equal(embeddings(train=True, attention=AttentionKernel.CUDNN), dropped)
    assert caplog.text.count("attention: einsum while training") == 1
    hidden = embeddings(train=True, dropout_rate=0.5, attention_dropout_rate=0.0)
    assert np.abs(np.asarray(plain - hidden)).max() > 1e-2


def test_texts_longer_than_the_position_table_are_refused():
    draw = functools.partial(init_params, tiny_model(), length=13)
    with pytest.raises(ConfigError, match="max_length = 12"):
        jax.eval_shape(draw, jax.random.key(0))


def test_normalised_embeddings_have_the_direction_of_plain_ones_and_length_one():
    bert = tiny_bert(num_layers=1)
    plain, unit = (tiny_model(bert=bert, normalization=each) for each in Normalization)
    params, tokens = random_params(plain), tiny_tokens()
    expected = np.asarray(encode(plain, params, tokens, Role.QUERY).embeddings, np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    embeddings = encode(unit, params, tokens, Role.QUERY).embeddings
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)


def test_normalising_zeros_keeps_values_and_gradients_finite():
    zeros = jnp.zeros((2, 4))
    gradient = jax.grad(lambda x: normalize(x, Normalization.L2).sum())(zeros)
    np.testing.assert_array_equal(normalize(zeros, Normalization.L2), zeros)
    assert np.isfinite(gradient).all()


TASKS = {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")}
TOWERS = ("query_encoder_nq", "query_encoder_fever", "passage_encoder")
Q_SPEC = DualEncoderConfig(bert=tiny_bert(num_layers=1), **TASKS)


def test_a_tasks_queries_train_their_own_tower_and_passages_one():
    model = DualEncoder(Q_SPEC)
    params = random_params(model)

    def trained(role, task):
        by_tower = gradients(model, params, tiny_tokens(), role, task)
        return {n for n, tree in by_tower.items() if any(x.any() for x in jax.tree.leaves(tree))}

    assert trained(Role.QUERY, "nq") == {"query_encoder_nq"}
    assert trained(Role.QUERY, "fever") == {"query_encoder_fever"}
    assert trained(Role.PASSAGE, "nq") == {"passage_encoder"}
    assert trained(Role.PASSAGE, None) == {"passage_encoder"}


def test_towers_start_as_copies():
    model = DualEncoder(Q_SPEC)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    assert params.keys() == set(TOWERS)
    kernels = [params[tower]["layers_0"]["mlp"]["wi"]["kernel"] for tower in TOWERS]
    np.testing.assert_array_equal(kernels, [kernels[0]] * 3)
    # The optimiser donates the state: two towers may not share a buffer.
    assert len({kernel.unsafe_buffer_pointer() for kernel in kernels}) == 3


# One text of padding alone.
MASK = np.arange(8) < np.array([8, 3, 1, 0])[:, None]
TEXTS = Tokens(np.random.default_rng(0).integers(2, 20, MASK.shape).astype(np.int32) * MASK, MASK)


def attending(kernel, pooling, **sizes):
    return tiny_model(bert=tiny_bert(attention=kernel, **sizes), pooling=pooling)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "pooling", "calls"),
    [("bfloat16", Pooling.MEAN, 1), ("bfloat16", Pooling.CLS, 0), ("float32", Pooling.MEAN, 0)],
)
def test_a_training_step_lowers_for_cuda(monkeypatch, dtype, pooling, calls):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    model = attending(AttentionKernel.CUDNN, pooling, dtype=dtype, num_layers=1)

    @jax.jit
    @jax.grad
    def step(params):
        return encode(model, params, TEXTS, Role.PASSAGE).embeddings.sum()

    text = step.trace(abstract_params(model)).lower(lowering_platforms=("cuda",)).as_text()
    # [CLS] pooling's last block has one query, an odd number; cuDNN has no float32.
    assert len(re.findall(r"@__cudnn\$fmhaSoftmaxBackward\(", text)) == calls


@pytest.mark.parametrize(
    ("platform", "train", "are_kept"),
    [("cuda", True, True), ("cuda", False, False), ("tpu", True, False)],
)
def test_states_keep_their_order_in_memory_in_a_gpus_training_alone(platform, train, are_kept):
    model = tiny_model(bert=tiny_bert(num_layers=1))

    @jax.jit
    def embeddings(params):
        return encode(model, params, TEXTS, Role.PASSAGE, train=train, rngs=RNGS).embeddings

    traced = embeddings.trace(abstract_params(model))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("@LayoutConstraint" in program) == are_kept


@pytest.mark.slow
@pytest.mark.parametrize("pooling", Pooling)
def test_cudnn_is_asked_for_what_the_others_compute(monkeypatch, pooling):
    # A block that another test traced would call no attention here.
    jax.clear_caches()
    asked = []
    attention = jax.nn.dot_product_attention

    def record(*arrays, implementation, **options):
        asked.append(implementation)
        return attention(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kernels = (AttentionKernel.EINSUM, AttentionKernel.CUDNN)
    models = [attending(kernel, pooling, dtype="bfloat16") for kernel in kernels]
    params = random_params(models[0])
    einsum, cudnn = (encode(m, params, TEXTS, Role.PASSAGE).embeddings for m in models)
    assert "cudnn" in asked
    real = MASK.any(axis=1)
    # Two roundings to bfloat16; texts are 0.4 apart.
    np.testing.assert_allclose(cudnn[real], einsum[real], atol=0.03)
    assert np.isfinite(cudnn).all()
