import jax
import numpy as np
import pytest

from taser_jax.devices.partitioning import parameter_paths
from taser_jax.models.bert import BertConfig
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.fusion import BertFusionConfig
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.optim.optimizers import layer_depths, layer_factors
from taser_jax.storage.errors import ConfigError


def tower(num_layers):
    leaf = np.ones(1)
    layer = {"attention": {"query": {"kernel": leaf}}, "mlp": {"wi": {"bias": leaf}}}
    special = {
        "attention": {"query": {"kernel": leaf}},
        "experts": {"wi": {"kernel": leaf}},
        "router": {"kernel": leaf},
    }
    layers = {f"layers_{i}": special if i % 3 == 2 else layer for i in range(num_layers)}
    return {"embeddings": {"word_embeddings": {"embedding": leaf}}, **layers}


def factors(params, **kwargs):
    values = layer_factors(params, **{"decay": 0.8} | kwargs)
    return dict(zip(parameter_paths(params), jax.tree.leaves(values), strict=True))


def test_two_towers_and_few_layers():
    params = {"query_encoder": tower(2), "passage_encoder": tower(2)}
    found = factors(params, decay=0.5)
    for name in params:
        assert found[f"{name}/embeddings/word_embeddings/embedding"] == 0.5**4
        assert found[f"{name}/layers_0/attention/query/kernel"] == 0.5**3
        assert found[f"{name}/layers_1/attention/query/kernel"] == 0.5**2


def test_a_layer_moves_less_than_the_one_above():
    found = factors(tower(12))
    by_layer = [found[f"layers_{i}/attention/query/kernel"] for i in range(12)]
    np.testing.assert_allclose(np.divide(by_layer[:-1], by_layer[1:]), 0.8)


def test_default_rules_leave_out_what_is_not_there():
    assert [depth for _, depth in layer_depths(tower(2))] == [0, 1, 2]


T5 = T5Config(
    vocab_size=8,
    embed_dim=4,
    num_layers=2,
    num_decoder_layers=3,
    num_heads=1,
    head_dim=4,
    mlp_dim=4,
)


def t5_factors(**changes):
    config = T5DualEncoderConfig(t5=T5, **changes)
    return factors(abstract_params(DualEncoder(config)), decay=0.5)


@pytest.mark.parametrize("towers", Towers)
def test_a_t5s_decoder_lies_above_its_encoder(towers):
    tasks = ("nq", "fever") if towers is Towers.SEPARATE else ()
    found = t5_factors(towers=towers, query_tasks=tasks, projection_dim=3)
    names = T5DualEncoderConfig(towers=towers, query_tasks=tasks).tower_names
    expected = {
        # depth 0 of 2 + 3 layers, and one more above them
        "token_embedder/embedding": 0.5**7,
        "encoder/relpos_bias/rel_embedding": 0.5**6,
        "encoder/layers_0/attention/query/kernel": 0.5**6,
        "encoder/layers_1/mlp/wo/kernel": 0.5**5,
        "encoder/encoder_norm/scale": 0.5**5,
        "decoder/relpos_bias/rel_embedding": 0.5**4,
        "decoder/layers_0/self_attention/value/kernel": 0.5**4,
        "decoder/layers_2/encoder_decoder_attention/out/kernel": 0.5**2,
        "decoder/layers_2/pre_mlp_layer_norm/scale": 0.5**2,
        "decoder/decoder_norm/scale": 1.0,
        "projection_layer/kernel": 1.0,
    }
    for name in names:
        assert {path: found[f"{name}/{path}"] for path in expected} == expected
    assert {path.split("/")[0] for path in found} == set(names)


def test_a_decoder_of_documents_lies_above_bert():
    bert = BertConfig(
        vocab_size=8, embed_dim=4, num_layers=1, num_heads=1, head_dim=4, mlp_dim=4, max_length=4
    )
    model = DualEncoder(BertFusionConfig(bert=bert, decoder_layers=2))
    found = factors(abstract_params(model), decay=0.5)
    assert found["encoder/embeddings/token/embedding"] == 0.5**3
    assert found["encoder/layers_0/mlp/wi/kernel"] == 0.5**2
    fusion = [factor for path, factor in found.items() if path.startswith("encoder/fusion")]
    assert len(fusion) > 2
    assert set(fusion) == {1.0}


def test_a_t5_without_a_decoder():
    found = t5_factors(embedding=T5Embedding.ENCODER_MEAN)
    assert found["encoder/token_embedder/embedding"] == 0.5**4
    assert found["encoder/encoder/layers_1/mlp/wi/kernel"] == 0.5**2
    assert found["encoder/encoder/encoder_norm/scale"] == 1.0


def test_a_t5_with_a_parameter_that_the_table_does_not_know():
    leaf = np.ones(1)
    params = {
        "encoder": {
            "token_embedder": {"embedding": leaf},
            "encoder": {"layers_0": {"wi": leaf}, "adapter": leaf},
        }
    }
    with pytest.raises(ConfigError, match="parameter encoder/encoder/adapter matches 0 rules"):
        layer_factors(params, decay=0.8)


def test_bad_input():
    with pytest.raises(ConfigError, match="no parameter lies in a layer"):
        layer_factors({"wi": np.ones(1)}, decay=0.8)
    with pytest.raises(ConfigError, match=r"layer decay 1\.5"):
        layer_factors(tower(1), decay=1.5)
