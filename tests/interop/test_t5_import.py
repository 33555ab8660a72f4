"""T5 from Hugging Face's and T5X's files into dual encoders; files that cannot be used."""

import dataclasses
import itertools
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from hugging_face_parity import t5_to_tensors
from legacy_t5x import write_legacy
from safetensors.numpy import save_file
from tiny_models import tiny_t5

from taser_jax.interop.pretrained import Pretrained, pretrained_t5, read_pretrained
from taser_jax.interop.t5 import (
    t5_config,
    t5_from_t5x,
    t5_from_tensors,
    t5_leaves,
    t5_to_json,
    t5x_t5_config,
)
from taser_jax.interop.t5x import write_t5x
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5 import PositionBias, T5Config, T5Initialization
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError, DataError

PLAIN = tiny_t5(
    vocab_size=11, embed_dim=6, num_decoder_layers=3, head_dim=4, mlp_dim=5, max_distance=128
)
LARGER = dataclasses.replace(PLAIN, vocab_size=12)
GATED = dataclasses.replace(PLAIN, mlp_activations=("gelu", "linear"))
UMT5 = dataclasses.replace(GATED, position_bias=PositionBias.PER_LAYER)
CONFIGS = {"t5": PLAIN, "1.1": GATED, "umt5": UMT5}


def random_t5(config):
    rng = np.random.default_rng(0)
    drawn = {leaf.path: np.float32(rng.normal(size=leaf.shape)) for leaf in t5_leaves(config)}
    return unflatten_dict(drawn)


def write_hugging_face(directory, params, config, **changes):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(t5_to_json(config)))
    save_file({**t5_to_tensors(params, config), **changes}, directory / "model.safetensors")
    return directory


def joined_heads(tree, path=()):
    """As T5X has them: heads and kv in one axis."""
    if isinstance(tree, dict):
        return {name: joined_heads(node, (*path, name)) for name, node in tree.items()}
    if tree.ndim < 3:
        return tree
    return tree.reshape(-1, tree.shape[-1]) if path[-2] == "out" else tree.reshape(len(tree), -1)


def scanned(tree):
    """As T5X's scalable models have them: blocks stacked along axis 1."""
    result = dict(tree)
    for stack in ("encoder", "decoder"):
        layers = [name for name in tree[stack] if name.startswith("layers_")]
        result[stack] = {name: v for name, v in tree[stack].items() if name not in layers}
        blocks = [tree[stack][f"layers_{i}"] for i in range(len(layers))]
        result[stack][stack] = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *blocks)
    return result


def loaded(source, config, **weights):
    """As training and `taser import` read it, before anything is drawn."""
    params = abstract_params(DualEncoder(config))
    return read_pretrained(Pretrained(str(source), **weights), config=config, params=params)


def assert_same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_hugging_face_round_trip(config, tmp_path):
    params = random_t5(config)
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    ignored = {"lm_head.weight": (11, 6), "encoder.embed_tokens.weight": (11, 6), table: (8, 2)}
    extra = {name: np.zeros(shape, np.float32) for name, shape in ignored.items()}
    directory = write_hugging_face(tmp_path / "hf", params, config, **extra)
    assert pretrained_t5(directory) == config
    assert_same(loaded(directory, T5DualEncoderConfig(t5=config)), {"encoder": params})


# T5X's scanned models, such as those of umT5, have a position table in each block.
@pytest.mark.parametrize(
    ("config", "layout"),
    [*itertools.product(CONFIGS.values(), (joined_heads, dict)), (UMT5, scanned)],
)
def test_t5x_layouts(config, layout):
    params = random_t5(config)
    tree = {**layout(params)}
    tree["decoder"] = {**tree["decoder"], "logits_dense": {"kernel": np.zeros((6, 11))}}
    assert t5x_t5_config(tree, where="t5x") == config
    assert_same(t5_from_t5x(tree, config, where="t5x"), params)


def test_t5x_checkpoint_into_an_encoder_with_its_projection(tmp_path):
    t5 = dataclasses.replace(GATED, num_decoder_layers=0)
    params = random_t5(t5)
    kernel = np.arange(18, dtype=np.float32).reshape(6, 3)
    target = {**joined_heads(params), "projection_layer": {"kernel": kernel}}
    half = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), target)
    directory = write_legacy(tmp_path / "checkpoint_3", half)
    t5 = pretrained_t5(tmp_path, numerics=T5Config(initialization=T5Initialization.RESCALED))
    config = T5DualEncoderConfig(t5=t5, embedding=T5Embedding.ENCODER_MEAN, projection_dim=3)
    tower = loaded(directory, config)["encoder"]
    np.testing.assert_array_equal(tower["projection_layer"]["kernel"], kernel)
    table, expected = tower["token_embedder"]["embedding"], params["token_embedder"]["embedding"]
    assert table.dtype == np.float32
    np.testing.assert_allclose(table * 100, expected, rtol=0.01)
    for other in (4, None):
        with pytest.raises(ConfigError, match=rf"(?s)\(6, 3\).*\(6, {other}\).*projection_dim=3"):
            loaded(directory, dataclasses.replace(config, projection_dim=other))


