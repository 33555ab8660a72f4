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
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import DualEncoder, Towers, normalize
from taser_jax.models.parameters import (
    abstract_params,
    in_dtype,
    init_params,
    logical_axes,
    parameter_count,
)
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.models.stack import Remat
from taser_jax.models.t5_dual_encoder import T5Embedding
from taser_jax.storage.errors import ConfigError

RNGS = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}
MODELS = {
    "det": {"num_experts": 2},
    "sequence": {"num_experts": 2, "routing": Routing.SEQUENCE},
    "token": {"num_experts": 2, "routing": Routing.TOKEN},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DualEncoderConfig(towers=Towers.SEPARATE), 217_783_296),
        (
            DualEncoderConfig(experts=ExpertConfig(num_experts=2, routing=Routing.SEQUENCE)),
            127_787_520 + 4 * 1_538,
        ),
        (
            DualEncoderConfig(
                experts=ExpertConfig(
                    num_experts=4, routing=Routing.TOKEN, gate_sharing=GateSharing.SHARED
                )
            ),
            165_579_264 + 3_076,
        ),
    ],
)
def test_parameter_counts_of_the_papers_models(config, expected):
    assert parameter_count(abstract_params(DualEncoder(config))) == expected


def test_parameter_paths_shapes_and_axes():
    model = tiny_model(experts={"num_experts": 2, "routing": Routing.TOKEN})
    axes, shapes = logical_axes(model)["encoder"], abstract_params(model)["encoder"]
    expected = {
        ("embeddings", "token", "embedding"): ((50, 16), ("vocab", "embed")),
        ("embeddings", "position", "embedding"): ((12, 16), ("length", "embed")),
        ("layers_0", "attention", "query", "kernel"): ((16, 2, 8), ("embed", "heads", "kv")),
        ("layers_0", "attention", "out", "kernel"): ((2, 8, 16), ("heads", "kv", "embed")),
        ("layers_0", "mlp", "wi", "kernel"): ((16, 24), ("embed", "mlp")),
        ("layers_1", "experts", "wo", "kernel"): ((2, 24, 16), ("expert", "mlp", "embed")),
        ("layers_1", "experts", "layer_norm", "scale"): ((2, 16), ("expert", "embed")),
        ("layers_1", "router", "kernel"): ((16, 2), ("embed", "expert")),
    }
    for path, (shape, names) in expected.items():
        leaf, spec = shapes, axes
        for key in path:
            leaf, spec = leaf[key], spec[key]
        assert leaf.shape == shape
        assert tuple(spec) == names
    assert "mlp" not in shapes["layers_1"]
    assert jax.tree.structure(shapes) == jax.tree.structure(
        axes, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)
    )


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


def test_a_role_trains_its_own_expert_only():
    model = tiny_model(experts={"num_experts": 2})
    params = random_params(model)

    def total(p):
        return encode(model, p, tiny_tokens(), Role.PASSAGE).embeddings[:, 0].sum()

    experts = jax.jit(jax.grad(total))(params)["encoder"]["layers_1"]["experts"]
    for leaf in jax.tree.leaves(experts):
        assert not leaf[0].any()
        assert leaf[1].any()


PADDED = {
    "shared": lambda: tiny_model(pooling=Pooling.MEAN),
    "det": lambda: tiny_model(experts=MODELS["det"]),
    "sequence": lambda: tiny_model(experts=MODELS["sequence"]),
    "token": lambda: tiny_model(experts=MODELS["token"]),
    "t5": lambda: tiny_t5_model(t5=one_block()),
    "t5, mean": lambda: tiny_t5_model(t5=one_block(), embedding=T5Embedding.ENCODER_MEAN),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_and_batch_mates_change_nothing(name):
    model = PADDED[name]()
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
    params = random_params(model)
    empty = Tokens(np.zeros((2, 4), np.int32), np.zeros((2, 4), bool))

    def total(p):
        return encode(model, p, empty, Role.QUERY).embeddings.sum()

    assert all(
        jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(params))
    )


def with_remat(name, remat):
    if name == "t5":
        return tiny_t5_model(t5=one_block(remat=remat))
    bert = tiny_bert(num_layers=1, remat=remat, dropout_rate=0.1, attention_dropout_rate=0.1)
    return tiny_model(bert=bert, experts={"num_experts": 4, "blocks": (1,)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["det4", "t5"])
def test_rematerialisation_changes_no_gradient(name):
    models = [with_remat(name, remat) for remat in Remat]
    params = random_params(models[0])

    def gradient(model):
        def total(p):
            encoded = encode(model, p, tiny_tokens(), Role.PASSAGE, train=True, rngs=RNGS)
            return encoded.embeddings[:, 0].sum()

        return jax.jit(jax.grad(total))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4),
        *(gradient(model) for model in models),
    )


