"""A tiny T5 dual encoder with a vocabulary like T5's, ready for export."""

import jax
from sentence_models import t5_model
from tiny_models import random_params

from taser_jax.data.text.vocabularies import SentencePieceVocabulary
from taser_jax.interop.export_source import ExportSource
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.stack import Remat
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig

LENGTHS = {Role.QUERY: 8, Role.PASSAGE: 12}
QUERIES = ["on which river lies Paris?", "", "the capital " * 9, "Zürich"]
TITLES = ["Paris", "", "Rome", "the city of Rome " * 3]
TEXTS = ["It lies on the Seine.", "No title.", "", "the capital " * 9]
PASSAGES = list(zip(TITLES, TEXTS, strict=True))


def t5_vocabulary() -> SentencePieceVocabulary:
    """With pad, end and unknown first, and nothing that is put before a text."""
    model = t5_model([*QUERIES, *TITLES, *TEXTS] * 3, 60, num_threads=1)
    return SentencePieceVocabulary(model, extra_ids=3)


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
        params=jax.device_get(random_params(DualEncoder(config))),
        vocabulary_dir=directory / "vocabulary",
        query_length=LENGTHS[Role.QUERY],
        passage_length=LENGTHS[Role.PASSAGE],
        fingerprint="0123456789abcdef",
        task="fever" if config.query_tasks else None,
    )