@pytest.mark.parametrize("towers", Towers)
def test_sizes_of_a_dual_encoder_that_t5x_trained(towers, tmp_path):
    config = T5DualEncoderConfig(t5=PLAIN, towers=towers)
    trained = dict.fromkeys(config.tower_names, random_t5(PLAIN))
    write_t5x(tmp_path, trained, step=3)
    assert pretrained_t5(tmp_path) == PLAIN
    assert_same(loaded(tmp_path, config), trained)
    other = Towers.TIED if towers is Towers.SEPARATE else Towers.SEPARATE
    with pytest.raises(ConfigError, match=r"(?s)encoder/.*set the model that T5X trained"):
        loaded(tmp_path, dataclasses.replace(config, towers=other))


@pytest.mark.parametrize("kept", ["t5_base/checkpoint_3/checkpoint", "model.ckpt-7.index"])
def test_a_folder_above_or_of_another_format_is_told_what_t5x_has(kept, tmp_path):
    (tmp_path / kept).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / kept).touch()
    told = "(?s)no T5X checkpoint: .*give checkpoint_<step> or its parent.*config.json"
    with pytest.raises(DataError, match=told):
        pretrained_t5(tmp_path)
    with pytest.raises(DataError, match=told):
        loaded(tmp_path, T5DualEncoderConfig(t5=GATED))


def test_an_encoder_alone_takes_what_it_needs(tmp_path):
    params = random_t5(PLAIN)
    directory = write_hugging_face(tmp_path / "hf", params, PLAIN)
    dual = T5DualEncoderConfig(t5=PLAIN, embedding=T5Embedding.ENCODER_MEAN, projection_dim=2)
    tower = loaded(directory, dual)["encoder"]
    assert tower.keys() == {"token_embedder", "encoder", "projection_layer"}
    assert_same(tower["encoder"], params["encoder"])
    # Drawn later.
    assert isinstance(tower["projection_layer"]["kernel"], jax.ShapeDtypeStruct)
    alone = dataclasses.replace(PLAIN, num_decoder_layers=0)
    directory = write_hugging_face(tmp_path / "alone", random_t5(alone), alone)
    assert t5_config(directory).num_decoder_layers == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (LARGER, r"(?s)vocab_size 11.*vocab_size 12.*own vocabulary"),
        (GATED, r"(?s)\('relu',\).*\('gelu', 'linear'\)"),
    ],
)
def test_a_model_of_other_sizes_is_refused(other, message, tmp_path):
    directory = write_hugging_face(tmp_path / "hf", random_t5(PLAIN), PLAIN)
    with pytest.raises(ConfigError, match=message):
        loaded(directory, T5DualEncoderConfig(t5=other))


def test_files_that_contradict_their_configuration(tmp_path):
    more = {"encoder.block.2.layer.1.DenseReluDense.wo.weight": np.ones((6, 5), np.float32)}
    directory = write_hugging_face(tmp_path / "hf", random_t5(PLAIN), PLAIN, **more)
    with pytest.raises(DataError, match=r"(?s)does not have: encoder\.block\.2.*merge adapters"):
        loaded(directory, T5DualEncoderConfig(t5=PLAIN))
    with pytest.raises(ConfigError, match="no tensor is named shared"):
        t5_from_tensors(more, PLAIN, where="x")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "bert"}, ConfigError, "model_type is 'bert'"),
        ({"feed_forward_proj": "gated-silu"}, ConfigError, "gated-silu"),
        ({"num_decoder_layers": -1}, DataError, "0 or more"),
    ],
)
def test_configurations_that_cannot_be_used(changes, error, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(t5_to_json(PLAIN) | changes))
    with pytest.raises(error, match=message):
        t5_config(tmp_path)


def test_trees_that_are_no_t5():
    params = random_t5(PLAIN)
    params["encoder"]["layers_0"]["mlp"]["wi"]["bias"] = np.ones(5)
    for tree in ({"embeddings": {"token": np.ones(1)}, "scale": np.ones(())}, params):
        with pytest.raises(ConfigError, match=r"(?s)not a T5: the checkpoint has \w+/"):
            t5x_t5_config(tree, where="t5x")
    del params["encoder"]["layers_1"]["mlp"]["wo"]
    with pytest.raises(ConfigError, match="encoder/layers_1/mlp/wo/kernel has shape None"):
        t5_from_t5x(params, PLAIN, where="t5x")
