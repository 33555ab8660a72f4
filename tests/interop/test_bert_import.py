import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from bert_checkpoints import CONFIG, random_tensors, tensor_shapes, write_config
from hugging_face_parity import hidden_states, last_states, relative_error

from taser_jax.interop.bert import bert_leaves, encoder_from_tensors
from taser_jax.interop.bert_formats import FORMATS, bert_config, config_to_json
from taser_jax.interop.tensors import params_to_tensors
from taser_jax.models.bert_config import BertConfig, Family
from taser_jax.models.layers import Activation
from taser_jax.storage.errors import ConfigError, DataError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = BertConfig(
    vocab_size=40, embed_dim=16, num_layers=4, num_heads=2, head_dim=8, mlp_dim=24, max_length=12
)


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "bert_tiny.npz"))


def golden_model(golden, directory):
    (directory / "config.json").write_text(str(golden["config"]), encoding="utf-8")
    tensors = {n.removeprefix("tensor/"): a for n, a in golden.items() if n.startswith("tensor/")}
    return bert_config(directory), tensors


# What Hugging Face's BertModel computed; make_bert_golden.py says how.
@pytest.mark.parametrize("inputs", ["padded", "long"])
def test_hidden_states_are_hugging_faces(golden, tmp_path, inputs):
    config, tensors = golden_model(golden, tmp_path)
    params = encoder_from_tensors(tensors, config, where="golden")
    ids, mask = golden[f"{inputs}/ids"], golden[f"{inputs}/mask"]
    states = hidden_states(params, config, ids, mask)
    expected = golden[f"{inputs}/hidden_states"]
    assert states.shape == expected.shape
    assert relative_error(states, expected, mask) < 1e-5
    # The measure itself notices one number of one bias.
    params["layers_1"]["mlp"]["wo"]["bias"][3] += 1e-2
    assert relative_error(hidden_states(params, config, ids, mask), expected, mask) > 1e-4


@pytest.mark.parametrize("kind", [name.architecture for name in FORMATS.values()][1:])
def test_hidden_states_of_berts_relatives_are_hugging_faces(tmp_path, kind):
    golden = np.load(GOLDEN / "bert_families.npz")
    arrays = {n.removeprefix(f"{kind}/"): golden[n] for n in golden.files if n.startswith(kind)}
    config, tensors = golden_model(arrays, tmp_path)
    params = encoder_from_tensors(tensors, config, where="golden")
    ids, mask, expected = (arrays[name] for name in ("ids", "mask", "hidden_states"))
    assert relative_error(last_states(params, config, ids, mask), expected, mask) < 1e-5


@pytest.mark.parametrize("activation", Activation)
def test_config_comes_back(tmp_path, activation):
    config = dataclasses.replace(
        TINY, activation=activation, dropout_rate=0.2, layer_norm_epsilon=1e-5
    )
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)), encoding="utf-8")
    assert bert_config(tmp_path) == config


def test_a_nomic_bert_with_local_attention_cannot_leave():
    with pytest.raises(ConfigError, match="blocks that attend to near tokens alone"):
        config_to_json(dataclasses.replace(TINY, family=Family.NOMIC_BERT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "deberta", "architectures": ["DebertaModel"]},
            "'deberta'.*bert, distilbert, roberta, mpnet, modernbert, nomic_bert, xlm-roberta",
        ),
        ({"model_type": None, "architectures": ["ElectraModel"]}, "ElectraModel.*bert, "),
        ({"model_type": "nomic_bert", "prenorm": True}, "prenorm is True; only False"),
        (
            {"model_type": "nomic_bert", "rope_parameters": {"rope_theta": 1, "rope_type": "yarn"}},
            "rope_type is 'yarn'",
        ),
        (
            {"model_type": "modernbert", "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types is not one global block",
        ),
        ({"model_type": "roberta", "pad_token_id": 0}, "pad_token_id is 0; only 1"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu'.*gelu, .*gelu_new.*relu"),
    ],
)
def test_another_architecture(tmp_path, changes, message):
    write_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        bert_config(tmp_path)


def test_an_old_config_without_model_type(tmp_path):
    write_config(tmp_path, model_type=None, position_embedding_type=None)
    assert bert_config(tmp_path) == TINY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(CONFIG | {"layer_norm_eps": 0}), "field 'layer_norm_eps.*above 0"),
        (json.dumps(CONFIG | {"num_hidden_layers": 10**5}), "num_hidden_layers.*, 1000 or less"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "vocab_size"}), "required field"),
    ],
)
def test_a_damaged_config(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"(?s){message}"):
        bert_config(tmp_path)


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
    tensors = {
        name: tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, tensor in random_tensors().items()
    }
    expected = encoder_from_tensors(tensors, TINY, where="x")
    params = encoder_from_tensors(disguise(tensors), TINY, where="x")
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_what_is_exported_comes_back_bit_for_bit():
    tensors = random_tensors(7)
    params = encoder_from_tensors(tensors, TINY, where="x")
    exported = params_to_tensors(params, bert_leaves(TINY))
    assert {n: t.shape for n, t in exported.items()} == tensor_shapes()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor)
    again = encoder_from_tensors(exported, TINY, where="x")
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_missing_tensors_are_named():
    tensors = random_tensors()
    del tensors["encoder.layer.1.output.dense.bias"], tensors["embeddings.LayerNorm.weight"]
    message = r"2 of 69 tensors are missing: embeddings\.LayerNorm\.weight, enc.*\.1\."
    with pytest.raises(DataError, match=message):
        encoder_from_tensors(tensors, TINY, where="x")


def test_unexpected_shapes():
    config = dataclasses.replace(TINY, num_heads=4)
    message = r"checkpoint-x: .*attention.*weight has shape \(16, 16\), not \(16, 32\)"
    with pytest.raises(ConfigError, match=message):
        encoder_from_tensors(random_tensors(), config, where="checkpoint-x")


def test_tensors_that_would_be_lost_or_are_no_weights():
    adapter = {"encoder.layer.0.output.adapter.weight": np.zeros(3, np.float32)}
    with pytest.raises(DataError, match=r"does not have: encoder\.layer\.0\.output\.adapter"):
        encoder_from_tensors(random_tensors() | adapter, TINY, where="x")
    name = "encoder.layer.0.output.dense.weight"
    with pytest.raises(DataError, match="is int8"):
        encoder_from_tensors(
            random_tensors() | {name: np.zeros((16, 24), np.int8)}, TINY, where="x"
        )
    nan = np.full((16, 24), np.nan, np.float32)
    with pytest.raises(DataError, match="has NaN"):
        encoder_from_tensors(random_tensors() | {name: nan}, TINY, where="x")


def test_no_bert_or_two_of_them():
    with pytest.raises(ConfigError, match=r"there are shared\.weight"):
        encoder_from_tensors({"shared.weight": np.zeros(2)}, TINY, where="x")
    two = random_tensors(prefix="question.") | random_tensors(prefix="context.")
    with pytest.raises(ConfigError, match=r"2 encoders, under context\., question\."):
        encoder_from_tensors(two, TINY, where="x")
