"""T5 dual encoders as SavedModels and StableHLO programs, with a vocabulary like T5's."""

import dataclasses
import functools
import io
import json

import jax
import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from exported_programs import run_snippet, saved_model_params

from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.sentencepiece import SentencePieceVocabulary
from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.saved_model import export_saved_model
from taser_jax.interop.stablehlo import export_stablehlo
from taser_jax.models import config_io
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import DualEncoder, Normalization, Towers
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.models.transformer import Remat
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage

LENGTHS = {Role.QUERY: 8, Role.PASSAGE: 12}
QUERIES = ["on which river lies Paris?", "", "the capital " * 9, "Zürich"]
TITLES = ["Paris", "", "Rome", "the city of Rome " * 3]
TEXTS = ["It lies on the Seine.", "No title.", "", "the capital " * 9]
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
        if role is Role.QUERY:
            return encode_queries(QUERIES, self.vocabulary, length=LENGTHS[role])
        passages = [Passage("", text, title) for title, text in zip(TITLES, TEXTS, strict=True)]
        return encode_passages(passages, self.vocabulary, length=LENGTHS[role])

    @functools.cached_property
    def expected(self):
        return {role: self.embed(role, task=self.source.task) for role in Role}

    def embed(self, role, *, task):
        """What taser_jax itself makes of the texts."""
        model = DualEncoder(self.source.config)

        def encode(params, tokens):
            encoded = model.apply({"params": params}, tokens, role=role, task=task, method="encode")
            return encoded.embeddings

        return np.asarray(jax.jit(encode)(self.source.params, self.tokens(role)))


@pytest.fixture(scope="module")
def vocabulary():
    """With pad, end and unknown first, and nothing that is put before a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*QUERIES, *TITLES, *TEXTS] * 3),
        model_writer=model,
        vocab_size=60,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    return SentencePieceVocabulary(model.getvalue())


@pytest.fixture(scope="module", params=MODELS)
def exported(request, vocabulary, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    vocabulary.save(str(directory / "vocabulary"))
    t5 = T5Config(
        vocab_size=vocabulary.size + 3,  # T5's tables have more rows than its vocabulary
        embed_dim=16,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        head_dim=6,
        mlp_dim=24,
        num_buckets=8,
        max_distance=12,
        remat=Remat.BLOCK,
    )
    config = T5DualEncoderConfig(t5=t5, **MODELS[request.param])
    source = ExportSource(
        config=config,
        params=random_params(config),
        vocabulary_dir=directory / "vocabulary",
        query_length=LENGTHS[Role.QUERY],
        passage_length=LENGTHS[Role.PASSAGE],
        fingerprint="0123456789abcdef",
        task="fever" if config.query_tasks else None,
    )
    for export in (export_saved_model, export_stablehlo):
        output_dir = directory / export.__name__.removeprefix("export_")
        output_dir.mkdir()
        export(source, output_dir)
    return Exported(source, vocabulary, directory)


def random_params(config):
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(centre, 0.3, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(DualEncoder(config)))


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


def test_parameters_come_back_bit_for_bit(exported):
    saved_model, stablehlo = (exported.directory / name for name in ("saved_model", "stablehlo"))
    tokens = exported.tokens(Role.QUERY)
    params = exported.stablehlo(Role.QUERY, tokens.ids, tokens.mask).params
    for found in (saved_model_params(saved_model), params):
        assert jax.tree.structure(found) == jax.tree.structure(exported.source.params)
        jax.tree.map(np.testing.assert_array_equal, found, exported.source.params)
    assert config_io.from_json((stablehlo / "model.json").read_text()) == exported.source.config
    assert (
        config_io.from_json((saved_model / "assets.extra" / "model.json").read_text())
        == exported.source.config
    )
    vocabulary = json.loads((stablehlo / "signature.json").read_text())["vocabulary"]
    assert vocabulary["fingerprint"] == exported.vocabulary.fingerprint


def test_a_task_has_its_own_query_encoder(exported, tmp_path):
    if not exported.source.config.query_tasks:
        norms = np.linalg.norm(exported.expected[Role.QUERY], axis=1)
        np.testing.assert_allclose(norms, 1.0, rtol=1e-5)
        return
    assert np.abs(exported.embed(Role.QUERY, task="nq") - exported.expected[Role.QUERY]).max() > 0.1
    for export in (export_saved_model, export_stablehlo):
        for task, says in ((None, "no task"), ("trivia", "'trivia'")):
            source = dataclasses.replace(exported.source, task=task)
            with pytest.raises(
                ConfigError, match=rf"{says}(.|\n)*one of nq, fever(.|\n)*export_model.task="
            ):
                export(source, tmp_path)
    assert not list(tmp_path.iterdir())
