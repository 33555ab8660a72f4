"""Answers typed questions with documents of memories, and names these with their attention."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from taser_jax.commands.ask import MEMORIES, Answer, AskSettings
from taser_jax.data.collections.store import PassageStore
from taser_jax.models.batch import Role
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retriever import Retriever
from taser_jax.retriever_parts import TokensInMemory
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage
from taser_jax.systems.moma.augment import check_documents
from taser_jax.systems.moma.embeddings import EmbeddingsByText
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture
from taser_jax.systems.moma.query_documents import document_attention, document_reader


@dataclasses.dataclass(frozen=True)
class FusedDocument:
    """One document fused with a query.

    Attributes:
        memory: its memory.
        passage: the document.
        score: its score in the lookup.
        attention: its share of the end retriever's attention to the query's documents.
    """

    memory: str
    passage: Passage
    score: float
    attention: float


def fused_documents(
    mixture: Mixture,
    lookup: Lookup,
    attention: Float32[np.ndarray, "queries segments"],
    *,
    data_dir: str,
) -> list[list[FusedDocument]]:
    """The documents fused with each query, most attended first.

    Args:
        mixture: the memories.
        lookup: the documents of each query, of which the first K are fused.
        attention: attention to the query's own tokens, then to each of these K.
        data_dir: folder of the memories' collections.
    """
    stores = [PassageStore.open(data_dir, memory.collection) for memory in mixture.memories]
    by_query = []
    for rows, scores, weights in zip(lookup.rows, lookup.scores, attention[:, 1:], strict=True):
        present = np.flatnonzero(rows[: len(weights)] >= 0)
        shares = weights[present] / max(float(weights[present].sum()), 1e-30)
        memories, places = mixture.places(rows[present])
        documents = [
            FusedDocument(
                mixture.names[memory], stores[memory][int(row)], float(score), float(share)
            )
            for memory, row, score, share in zip(
                memories, places, scores[present], shares, strict=True
            )
        ]
        by_query.append(sorted(documents, key=lambda document: -document.attention))
    return by_query


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
        fix = "give the model that `taser memory add` encoded them with"
        title = "no model looks documents up in the memories"
        raise ConfigError(title, where="LOOKUP_DIR", fix=fix)
    model, mixture = retriever.model, Mixture.open(settings.memory_dir)
    if not model.model.config.fuses:
        raise model.model.config.no_fusion()
    check_documents(settings.documents, len(mixture))
    lookup = Retriever.load(
        settings.lookup_dir, task=settings.task, query_length=settings.query_length
    )
    require_equal(
        f"memories {settings.memory_dir}",
        mixture.manifest.fingerprints,
        {"model": lookup.model.passage_fingerprint},
        "name the model that they were added with as LOOKUP_DIR",
    )
    searcher = ExactSearcher(EmbeddingsByText.of_mixture(mixture), devices=search_devices())
    result = searcher.search(lookup.encode_queries(questions), settings.documents)
    looked_up = Lookup([*map(str, range(len(questions)))], result.rows, result.scores)
    texts = AugmentedTexts(
        TokensInMemory(retriever.query_tokens(questions)),
        looked_up.rows,
        document_reader(model.model.config, mixture),
    )
    config = EncodeConfig(batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=settings.task)
    embeddings, _ = encode_rows(encode, texts, np.arange(len(questions)), config=config)
    attention = document_attention(model, texts, task=settings.task, config=config)
    documents = fused_documents(mixture, looked_up, attention, data_dir=settings.data_dir)
    hits = retriever.search_embeddings(embeddings, k=settings.k)
    return [
        Answer(best, sources=_shown(fused)) for best, fused in zip(hits, documents, strict=True)
    ]


def _shown(documents: Sequence[FusedDocument]) -> list[str]:
    lines = ["  from memory:"] if documents else []
    for document in documents:
        passage, share = document.passage, f"{100 * document.attention:3.0f}%"
        text = textwrap.shorten(f"{passage.title}: {passage.text}", 90, placeholder=" ...")
        lines.append(f"   {share}  {document.memory}  [{document.score:.2f}]  {text}")
    return lines


MEMORIES.register(ask_augmented)
