"""What a lookup learns from an end retriever's attention, and how memories share that attention."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Float32, Int

from taser_jax.assembly.model_directory import load_model, read_facts
from taser_jax.assembly.text_sources import frozen_texts
from taser_jax.commands.pipelines.retrieval_stages import DEVELOPMENT
from taser_jax.data.batches.stream import TextSource
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, TokenStore
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.devices.hosts import writes
from taser_jax.retrieval.embeddings import EmbeddingDtype
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.retrieval.runs import Run, among
from taser_jax.storage.artifacts import FilePath, replacing
from taser_jax.systems.moma.memories import SOURCE, Mixture
from taser_jax.systems.moma.query_documents import Augmentation, document_attention, read_lookup

_BLOCK = 4096
# Documents that are drawn as the lookup's negatives, as many as ANCE's.
LOOKUP_NEGATIVES = 30


def distil(
    gold: Iterable[Int[np.ndarray, " positives"]],
    lookup: Run,
    attention: Float32[np.ndarray, "queries documents"],
    *,
    learned: int,
    negatives: int = LOOKUP_NEGATIVES,
) -> tuple[Ragged, Ragged]:
    """Positives D^s+ ∪ top N of D^a by attention, and negatives from the other documents found.

    Equations 10 to 12 of MoMA. A document with the same text as a positive has the same row in the
    mixture, and so is no negative.

    Args:
        gold: relevant documents of each query, as rows of the mixture.
        lookup: what the lookup model found, deeper than the documents that were fused.
        attention: attention to the first K of them.
        learned: N, at most K.
        negatives: number of negatives drawn per query; the paper states none.

    Returns:
        Positives of each query, gold first, and negatives, as rows of the mixture.
    """
    count = attention.shape[1]
    rng = np.random.default_rng([0xD157, 0])
    scores = np.where(lookup.rows[:, :count] >= 0, attention, -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :learned]
    attended = np.take_along_axis(lookup.rows, order, axis=1)
    positives, drawn = [], []
    for own, best, candidates in zip(gold, attended, lookup.rows, strict=True):
        joined = np.array([*own, *best[best >= 0]], np.int64)
        _, first = np.unique(joined, return_index=True)
        positives.append(joined[np.sort(first)])
        rest = candidates[(candidates >= 0) & ~np.isin(candidates, joined)]
        drawn.append(rng.permutation(rest)[:negatives])
    return Ragged.from_lists(positives), Ragged.from_lists(drawn)


def write_joined_store(
    directory: FilePath, mixture: Mixture, source: TokenStore, queries: Sequence[TokenizedQueries]
) -> TokenStore:
    """A token store of all memories, with the source's queries: what the lookup model trains on.

    Args:
        directory: where it goes.
        mixture: the memories, whose documents become its passages.
        source: the token store whose vocabulary, lengths, titles and prompts it takes.
        queries: query sets whose positives and negatives are rows of the mixture.
    """
    about = source.metadata
    settings = {
        (entry.task, entry.split): QuerySettings(
            QueryNormalization(entry.normalization), entry.prompt
        )
        for entry in about.queries
    }
    joined = dataclasses.replace(
        about,
        collection="memories",
        collection_fingerprint=mixture.manifest.fingerprint,
        passage_length=mixture.length,
    )
    with replacing(directory) as scratch:
        writer = TokenStoreWriter(scratch, joined)
        shutil.copytree(
            source.vocabulary_directory, writer.vocabulary_directory, dirs_exist_ok=True
        )
        writer.write_passages(_token_lists(mixture), count=len(mixture))
        for own in queries:
            writer.write_queries(
                own.task,
                own.split,
                query_ids=own.query_ids,
                tokens=[ids[:n].tolist() for ids, n in zip(own.ids, own.lengths, strict=True)],
                positives=[rows.tolist() for rows in own.positives],
                hard_negatives=[rows.tolist() for rows in own.hard_negatives],
                length=own.ids.shape[1],
                settings=settings[own.task, own.split],
            )
        writer.finish()
    return TokenStore.open(directory)


def attention_shares(
    mixture: Mixture,
    rows: Int[np.ndarray, "queries depth"],
    attention: Float[np.ndarray, "queries segments"],
    *,
    gold: Iterable[Int[np.ndarray, " relevant"]],
) -> dict[str, object]:
    """Figure 2's numbers: by memory, its share of attention and of documents; gold found.

    Args:
        mixture: the memories.
        rows: documents of each query, of which the first K are attended to.
        attention: to the query's own tokens, then to the K documents.
        gold: relevant documents of each query; their memory is split into "source, relevant" and
            "source, other".

    Returns:
        "attention" and "documents", each by memory and summing to 1 (the query's own segment is
        left out), and "queries_with_gold", the share of queries with a relevant document.
    """
    documents, weights = rows[:, : attention.shape[1] - 1], attention[:, 1:]
    present = documents >= 0
    memory, _ = mixture.places(documents[present])
    relevant = among(documents, gold)
    is_gold = (memory == mixture.manifest.names.index(SOURCE)) & relevant[present]
    memory = np.where(is_gold, len(mixture.manifest.names), memory)
    names = [f"{name}, other" if name == SOURCE else name for name in mixture.manifest.names]
    names.append(f"{SOURCE}, relevant")

    def shares(values: Float[np.ndarray, " documents"]) -> dict[str, float]:
        totals = np.bincount(memory, weights=values, minlength=len(names))
        return dict(zip(names, (totals / max(totals.sum(), 1e-30)).tolist(), strict=True))

    return {
        "attention": shares(weights[present]),
        "documents": shares(np.ones(int(present.sum()))),
        "queries_with_gold": float(relevant.any(axis=1).mean()),
    }


@writes("{output_dir}")
def distil_queries(
    *,
    output_dir: str,
    token_store: str,
    model_dir: str,
    memory_dir: str,
    augmentation_dir: str,
    documents: int,
    tasks: Sequence[str],
    learned: int,
    config: EncodeConfig = EncodeConfig(),
    states_dir: str | None = None,
    states_dtype: EmbeddingDtype = EmbeddingDtype.FLOAT32,
) -> dict[str, list[dict[str, object]]]:
    """Writes what the lookup trains on: the training queries distilled, the others with their gold.

    Args:
        output_dir: of the joined store.
        token_store: the source's.
        model_dir: the end retriever.
        memory_dir: the mixture.
        augmentation_dir: its documents of the queries.
        documents: how many of a query's documents the end retriever reads.
        tasks: the queries' tasks.
        learned: N, the most attended documents, which become positives.
        config: batches of encoding.
        states_dir: states of the blocks that were frozen in training; None encodes tokens.
        states_dtype: dtype of these states.

    Returns:
        "attention": `attention_shares` of each task, with its name.
    """
    mixture, model = Mixture.open(memory_dir), load_model(model_dir)
    store = TokenStore.open(token_store)
    augmentation = Augmentation(
        augmentation_dir, per_query=documents, config=model.model.config, store=store
    )
    texts: TextSource = augmentation
    by_split = {
        split: [
            store.queries(entry.task, split)
            for entry in store.metadata.queries
            if entry.split == split and entry.task in tasks
        ]
        for split in (DEVELOPMENT, "train")
    }
    if states_dir:
        model = model.frozen(read_facts(model_dir).get("train_from_block", 0))
        texts = frozen_texts(
            states_dir,
            dtype=states_dtype,
            model=model.model,
            params=model.params,
            store=store,
            queries=by_split["train"],
            augmentation=augmentation,
        )
    joined, shares = [], []
    for queries in by_split[DEVELOPMENT]:
        gold = mixture.gold(SOURCE, queries)
        none = Ragged.from_lists([[]] * len(gold))
        joined.append(dataclasses.replace(queries, positives=gold, hard_negatives=none))
    for queries in by_split["train"]:
        gold = mixture.gold(SOURCE, queries)
        lookup = read_lookup(augmentation_dir, queries.task, "train").run
        of_queries = texts.of_queries(queries)
        attention = document_attention(model, of_queries, task=queries.task, config=config)
        of_task = attention_shares(mixture, lookup.rows, attention, gold=gold)
        shares.append({"task": queries.task} | of_task)
        found, drawn = distil(gold, lookup, attention[:, 1:], learned=learned)
        joined.append(dataclasses.replace(queries, positives=found, hard_negatives=drawn))
    write_joined_store(pathlib.Path(output_dir), mixture, store, joined)
    return {"attention": shares}


def _token_lists(mixture: Mixture) -> Iterator[list[int]]:
    for start in range(0, len(mixture), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(mixture)))
        tokens = mixture.tokens(rows)
        for ids, length in zip(tokens.ids, mixture.lengths[rows], strict=True):
            yield ids[:length].tolist()
