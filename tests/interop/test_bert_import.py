import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from bert_checkpoints import random_tensors, write_config

from taser_jax.interop.bert import bert_leaves, encoder_from_tensors
from taser_jax.interop.bert_formats import bert_config, config_to_json
from taser_jax.interop.tensors import params_to_tensors
from taser_jax.models.bert_config import BertConfig, Family
from taser_jax.models.layers import Activation
from taser_jax.storage.errors import ConfigError, DataError

TINY = BertConfig(
    vocab_size=40, embed_dim=16, num_layers=4, num_heads=2, head_dim=8, mlp_dim=24, max_length=12
)


@pytest.mark.parametrize("activation", Activation)
def test_config_comes_back(tmp_path, activation):
    changes = {"dropout_rate": 0.2, "layer_norm_epsilon": 1e-5}
    config = dataclasses.replace(TINY, activation=activation, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)), encoding="utf-8")
    assert bert_config(tmp_path) == config


def test_a_nomic_bert_with_local_attention_cannot_leave():
    with pytest.raises(ConfigError, match="blocks that attend to near tokens alone"):
        config_to_json(dataclasses.replace(TINY, family=Family.NOMIC_BERT))


DEBERTA = {"model_type": "deberta", "architectures": ["DebertaModel"]}
YARN = {"rope_theta": 1, "rope_type": "yarn"}
OTHERWISE = ["sliding_attention", "full_attention"]
# What is said -> what a checkpoint has otherwise.
UNUSABLE = {
    "'deberta'.*bert, distilbert, roberta, mpnet, modernbert, nomic_bert, xlm-roberta": DEBERTA,
    "ElectraModel.*bert, ": {"model_type": None, "architectures": ["ElectraModel"]},
    "prenorm is True; only False": {"model_type": "nomic_bert", "prenorm": True},
    "rope_type is 'yarn'": {"model_type": "nomic_bert", "rope_parameters": YARN},
    "layer_types is not one global block": {"model_type": "modernbert", "layer_types": OTHERWISE},
    "pad_token_id is 0; only 1": {"model_type": "roberta", "pad_token_id": 0},
    "'quick_gelu'.*gelu, .*gelu_new.*relu": {"hidden_act": "quick_gelu"},
    "field 'layer_norm_eps.*above 0": {"layer_norm_eps": 0},
    "num_hidden_layers.*, 1000 or less": {"num_hidden_layers": 10**5},
    # A field that is null counts as absent.
    "required field": {"vocab_size": None},
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_configurations_that_cannot_be_used(tmp_path, message):
    write_config(tmp_path, **UNUSABLE[message])
    with pytest.raises((ConfigError, DataError), match=f"(?s){message}"):
        bert_config(tmp_path)


def test_an_old_config_without_model_type(tmp_path):
    write_config(tmp_path, model_type=None, position_embedding_type=None)
    assert bert_config(tmp_path) == TINY


def with_old_names(tensors):
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {n.replace(new, name): t for n, t in tensors.items()}
    return tensors


def with_heads(tensors):
    """As BertForPreTraining, coCondenser's head and old versions' buffers leave them."""
    return {
        **{f"bert.{name}": tensor for name, tensor in tensors.items()},
        "bert.embeddings.position_ids": np.arange(12)[None],
        "bert.pooler.dense.weight": np.zeros((16, 16), np.float32),
        "cls.predictions.transform.LayerNorm.gamma": np.zeros(16, np.float32),
        "cls.predictions.decoder.weight": np.zeros((40, 16), np.float32),
        "cls.seq_relationship.weight": np.zeros((2, 16), np.float32),
        "c_head.0.attention.self.query.weight": np.zeros((16, 16), np.float32),
        "lm.cls.bias": np.zeros(40, np.float32),
    }


@pytest.mark.parametrize(
    "disguise",
    [
        with_heads,
        with_old_names,
        lambda t: {f"encoder.model.{name}": tensor for name, tensor in t.items()},
        lambda t: {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in t.items()},
    ],
)
def test_variants_of_the_same_checkpoint(disguise):
    # Values that bfloat16 can hold.
    halves = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in random_tensors().items()}
    tensors = {name: half.astype(np.float32) for name, half in halves.items()}
    expected = encoder_from_tensors(tensors, TINY, where="x")
    params = encoder_from_tensors(disguise(tensors), TINY, where="x")
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_what_is_exported_comes_back_bit_for_bit():
    tensors = random_tensors(7)
    exported = params_to_tensors(encoder_from_tensors(tensors, TINY, where="x"), bert_leaves(TINY))
    jax.tree.map(np.testing.assert_array_equal, exported, tensors)


ADAPTER = "encoder.layer.0.output.adapter.weight"
WEIGHT = "encoder.layer.0.output.dense.weight"
LOST = ("encoder.layer.1.output.dense.bias", "embeddings.LayerNorm.weight")
TWO = random_tensors(prefix="question.") | random_tensors(prefix="context.")


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (
            {name: tensor for name, tensor in random_tensors().items() if name not in LOST},
            DataError,
            r"2 of 69 tensors are missing: embeddings\.LayerNorm\.weight, enc.*\.1\.",
        ),
        (
            random_tensors(hidden_size=8),
            ConfigError,
            r"checkpoint-x: embeddings.*weight has shape \(40, 8\), not \(40, 16\)",
        ),
        (random_tensors() | {ADAPTER: np.zeros(3)}, DataError, f"does not have: {ADAPTER}"),
        (random_tensors() | {WEIGHT: np.zeros((16, 24), np.int8)}, DataError, "is int8"),
        (random_tensors() | {WEIGHT: np.full((16, 24), np.nan, np.float32)}, DataError, "has NaN"),
        ({"shared.weight": np.zeros(2)}, ConfigError, r"there are shared\.weight"),
        (TWO, ConfigError, r"2 encoders, under context\., question\."),
    ],
)
def test_tensors_that_cannot_be_used(tensors, error, message):
    with pytest.raises(error, match=message):
        encoder_from_tensors(tensors, TINY, where="checkpoint-x")
