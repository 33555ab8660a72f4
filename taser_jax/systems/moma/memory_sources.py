"""The documents fused with a query: memory, lookup score and the end retriever's attention."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float32

from taser_jax.commands.search import FUSED_DOCUMENTS, WriteDocuments
from taser_jax.data.collections.store import PassageStore
from taser_jax.storage.artifacts import FilePath, replacing
from taser_jax.storage.records import Passage
from taser_jax.systems.moma.memories import Lookup, Mixture
from taser_jax.systems.moma.query_documents import read_fused


@dataclasses.dataclass(frozen=True)
class Source:
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


def sources(
    mixture: Mixture,
    lookup: Lookup,
    attention: Float32[np.ndarray, "queries segments"],
    *,
    data_dir: str,
) -> list[list[Source]]:
    """The documents fused with each query, most attended first.

    Args:
        mixture: the memories.
        lookup: the documents of each query, of which the first K are fused.
        attention: attention to the query's own tokens, then to each of these K.
        data_dir: folder of the memories' collections.
    """
    count = attention.shape[1] - 1
    found = []
    for rows, scores, weights in zip(lookup.rows, lookup.scores, attention, strict=True):
        present = np.flatnonzero(rows[:count] >= 0)
        shares = weights[1:][present] / max(float(weights[1:][present].sum()), 1e-30)
        fused = [
            Source(memory, passage, float(score), float(share))
            for (memory, passage), score, share in zip(
                _documents(mixture, rows[present], data_dir),
                scores[present],
                shares,
                strict=True,
            )
        ]
        found.append(sorted(fused, key=lambda one: -one.attention))
    return found


def write_sources(
    path: FilePath, query_ids: Sequence[str], found: Sequence[Sequence[Source]]
) -> None:
    """Writes a JSON line per query: its id, and each document with memory, score and attention."""
    with replacing(path) as scratch, open(scratch, "w", encoding="utf-8") as file:
        for query_id, sources in zip(query_ids, found, strict=True):
            documents = [
                {
                    "document": one.passage.id,
                    "memory": one.memory,
                    "score": round(one.score, 6),
                    "attention": round(one.attention, 6),
                }
                for one in sources
            ]
            file.write(json.dumps({"query": query_id, "documents": documents}) + "\n")


def fused_documents(memory_dir: str, data_dir: str) -> WriteDocuments:
    """What writes the documents of a mixture that encoded queries were fused with.

    Args:
        memory_dir: the mixture.
        data_dir: folder of its collections.
    """
    mixture = Mixture.open(memory_dir)

    def write(path: FilePath, queries_dir: FilePath, query_ids: Sequence[str]) -> None:
        lookup, attention = read_fused(queries_dir, mixture)
        write_sources(path, query_ids, sources(mixture, lookup, attention, data_dir=data_dir))

    return write


def _documents(mixture: Mixture, rows: np.ndarray, data_dir: str) -> Iterator[tuple[str, Passage]]:
    stores = [PassageStore.open(data_dir, one.collection) for one in mixture.manifest.memories]
    for memory, row in zip(*mixture.places(rows), strict=True):
        yield mixture.names[memory], stores[memory][int(row)]


FUSED_DOCUMENTS.register(fused_documents)
