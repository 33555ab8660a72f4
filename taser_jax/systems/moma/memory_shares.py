"""How a mixture's memories share a retriever's attention and documents: MoMA's Figure 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from taser_jax.assembly.model_directory import load_model
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.fusion import FidAttention
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.systems.moma.attention import document_attention, gold_documents
from taser_jax.systems.moma.augmentation import Augmentation, read_lookup
from taser_jax.systems.moma.memories import Mixture


def attention_shares(
    mixture: Mixture,
    rows: Int[np.ndarray, "queries depth"],
    attention: Float[np.ndarray, "queries segments"],
    *,
    gold: Sequence[Int[np.ndarray, " relevant"]],
    source: str | None = None,
) -> dict[str, object]:
    """Figure 2's numbers: by memory, its share of attention and of documents; gold found.

    Args:
        mixture: the memories.
        rows: documents of each query, of which the first K are attended to.
        attention: to the query's own tokens, then to the K documents.
        gold: relevant documents of each query.
        source: a memory that is split into "<source>, relevant" and "<source>, other"; None splits
            none.

    Returns:
        "attention" and "documents", each by memory and summing to 1 (the query's own segment is
        left out), and "queries_with_gold", the share of queries with a relevant document.
    """
    found, weights = rows[:, : attention.shape[1] - 1], attention[:, 1:]
    present = found >= 0
    memory, _ = mixture.places(found[present])
    relevant = np.array([np.isin(line, own) for line, own in zip(found, gold, strict=True)])
    names = mixture.names
    if source is not None:
        number = names.index(source)
        memory = np.where((memory == number) & relevant[present], len(names), memory)
        names = [f"{name}, other" if name == source else name for name in names]
        names.append(f"{source}, relevant")

    def shares(values: np.ndarray) -> dict[str, float]:
        totals = np.bincount(memory, weights=values, minlength=len(names))
        return dict(zip(names, (totals / max(totals.sum(), 1e-30)).tolist(), strict=True))

    return {
        "attention": shares(weights[present]),
        "documents": shares(np.ones(int(present.sum()))),
        "queries_with_gold": float(relevant.any(axis=1).mean()),
    }


def attention_by_task(
    *,
    model_dir: str,
    memory_dir: str,
    augmentation_dir: str,
    documents: int,
    kind: FidAttention,
    config: EncodeConfig,
    token_store: str,
    tasks: Sequence[str],
    split: str,
    source: str,
) -> dict[str, tuple[dict[str, Any], TokenizedQueries, list[np.ndarray], np.ndarray]]:
    """What an end retriever attends to, for each task of a split.

    Args:
        model_dir: the end retriever.
        memory_dir: the mixture.
        augmentation_dir: its documents of the queries.
        documents: how many of a query's documents are read.
        kind: which attention.
        config: batches of encoding.
        token_store: has the queries.
        tasks: theirs.
        split: theirs.
        source: the memory that their positives are of.

    Returns:
        Task -> shares by memory, the queries, their relevant documents, and the attention to each
        query's own tokens and its documents.
    """
    mixture, model = Mixture.open(memory_dir), load_model(model_dir)
    store = TokenStore.open(token_store)
    augmentation = Augmentation.open(
        augmentation_dir, per_query=documents, config=model.model.config, store=store
    )
    attended = {}
    for entry in store.metadata.queries:
        if entry.split != split or entry.task not in tasks:
            continue
        queries = store.queries(entry.task, split)
        gold = gold_documents(mixture, source, queries.positives)
        lookup, _ = read_lookup(augmentation_dir, entry.task, split)
        attention = document_attention(
            model, augmentation.of_queries(queries), task=entry.task, kind=kind, config=config
        )
        line = attention_shares(mixture, lookup.rows, attention, gold=gold, source=source)
        attended[entry.task] = {"task": entry.task, **line}, queries, gold, attention
    return attended
