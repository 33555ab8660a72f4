"""Tiny trained-looking models with their vocabularies, a BERT and a T5, ready for export."""

import jax
import numpy as np
from sentence_models import t5_model
from tiny_models import encode, random_params

from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import SentencePieceVocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QuerySettings, Titles
from taser_jax.interop.export_source import ExportSource
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.stack import Remat
from taser_jax.models.t5 import T5Config
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
T5_LENGTHS = {Role.QUERY: 8, Role.PASSAGE: 12}
T5_QUERIES = ["on which river lies Paris?", "", "the capital " * 9, "Zürich"]
T5_TITLES = ["Paris", "", "Rome", "the city of Rome " * 3]
T5_TEXTS = ["It lies on the Seine.", "No title.", "", "the capital " * 9]
T5_PASSAGES = list(zip(T5_TITLES, T5_TEXTS, strict=True))
DPR = {}
DETERMINISTIC = {"num_experts": 2}


def tiny_source(directory, *, experts=DPR, vocabulary=None, bert=None, **changes):
    """Block 1 of two is shared; 2 is specialised where `experts` says so. All weights are large."""
    vocabulary = vocabulary or WordPieceVocabulary(PIECES)
    vocabulary.save(str(directory / "vocabulary"))
    sizes = {"vocab_size": vocabulary.size, "embed_dim": 16, "num_layers": 2, "num_heads": 2}
    sizes |= {"head_dim": 8, "mlp_dim": 24, "max_length": 12}
    config = DualEncoderConfig(
        bert=BertConfig(**(sizes | (bert or {}))),
        experts=ExpertConfig(blocks=(2,), **experts),
        **changes,
    )
    return ExportSource(
        config=config,
        params=jax.device_get(random_params(DualEncoder(config))),
        vocabulary_dir=directory / "vocabulary",
        query_length=QUERY_LENGTH,
        passage_length=PASSAGE_LENGTH,
        fingerprint="0123456789abcdef",
    )


def t5_vocabulary() -> SentencePieceVocabulary:
    """With pad, end and unknown first, and nothing that is put before a text."""
    model = t5_model([*T5_QUERIES, *T5_TITLES, *T5_TEXTS] * 3, 60, num_threads=1)
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
        query_length=T5_LENGTHS[Role.QUERY],
        passage_length=T5_LENGTHS[Role.PASSAGE],
        fingerprint="0123456789abcdef",
        task="fever" if config.query_tasks else None,
    )


def embed(source, role, tokens):
    """What taser_jax itself makes of tokens, as a NumPy array."""
    encoded = encode(DualEncoder(source.config), source.params, tokens, role, source.task)
    return np.asarray(encoded.embeddings)


def embed_queries(source, texts, settings=QuerySettings()):
    """What taser_jax itself makes of queries."""
    tokens = encode_queries(texts, source.vocabulary, length=source.query_length, settings=settings)
    return embed(source, Role.QUERY, tokens)


def embed_passages(source, titles, texts, form=Titles.INCLUDE):
    """What taser_jax itself makes of passages, after the source's prompt."""
    tokens = encode_passages(
        [Passage("", text, title) for title, text in zip(titles, texts, strict=True)],
        source.vocabulary,
        length=source.passage_length,
        titles=form,
        prompt=source.passage_prompt,
    )
    return embed(source, Role.PASSAGE, tokens)


def some_tokens(source, role, count, seed=3):
    """Rows of random ids and lengths, the last of [CLS] alone."""
    rng = np.random.default_rng(seed)
    length = source.length(role)
    lengths = rng.integers(2, length + 1, count)
    lengths[-1:] = 1
    mask = np.arange(length) < lengths[:, None]
    ids = rng.integers(5, source.vocabulary.size, mask.shape)
    return Tokens(np.where(mask, ids, 0).astype(np.int32), mask)
