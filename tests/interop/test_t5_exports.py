"""T5 dual encoders as SavedModels and StableHLO programs, with a vocabulary like T5's."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from exported_programs import run_snippet
from tiny_t5_source import (
    LENGTHS,
    QUERIES,
    TEXTS,
    TITLES,
    expected,
    t5_source,
    t5_vocabulary,
    tokens_of,
)

from taser_jax.data.text.vocabularies import SentencePieceVocabulary
from taser_jax.interop.export_source import ExportSource, check_exported
from taser_jax.interop.saved_model import export_saved_model
from taser_jax.interop.stablehlo import export_stablehlo
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.t5_dual_encoder import T5Embedding
from taser_jax.storage.errors import ConfigError

pytestmark = pytest.mark.slow

MODELS = {
    # QSpec: a query encoder a task, as TACO-DR embeds.
    "q_spec": {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")},
    # As T5X's dual encoders embed.
    "mean": {
        "embedding": T5Embedding.ENCODER_MEAN,
        "projection_dim": 5,
        "normalization": Normalization.L2,
    },
}


@dataclasses.dataclass(frozen=True)
class Exported:
    source: ExportSource
    vocabulary: SentencePieceVocabulary
    directory: object

    def stablehlo(self, role, ids, mask):
        return run_snippet(self.directory / "stablehlo", role, ids, mask)

    @functools.cached_property
    def saved_model(self):
        return tf.saved_model.load(str(self.directory / "saved_model"))

    def tokens(self, role):
        return tokens_of(self.source, self.vocabulary, role)

    @functools.cached_property
    def expected(self):
        return {role: self.embed(role, task=self.source.task) for role in Role}

    def embed(self, role, *, task):
        return expected(self.source, self.vocabulary, role, task=task)


@pytest.fixture(scope="module")
def vocabulary():
    return t5_vocabulary()


@pytest.fixture(scope="module", params=["q_spec", pytest.param("mean", marks=pytest.mark.release)])
def exported(request, vocabulary, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    source = t5_source(directory, vocabulary, **MODELS[request.param])
    for export in (export_saved_model, export_stablehlo):
        output_dir = directory / export.__name__.removeprefix("export_")
        output_dir.mkdir()
        export(source, output_dir)
    return Exported(source, vocabulary, directory)


def same(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def test_saved_model_gives_our_embeddings_of_strings(exported):
    encode = exported.saved_model.signatures
    queries = encode["encode_query"](queries=tf.constant(QUERIES))["embedding"]
    passages = encode["encode_passage"](titles=tf.constant(TITLES), texts=tf.constant(TEXTS))
    same(queries, exported.expected[Role.QUERY])
    same(passages["embedding"], exported.expected[Role.PASSAGE])
    assert np.abs(np.diff(queries, axis=0)).max() > 0.01


def test_stablehlo_gives_our_embeddings_at_every_size(exported):
    for role in Role:
        tokens, expected = exported.tokens(role), exported.expected[role]
        same(exported.stablehlo(role, tokens.ids, tokens.mask).embeddings, expected)
        # The last query is short: programs pad what is shorter than training's lengths.
        count = max(int(tokens.mask[-1].sum()), 3)
        last = (tokens.ids[-1:, :count], tokens.mask[-1:, :count])
        same(exported.stablehlo(role, *last).embeddings, expected[-1:])
        assert role is Role.PASSAGE or count < LENGTHS[role]
        too_long = np.zeros((1, LENGTHS[role] + 1), np.int32)
        with pytest.raises(ValueError, match="refining shapes"):
            exported.stablehlo(role, too_long, too_long == 0)


def test_a_task_has_its_own_query_encoder(exported):
    if not exported.source.config.query_tasks:
        norms = np.linalg.norm(exported.expected[Role.QUERY], axis=1)
        np.testing.assert_allclose(norms, 1.0, rtol=1e-5)
        return
    assert np.abs(exported.embed(Role.QUERY, task="nq") - exported.expected[Role.QUERY]).max() > 0.1
    for task, says in ((None, "without a task"), ("trivia", "'trivia'")):
        told = rf"{says}(.|\n)*a query encoder: nq, fever"
        with pytest.raises(ConfigError, match=told):
            check_exported(exported.source.config, task)
