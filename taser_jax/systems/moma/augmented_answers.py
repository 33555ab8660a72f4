"""Answers typed questions with an end retriever that fuses documents from memories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from taser_jax.models.batch import Role
from taser_jax.retrieval.embeddings import encode_rows
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retriever import Hit, Retriever, TokensInMemory
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma.attention import document_attention
from taser_jax.systems.moma.augmentation import document_reader
from taser_jax.systems.moma.joined import JoinedEmbeddings
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture
from taser_jax.systems.moma.memory_sources import Source, sources


@dataclasses.dataclass(frozen=True)
class Memories:
    """Where the documents of typed questions come from.

    Attributes:
        memory_dir: the mixture.
        lookup_dir: the model that looks them up: the one that the memories were added with.
        documents: documents fused with each question, K.
        data_dir: folder of the memories' collections.
    """

    memory_dir: str
    lookup_dir: str
    documents: int
    data_dir: str


def ask_augmented(
    questions: Sequence[str],
    retriever: Retriever,
    memories: Memories,
    *,
    k: int,
    task: str | None = None,
    query_length: int | None = None,
) -> tuple[list[list[Hit]], list[list[Source]]]:
    """Looks documents up for each question, fuses them, and searches.

    Args:
        questions: questions as typed.
        retriever: the end retriever, with its collection.
        memories: where documents come from.
        k: passages per question.
        task: whose prompt, length and query encoder, where tasks differ.
        query_length: maximum tokens per question; None takes each model's own.

    Returns:
        The best passages of each question, and the documents fused with it, most attended first.

    Raises:
        ConfigError: the model fuses no documents, or K is beyond the mixture.
        FingerprintError: another model than the lookup encoded the memories.
    """
    model, mixture = retriever.model, Mixture.open(memories.memory_dir)
    if not model.model.config.fuses:
        raise model.model.config.no_fusion()
    if not 1 <= memories.documents <= len(mixture):
        raise ConfigError(
            f"{memories.documents} documents",
            where="DOCUMENTS",
            expected=f"1 to {len(mixture)}, the documents of the mixture",
        )
    lookup = Retriever.load(memories.lookup_dir, task=task, query_length=query_length)
    require_equal(
        f"memories {memories.memory_dir}",
        mixture.manifest.fingerprints,
        {"model": lookup.model.passage_fingerprint},
        "name the model that they were added with as LOOKUP_DIR",
    )
    searcher = ExactSearcher(JoinedEmbeddings(mixture), devices=search_devices())
    result = searcher.search(lookup.encode_queries(questions), memories.documents)
    found = Lookup([*map(str, range(len(questions)))], result.rows, result.scores)
    texts = AugmentedTexts(
        TokensInMemory(retriever.query_tokens(questions)),
        found.rows,
        document_reader(model.model.config, mixture),
    )
    config = EncodeConfig(batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=task)
    embeddings, _ = encode_rows(encode, texts, np.arange(len(questions)), config=config)
    attention = document_attention(model, texts, task=task, config=config)
    documents = sources(mixture, found, attention, data_dir=memories.data_dir)
    return retriever.search_embeddings(embeddings, k=k), documents
