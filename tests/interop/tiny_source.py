"""A tiny trained-looking model with its vocabulary, ready for export."""

import jax
import numpy as np
from tiny_models import encode, random_params

from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QuerySettings, Titles
from taser_jax.interop.export_source import ExportSource
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.routing import ExpertConfig
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
