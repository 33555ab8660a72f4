"""T5 encoders as sentence-transformers directories: the model's own embeddings, to 1e-5."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from tiny_source import (
    T5_PASSAGES,
    T5_QUERIES,
    embed_passages,
    embed_queries,
    t5_source,
    t5_vocabulary,
)

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


@pytest.fixture(scope="module")
def vocabulary():
    return t5_vocabulary()


def embeddings_of(source, role):
    if role is Role.QUERY:
        return embed_queries(source, T5_QUERIES, source.query_settings)
    return embed_passages(source, *zip(*T5_PASSAGES, strict=True))


def exported(source, directory):
    directory.mkdir()
    export_sentence_transformers(source, directory)
    return directory


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """Opens a model with its own module; transformers keeps what it imports in a folder here."""
    library = pytest.importorskip("sentence_transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(directory):
        return library.SentenceTransformer(
            str(directory), device="cpu", local_files_only=True, trust_remote_code=True
        )

    return load


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
def test_embeddings_are_the_models_own(vocabulary, tmp_path, loaded, embedding, changes, prompt):
    source = t5_source(tmp_path, vocabulary, embedding=embedding, **changes)
    source = dataclasses.replace(source, query_settings=QuerySettings(prompt=prompt))
    model = loaded(exported(source, tmp_path / "out"))
    passages = [(title, text) if title else text for title, text in T5_PASSAGES]
    by_role = {
        Role.QUERY: model.encode_query(T5_QUERIES),
        Role.PASSAGE: model.encode_document(passages),
    }
    for role, embeddings in by_role.items():
        ours = embeddings_of(source, role)
        assert np.abs(np.diff(ours, axis=0)).max() > 0.01
        np.testing.assert_allclose(embeddings, ours, atol=1e-5)


@pytest.mark.slow
def test_a_decoders_output_survives_what_others_save(vocabulary, tmp_path, loaded):
    """sentence-transformers saves the encoder alone, and the decoder in its module's folder."""
    source = t5_source(tmp_path, vocabulary, t5={"num_decoder_layers": 2})
    model = loaded(exported(source, tmp_path / "out"))
    before = model.encode_query(T5_QUERIES)
    model.save(str(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded(tmp_path / "saved").encode_query(T5_QUERIES), before)
    assert np.abs(before - embeddings_of(source, Role.QUERY)).max() < 1e-5


@pytest.mark.parametrize("changes", [{"t5": {"num_decoder_layers": 2}}, {"projection_dim": 5}])
def test_what_was_exported_returns_bit_for_bit(vocabulary, tmp_path, changes):
    source = t5_source(tmp_path, vocabulary, **changes)
    directory = exported(source, tmp_path / "out")
    config = dataclasses.replace(source.config, t5=pretrained_t5(directory))
    assert config.t5.num_decoder_layers == source.config.t5.num_decoder_layers
    drawn = jax.tree.map(np.zeros_like, source.params)
    again = read_pretrained(Pretrained(str(directory)), config=config, params=drawn)
    jax.tree.map(np.testing.assert_array_equal, again, source.params)


def test_a_projection_that_is_more_than_a_kernel_is_refused(tmp_path):
    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    settings = {"bias": False, "activation_function": "torch.nn.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="a linear map with no bias and Tanh"):
        read_projection(tmp_path)


@pytest.mark.parametrize(
    ("task", "told"), [(None, "without a task"), ("trivia", "(?s)'trivia'.*: nq, fever")]
)
def test_a_model_of_several_query_encoders_needs_a_task(task, told):
    towers = {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")}
    with pytest.raises(ConfigError, match=told):
        check_exported(T5DualEncoderConfig(**towers), task)
