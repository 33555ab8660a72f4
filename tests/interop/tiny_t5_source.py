"""A tiny T5 dual encoder with a vocabulary like T5's, ready for export."""

from __future__ import annotations

import io

import jax
import numpy as np
import sentencepiece

from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.sentencepiece import SentencePieceVocabulary
from taser_jax.interop.export_source import ExportSource
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.layers import Remat
from taser_jax.models.parameters import abstract_params
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.records import Passage

LENGTHS = {Role.QUERY: 8, Role.PASSAGE: 12}
QUERIES = ["on which river lies Paris?", "", "the capital " * 9, "Zürich"]
TITLES = ["Paris", "", "Rome", "the city of Rome " * 3]
TEXTS = ["It lies on the Seine.", "No title.", "", "the capital " * 9]
PASSAGES = list(zip(TITLES, TEXTS, strict=True))


def t5_vocabulary() -> SentencePieceVocabulary:
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
    return SentencePieceVocabulary(model.getvalue(), extra_ids=3)


def t5_source(directory, vocabulary, *, t5=None, **changes) -> ExportSource:
    """Large random weights; `t5` and `changes` are fields of the configurations."""
    vocabulary.save(str(directory / "vocabulary"))
    sizes = {"vocab_size": vocabulary.size + 3}  # T5's tables have more rows than its vocabulary
    sizes |= {"embed_dim": 16, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    sizes |= {"head_dim": 6, "mlp_dim": 24, "num_buckets": 8, "max_distance": 12}
    sizes |= t5 or {}
    config = T5DualEncoderConfig(t5=T5Config(remat=Remat.BLOCK, **sizes), **changes)
    return ExportSource(
        config=config,
        params=random_params(config),
        vocabulary_dir=directory / "vocabulary",
        query_length=LENGTHS[Role.QUERY],
        passage_length=LENGTHS[Role.PASSAGE],
        fingerprint="0123456789abcdef",
        task="fever" if config.query_tasks else None,
    )


def random_params(config):
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return rng.normal(centre, 0.3, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(DualEncoder(config)))


def tokens_of(source, vocabulary, role):
    if role is Role.QUERY:
        settings = source.query_settings
        return encode_queries(QUERIES, vocabulary, length=LENGTHS[role], settings=settings)
    passages = [Passage("", text, title) for title, text in PASSAGES]
    return encode_passages(passages, vocabulary, length=LENGTHS[role])


def expected(source, vocabulary, role, *, task="fever"):
    """What taser_jax itself makes of the texts."""
    model = DualEncoder(source.config)
    tokens = tokens_of(source, vocabulary, role)

    @jax.jit
    def encode(params):
        encoded = model.apply({"params": params}, tokens, role=role, task=task, method="encode")
        return encoded.embeddings

    return np.asarray(encode(source.params))
