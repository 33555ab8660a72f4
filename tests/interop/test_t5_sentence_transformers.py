"""T5 encoders as sentence-transformers directories: the model's own embeddings, to 1e-5."""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
import pytest
from tiny_source import PAIRS, TEXTS, embed_given, exported, t5_source

from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop.export_source import check_exported
from taser_jax.interop.hub import read_projection
from taser_jax.interop.pretrained import Pretrained, pretrained_t5, read_pretrained
from taser_jax.interop.sentence_transformers import export_sentence_transformers
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.t5 import PositionBias
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError


@pytest.fixture
def loaded(tmp_path, monkeypatch, sentence_transformer):
    """Opens a model with its own module; transformers keeps what it imports in a folder here."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return functools.partial(sentence_transformer, trust_remote_code=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({"projection_dim": 5, "normalization": Normalization.L2}, ()),
        ({"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")}, (5, 9)),
        ({"t5": {"mlp_activations": ("gelu", "linear"), "num_decoder_layers": 3}}, ()),
        ({"t5": {"position_bias": PositionBias.PER_LAYER}}, ()),
    ],
)
@pytest.mark.parametrize("embedding", T5Embedding)
def test_embeddings_are_the_models_own(tmp_path, loaded, embedding, changes, prompt):
    source = t5_source(tmp_path, embedding=embedding, **changes)
    source = dataclasses.replace(source, query_settings=QuerySettings(prompt=prompt))
    model = loaded(exported(export_sentence_transformers, source, tmp_path))
    given = {Role.QUERY: model.encode_query(TEXTS), Role.PASSAGE: model.encode_document(PAIRS)}
    for role, embeddings in given.items():
        ours = embed_given(source, role)
        assert np.abs(np.diff(ours, axis=0)).max() > 0.01
        np.testing.assert_allclose(embeddings, ours, atol=1e-5)


@pytest.mark.slow
def test_a_decoders_output_survives_what_others_save(tmp_path, loaded):
    """sentence-transformers saves the encoder alone, and the decoder in its module's folder."""
    source = t5_source(tmp_path, t5={"num_decoder_layers": 2})
    model = loaded(exported(export_sentence_transformers, source, tmp_path))
    before = model.encode_query(TEXTS)
    model.save(str(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded(tmp_path / "saved").encode_query(TEXTS), before)
    assert np.abs(before - embed_given(source, Role.QUERY)).max() < 1e-5


@pytest.mark.parametrize("changes", [{"t5": {"num_decoder_layers": 2}}, {"projection_dim": 5}])
def test_what_was_exported_returns_bit_for_bit(tmp_path, changes):
    source = t5_source(tmp_path, **changes)
    directory = exported(export_sentence_transformers, source, tmp_path)
    config = dataclasses.replace(source.config, t5=pretrained_t5(directory))
    assert config.t5.num_decoder_layers == source.config.t5.num_decoder_layers
    drawn = jax.tree.map(np.zeros_like, source.params)
    weights, words = Pretrained(str(directory)), source.vocabulary_dir
    again = read_pretrained(weights, config=config, params=drawn, vocabulary=words)
    jax.tree.map(np.testing.assert_array_equal, again, source.params)


def test_another_normalisation_than_the_exported_models_is_warned_of(tmp_path, caplog):
    source = t5_source(tmp_path, normalization=Normalization.L2)
    weights = Pretrained(str(exported(export_sentence_transformers, source, tmp_path)))
    plain = dataclasses.replace(source.config, normalization=Normalization.NONE)
    for config in (source.config, plain):
        assert "normalization" not in caplog.text
        read_pretrained(weights, config=config, params=source.params)
    warning = "modules.json names normalization 'l2', and T5DualEncoderConfig has 'none'"
    assert warning in caplog.text


def test_a_projection_that_is_more_than_a_kernel_is_refused(tmp_path):
    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    settings = {"bias": False, "activation_function": "torch.nn.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="a linear map with no bias and Tanh"):
        read_projection(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules * 2))
    with pytest.raises(ConfigError, match="modules Dense, Dense;"):
        read_projection(tmp_path)


def test_a_model_of_several_query_encoders_needs_a_task():
    config = T5DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))
    with pytest.raises(ConfigError, match=r"(?s)'trivia'.*one of nq, fever"):
        check_exported(config, "trivia")
