"""Answers typed questions with an end retriever that fuses documents from memories."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from taser_jax.commands.ask import MEMORIES, Answer, AskSettings
from taser_jax.models.batch import Role
from taser_jax.retrieval.embeddings import encode_rows
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retriever import Retriever, TokensInMemory
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma.attention import document_attention
from taser_jax.systems.moma.augmentation import document_reader
from taser_jax.systems.moma.joined import JoinedEmbeddings
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture
from taser_jax.systems.moma.memory_sources import Source, sources


def ask_augmented(questions: Sequence[str], settings: AskSettings) -> list[Answer]:
    """Looks documents up for each question, fuses them, and searches.

    Args:
        questions: questions as typed.
        settings: the end retriever with its collection, the mixture of memories, the model that
            they were added with, and K.

    Returns:
        The answers, each with the documents fused with the question, most attended first.

    Raises:
        ConfigError: no lookup model, an end retriever that fuses no documents, or K beyond the
            mixture.
        FingerprintError: another model than the lookup encoded the memories.
    """
    retriever = settings.load_retriever()
    assert settings.memory_dir is not None
    assert settings.data_dir is not None
    if settings.lookup_dir is None:
        raise ConfigError(
            "memories and no model that looks documents up",
            where="LOOKUP_DIR",
            fix="give the model that `taser memory add` encoded them with",
        )
    model, mixture = retriever.model, Mixture.open(settings.memory_dir)
    if not model.model.config.fuses:
        raise model.model.config.no_fusion()
    if not 1 <= settings.documents <= len(mixture):
        raise ConfigError(
            f"{settings.documents} documents",
            where="DOCUMENTS",
            expected=f"1 to {len(mixture)}, the documents of the mixture",
        )
    lookup = Retriever.load(
        settings.lookup_dir, task=settings.task, query_length=settings.query_length
    )
    require_equal(
        f"memories {settings.memory_dir}",
        mixture.manifest.fingerprints,
        {"model": lookup.model.passage_fingerprint},
        "name the model that they were added with as LOOKUP_DIR",
    )
    searcher = ExactSearcher(JoinedEmbeddings(mixture), devices=search_devices())
    result = searcher.search(lookup.encode_queries(questions), settings.documents)
    found = Lookup([*map(str, range(len(questions)))], result.rows, result.scores)
    texts = AugmentedTexts(
        TokensInMemory(retriever.query_tokens(questions)),
        found.rows,
        document_reader(model.model.config, mixture),
    )
    config = EncodeConfig(batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=settings.task)
    embeddings, _ = encode_rows(encode, texts, np.arange(len(questions)), config=config)
    attention = document_attention(model, texts, task=settings.task, config=config)
    documents = sources(mixture, found, attention, data_dir=settings.data_dir)
    hits = retriever.search_embeddings(embeddings, k=settings.k)
    return [
        Answer(best, sources=_shown(fused)) for best, fused in zip(hits, documents, strict=True)
    ]


def _shown(documents: Sequence[Source]) -> list[str]:
    lines = ["  from memory:"] if documents else []
    for one in documents:
        text = textwrap.shorten(f"{one.passage.title}: {one.passage.text}", 90, placeholder=" ...")
        share = f"{100 * one.attention:3.0f}%"
        lines.append(f"   {share}  {one.memory}  [{one.score:.2f}]  {text}")
    return lines


MEMORIES.register(ask_augmented)
