import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5_oracle
from tiny_models import encode, one_block, random_params, tiny_t5, tiny_t5_model, tiny_tokens

from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, parameter_count
from taser_jax.models.t5 import PositionBias, T5Config, T5Initialization
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.models.t5_layers import relative_position_bucket
from taser_jax.storage.errors import ConfigError

GATED = ("gelu", "linear")
KINDS = {"t5": {}, "1.1": {"mlp_activations": GATED}}


def embeddings(model, params, tokens, **kwargs):
    return np.asarray(encode(model, params, tokens, Role.QUERY, **kwargs).embeddings)


SMALL = {"embed_dim": 512, "num_decoder_layers": 6, "num_layers": 6, "num_heads": 8}
SMALL_1_1 = {"embed_dim": 512, "num_decoder_layers": 8, "num_layers": 8, "num_heads": 6}


@pytest.mark.parametrize(
    ("t5", "expected"),
    [
        (T5Config(), 222_903_552),
        (T5Config(mlp_dim=2048, **SMALL), 60_506_624),
        # 76,961,152 with its language-model head, which is another table of 32,128 rows.
        (T5Config(mlp_dim=1024, mlp_activations=GATED, **SMALL_1_1), 76_961_152 - 32_128 * 512),
    ],
)
def test_parameter_counts_of_published_models(t5, expected):
    """t5-base, t5-small, t5-v1_1-small."""
    assert parameter_count(abstract_params(DualEncoder(T5DualEncoderConfig(t5=t5)))) == expected


def test_buckets_by_hand():
    distance = np.array([0, -1, -7, -8, -16, -128, -(10**6), 1, 8, 128])
    found = relative_position_bucket(distance, num_buckets=32, max_distance=128)
    assert found.tolist() == [0, 1, 7, 8, 10, 15, 15, 17, 24, 31]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_oracle(kind):
    model = tiny_t5_model(t5=tiny_t5(**KINDS[kind]))
    mean = tiny_t5_model(t5=tiny_t5(**KINDS[kind]), embedding=T5Embedding.ENCODER_MEAN)
    params, tokens = random_params(model), tiny_tokens(length=17)
    without_decoder = {"encoder": {**params["encoder"]}}
    del without_decoder["encoder"]["decoder"]
    decoded, averages = embeddings(model, params, tokens), embeddings(mean, without_decoder, tokens)
    for row in range(len(decoded)):
        ids = tokens.ids[row][tokens.mask[row]]
        states = t5_oracle.encode(params["encoder"], ids, num_buckets=8, max_distance=12)
        expected = t5_oracle.first_decoder_output(params["encoder"], states)
        np.testing.assert_allclose(decoded[row], expected, atol=2e-5)
        np.testing.assert_allclose(averages[row], states.mean(0), atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_initialisation_gives_the_same_outputs(kind):
    standard, rescaled = (
        tiny_t5_model(t5=one_block(initialization=i, rms_norm_epsilon=1e-12, **KINDS[kind]))
        for i in T5Initialization
    )
    params = random_params(standard)
    assert standard.config.initial_params(params) == params
    scaled = rescaled.config.initial_params(params)
    np.testing.assert_allclose(
        embeddings(rescaled, scaled, tiny_tokens()),
        embeddings(standard, params, tiny_tokens()),
        atol=1e-4,
    )
    ratios = jax.tree.map(
        lambda a, b: round(float(jnp.abs(a).sum() / jnp.abs(b).sum()), 3), params, scaled
    )
    tower = ratios["encoder"]
    assert tower["token_embedder"]["embedding"] == 100
    for stack, attention in (
        ("encoder", "attention"),
        ("decoder", "self_attention"),
        ("decoder", "encoder_decoder_attention"),
    ):
        layer = tower[stack]["layers_0"]
        assert [layer[attention][n]["kernel"] for n in ("query", "key", "value", "out")] == [
            *(1, 1, 1),
            100,
        ]
        expected = {"wi": 10, "wo": 10} if kind == "t5" else {"wi_0": 1, "wi_1": 10, "wo": 10}
        assert {n: p["kernel"] for n, p in layer["mlp"].items()} == expected
        assert tower[stack]["relpos_bias"]["rel_embedding"] == 1


def test_dropout_acts_in_training_only_and_differs_by_key():
    model = tiny_t5_model(t5=one_block(dropout_rate=0.5))
    params = random_params(model)
    plain = embeddings(model, params, tiny_tokens())

    first, again, other = (
        embeddings(model, params, tiny_tokens(), train=True, rngs={"dropout": jax.random.key(i)})
        for i in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - plain).max() > 0.1
    assert np.abs(first - other).max() > 0.1
    kept = tiny_t5_model(t5=one_block(dropout_rate=0.0))
    undropped = embeddings(kept, params, tiny_tokens(), train=True)
    np.testing.assert_allclose(undropped, plain, atol=1e-6)


def test_own_position_tables_equal_a_shared_one_where_they_are_equal():
    shared, own = (tiny_t5_model(t5=tiny_t5(position_bias=p)) for p in PositionBias)
    params = random_params(shared)["encoder"]
    split = {**params}
    for stack in ("encoder", "decoder"):
        split[stack] = dict(params[stack])
        table = split[stack].pop("relpos_bias")
        for i in range(2):
            split[stack][f"layers_{i}"] = {**split[stack][f"layers_{i}"], "relpos_bias": table}
    np.testing.assert_allclose(
        embeddings(own, {"encoder": split}, tiny_tokens()),
        embeddings(shared, {"encoder": params}, tiny_tokens()),
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_decoder_layers": -1}, "num_decoder_layers is -1"),
        ({"num_buckets": 7}, "num_buckets is 7"),
        ({"max_distance": 2}, "max_distance is 2"),
        ({"dropout_rate": 1.0}, r"dropout_rate is 1\.0"),
        ({"dtype": "float16"}, "float32 or bfloat16"),
        ({"mlp_activations": ("silu", "linear")}, "(?s)mlp_activations.*'gelu', 'linear'"),
        ({"mlp_activations": ()}, "mlp_activations"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny_t5(**changes)