def in_bfloat16(name, **dtype):
    if name == "t5":
        return tiny_t5_model(t5=one_block(**dtype))
    return tiny_model(bert=tiny_bert(**dtype), experts=MODELS["sequence"])


@pytest.mark.parametrize("name", ["sequence", "t5"])
def test_bfloat16_activations_keep_float32_parameters_and_outputs(name):
    exact, model = in_bfloat16(name), in_bfloat16(name, dtype="bfloat16")
    params = random_params(model)
    found = encode(model, params, tiny_tokens(), Role.QUERY)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, found))} == {jnp.dtype("f4")}
    expected = encode(exact, params, tiny_tokens(), Role.QUERY)
    difference = np.abs(np.asarray(found.embeddings - expected.embeddings))
    assert 1e-5 < difference.max() < 0.15


def test_kernels_that_are_rounded_beforehand_change_no_bit_of_the_output():
    bert = tiny_model(bert=tiny_bert(dtype="bfloat16"), experts=MODELS["token"])
    t5 = tiny_t5_model(t5=one_block(dtype="bfloat16"), projection_dim=10)
    for model, params in ((bert, random_params(bert)), (t5, random_params(t5))):
        rounded = in_dtype(params, "bfloat16")
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(rounded)]
        assert 10 < dtypes.count(jnp.bfloat16) < len(dtypes)
        outputs = [encode(model, each, tiny_tokens(), Role.PASSAGE) for each in (params, rounded)]
        jax.tree.map(np.testing.assert_array_equal, *outputs)


def test_dropout_acts_in_training_only_and_in_attention_too(caplog):
    caplog.set_level("INFO", logger="taser")
    bert_layers._log_once.cache_clear()
    tokens = tiny_tokens()
    params = random_params(tiny_model(bert=tiny_bert(num_layers=1)))

    def embeddings(*, train, **changes):
        rates = {"num_layers": 1, "attention_dropout_rate": 0.5, **changes}
        model = tiny_model(bert=tiny_bert(**rates))
        rngs = RNGS if train else {}
        return encode(model, params, tokens, Role.QUERY, train=train, rngs=rngs).embeddings

    plain, dropped = embeddings(train=False), embeddings(train=True)
    assert np.abs(np.asarray(plain - dropped)).max() > 1e-2
    # Without attention dropout of its own, CUDNN gives way while training.
    by_kernel = embeddings(train=True, attention=AttentionKernel.CUDNN)
    np.testing.assert_array_equal(by_kernel, dropped)
    assert caplog.text.count("attention: einsum while training") == 1
    hidden = embeddings(train=True, dropout_rate=0.5, attention_dropout_rate=0.0)
    assert np.abs(np.asarray(plain - hidden)).max() > 1e-2


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="separate towers"):
        DualEncoderConfig(towers=Towers.SEPARATE, experts=ExpertConfig(num_experts=2))
    with pytest.raises(ConfigError, match=r"set blocks \(1 to 2\)"):
        DualEncoderConfig(bert=BertConfig(num_layers=2), experts=ExpertConfig(num_experts=2))
    with pytest.raises(ConfigError, match="max_length = 12"):
        jax.eval_shape(
            lambda key: init_params(tiny_model(), key, query_length=4, passage_length=13),
            jax.random.key(0),
        )
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        tiny_bert(dtype="float16")
    with pytest.raises(ConfigError, match="dropout_rate"):
        tiny_bert(dropout_rate=1.0)
    with pytest.raises(ConfigError, match="num_heads is 0"):
        tiny_bert(num_heads=0)


@pytest.mark.parametrize("pooling", Pooling)
def test_normalised_embeddings_have_the_direction_of_plain_ones_and_length_one(pooling):
    bert = tiny_bert(num_layers=1)
    plain, unit = (
        tiny_model(bert=bert, pooling=pooling, normalization=normalization)
        for normalization in (Normalization.NONE, Normalization.L2)
    )
    params, tokens = random_params(plain), tiny_tokens()
    expected = np.asarray(encode(plain, params, tokens, Role.QUERY).embeddings, np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = encode(unit, params, tokens, Role.QUERY).embeddings
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_normalising_zeros_keeps_values_and_gradients_finite():
    zeros = jnp.zeros((2, 4))
    gradient = jax.grad(lambda x: normalize(x, Normalization.L2).sum())(zeros)
    np.testing.assert_array_equal(normalize(zeros, Normalization.L2), zeros)
    assert np.isfinite(gradient).all()
