"""Tiny trained-looking models with their vocabularies, a BERT and a T5, ready for export."""

import functools

import jax
import numpy as np
from sentence_models import t5_model
from tiny_models import encode, random_params, tiny_bert, tiny_t5

from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import SentencePieceVocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.interop.export_source import ExportSource
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.stack import Remat
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.records import Passage

QUERY_LENGTH, PASSAGE_LENGTH = 6, 10
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##do", "the", "cafe", ".", "世"]
PIECES += ["paris", "is", "a", "city", "in", "france", "1", "##9", "ß", "?", "'", "b", "c", "##ing"]
TITLES = ["Paris", "", "Café", "", "a b c a b c a b c a b c"]
TEXTS = [
    "Paris is a city in France.",
    "",
    "世 Undo'ing ß ½ 😀?",
    "a b c a b c a b c a b c a b c a b c",
    "is a city",
]
PAIRS = [(title, text) if title else text for title, text in zip(TITLES, TEXTS, strict=True)]
GIVEN = {Role.QUERY: TEXTS, Role.PASSAGE: PAIRS}
T5_QUERIES = ["on which river lies Paris?", "", "the capital " * 9, "Zürich"]
T5_TITLES = ["Paris", "", "Rome", "the city of Rome " * 3]
T5_TEXTS = ["It lies on the Seine.", "No title.", "", "the capital " * 9]
T5_PASSAGES = list(zip(T5_TITLES, T5_TEXTS, strict=True))
DETERMINISTIC = {"num_experts": 2}


def tiny_source(directory, *, experts=DETERMINISTIC, vocabulary=None, bert=None, **changes):
    """Block 1 of two is shared; 2 is specialised as `experts` says. All weights are large."""
    experts = ExpertConfig(blocks=(2,), **experts)
    # More rows than the vocabulary has pieces.
    config = DualEncoderConfig(bert=tiny_bert(**(bert or {})), experts=experts, **changes)
    return _source(directory, config, vocabulary or WordPieceVocabulary(PIECES))


@functools.cache
def t5_vocabulary() -> SentencePieceVocabulary:
    """With pad, end and unknown first, and nothing that is put before a text."""
    model = t5_model([*T5_QUERIES, *T5_TITLES, *T5_TEXTS] * 3, 60, num_threads=1)
    return SentencePieceVocabulary(model, extra_ids=3)


def t5_source(directory, *, t5=None, **changes) -> ExportSource:
    """Large random weights; `t5` and `changes` are fields of the configurations."""
    # T5's tables have more rows than its vocabulary.
    sizes = {"vocab_size": t5_vocabulary().size + 3, "num_layers": 1, "num_decoder_layers": 1}
    t5 = tiny_t5(remat=Remat.BLOCK, **sizes | (t5 or {}))
    return _source(directory, T5DualEncoderConfig(t5=t5, **changes), t5_vocabulary())


def _source(directory, config, vocabulary):
    vocabulary.save(str(directory / "vocabulary"))
    return ExportSource(
        config=config,
        params=jax.device_get(random_params(DualEncoder(config))),
        vocabulary_dir=directory / "vocabulary",
        query_length=QUERY_LENGTH,
        passage_length=PASSAGE_LENGTH,
        fingerprint="0123456789abcdef",
        task="fever" if config.query_tasks else None,
    )


def exported(export, source, directory):
    """A new folder of the directory, after `export` has written a source there."""
    output_dir = directory / "out"
    output_dir.mkdir()
    export(source, output_dir)
    return output_dir


def embed(source, role, tokens):
    """What taser_jax itself makes of tokens, as a NumPy array."""
    encoded = encode(DualEncoder(source.config), source.params, tokens, role, source.task)
    return np.asarray(encoded.embeddings)


def embed_queries(source, texts):
    """What taser_jax itself makes of queries, as the source's settings have them."""
    settings = source.query_settings
    tokens = encode_queries(texts, source.vocabulary, length=source.query_length, settings=settings)
    return embed(source, Role.QUERY, tokens)


def embed_passages(source, titles, texts):
    """What taser_jax itself makes of passages, as the source's settings have them."""
    passages = [Passage("", text, title) for title, text in zip(titles, texts, strict=True)]
    settings = {"titles": source.titles, "prompt": source.passage_prompt}
    length = source.passage_length
    tokens = encode_passages(passages, source.vocabulary, length=length, **settings)
    return embed(source, Role.PASSAGE, tokens)


def embed_given(source, role):
    """What taser_jax itself makes of `GIVEN`."""
    if role is Role.QUERY:
        return embed_queries(source, TEXTS)
    return embed_passages(source, TITLES, TEXTS)
