"""Our encoders against what Hugging Face's PyTorch models computed, stored: needs no PyTorch.

tests/golden has the arrays and the scripts that made them.
"""

import pathlib

import jax
import numpy as np
import pytest
from hugging_face_parity import (
    assert_close,
    hidden_states,
    last_states,
    relative_error,
    t5_outputs,
    t5_to_tensors,
)

from taser_jax.interop.bert import encoder_from_tensors
from taser_jax.interop.bert_formats import FORMATS, bert_config
from taser_jax.interop.pretrained import Pretrained, pretrained_bert, read_pretrained
from taser_jax.interop.t5 import t5_config, t5_from_tensors
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def stored(name, directory, kind=""):
    """Arrays by name, and tensors, of a model whose config.json is written into a directory."""
    golden = np.load(GOLDEN / name)
    arrays = {n.removeprefix(kind): golden[n] for n in golden if n.startswith(kind)}
    (directory / "config.json").write_text(str(arrays["config"]), encoding="utf-8")
    names = [name for name in arrays if name.startswith("tensor/")]
    return arrays, {name.removeprefix("tensor/"): arrays[name] for name in names}


@pytest.mark.parametrize("inputs", ["padded", "long"])
def test_states_of_every_block_of_bert(tmp_path, inputs):
    golden, tensors = stored("bert_tiny.npz", tmp_path)
    config = bert_config(tmp_path)
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
def test_states_of_berts_relatives(tmp_path, kind):
    golden, tensors = stored("bert_families.npz", tmp_path, f"{kind}/")
    config = bert_config(tmp_path)
    params = encoder_from_tensors(tensors, config, where="golden")
    ids, mask, expected = (golden[name] for name in ("ids", "mask", "hidden_states"))
    assert relative_error(last_states(params, config, ids, mask), expected, mask) < 1e-5


def test_states_of_a_real_bert(minilm):
    """MiniLM-L6, at 512 tokens."""
    config = DualEncoderConfig(bert=pretrained_bert(minilm))
    abstract = abstract_params(DualEncoder(config))
    params = read_pretrained(Pretrained(str(minilm)), config=config, params=abstract)
    golden = np.load(GOLDEN / "bert_minilm.npz")
    mask = np.arange(512) < golden["lengths"][:, None]
    assert golden["lengths"].max() == golden["ids"].shape[1] == 512
    states = hidden_states(params["encoder"], config.bert, golden["ids"], mask)
    assert relative_error(states[:, :, 0], golden["cls"]) < 1e-4
    assert relative_error(states[:, 2, :9], golden["short_hidden_states"]) < 1e-4


@pytest.mark.parametrize("kind", ["t5", "1_1", "umt5"])
def test_outputs_of_t5_and_weights_back(kind, tmp_path):
    golden, tensors = stored(f"t5_{kind}.npz", tmp_path)
    config = t5_config(tmp_path)
    params = t5_from_tensors(tensors, config, where="golden")
    mask = golden["mask"]
    assert not mask.all()
    states, decoded = t5_outputs(config, params, golden["ids"], mask)
    # States under the padding mean nothing.
    assert_close(np.asarray(states)[mask], golden["encoded"][mask])
    assert_close(np.asarray(decoded), golden["decoded"])
    jax.tree.map(np.testing.assert_array_equal, t5_to_tensors(params, config), tensors)
