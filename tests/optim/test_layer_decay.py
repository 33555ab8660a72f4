import numpy as np
import pytest

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.bert import BertConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.fusion import BertFusionConfig
from taser_jax.models.parameters import abstract_params
from taser_jax.optim.optimizers import layer_factors
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
    return leaves_by_path(values)


def test_two_towers_and_few_layers():
    params = {"query_encoder": tower(2), "passage_encoder": tower(2)}
    found = factors(params, decay=0.5)
    for name in params:
        assert found[f"{name}/embeddings/word_embeddings/embedding"] == 0.5**4
        assert found[f"{name}/layers_0/attention/query/kernel"] == 0.5**3
        assert found[f"{name}/layers_1/attention/query/kernel"] == 0.5**2


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


def test_bad_input():
    with pytest.raises(ConfigError, match="no parameter lies in a layer"):
        layer_factors({"wi": np.ones(1)}, decay=0.8)
    t5 = {"token_embedder": {"embedding": np.ones(1)}, "encoder": {"layers_0": np.ones(1)}}
    with pytest.raises(ConfigError, match="no parameter lies in a layer of BERT"):
        layer_factors(t5, decay=0.8)
    with pytest.raises(ConfigError, match=r"layer decay 1\.5"):
        layer_factors(tower(1), decay=1.5)
