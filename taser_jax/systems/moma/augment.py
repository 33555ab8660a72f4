"""Documents of memories for queries: `taser augment`, and `taser ask` with memories."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from taser_jax.assembly.data import query_sets
from taser_jax.assembly.model_directory import check_vocabulary, load_model
from taser_jax.commands.ask import Answer
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.models.batch import Role
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.retrieval.exact import ExactSearcher
from taser_jax.retrieval.runs import QueryArrays, SearchResult, among, top_k
from taser_jax.retriever import Retriever
from taser_jax.storage.artifacts import path_from, require_equal, split_path
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import phase
from taser_jax.systems.moma import query_documents
from taser_jax.systems.moma.memories import AugmentedTexts, Mixture, read_manifest, write_manifest
from taser_jax.systems.moma.memory import EmbeddingsByText, add_memory, tower_fingerprints


@writes("{output_dir}", kinds=[])
@first_host_only
def augment(
    *,
    memory_dir: str,
    token_store: str,
    model_dir: str,
    output_dir: str,
    tasks: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    k: int = 10,
    without_gold_of: str | None = None,
    config: EncodeConfig = EncodeConfig(),
) -> dict[str, int]:
    """Looks up the K best documents of each query in a mixture, by one exact search (equation 4).

    Args:
        memory_dir: the mixture, from `taser memory add` with this model.
        token_store: the queries' tokens.
        model_dir: the model that looks documents up, f_a.
        output_dir: receives a folder `<task>.<split>/` for each split.
        tasks: tasks to use; None means all.
        splits: splits to use; None means all.
        k: documents per query.
        without_gold_of: the memory that holds the queries' positives; each training query's own
            positives are then left out of its documents. None keeps them, as the paper does.
        config: sizes of batches.

    Returns:
        Queries, by task and split.

    Raises:
        ConfigError: k below 1 or above the mixture, or an unknown task, split or memory.
        FingerprintError: the mixture was encoded by another passage tower or vocabulary, or
            `without_gold_of` is another collection than that of the queries.
    """
    store, mixture = TokenStore.open(token_store), Mixture.open(memory_dir)
    model = load_model(model_dir)
    check_vocabulary(model.vocabulary_dir, store)
    tower = tower_fingerprints(model.passage_fingerprint, store)
    fix = "add the memories with this model, to a directory of their own"
    require_equal(f"memories {memory_dir}", mixture.manifest.fingerprints, tower, fix)
    check_documents(k, len(mixture))
    searcher = ExactSearcher(EmbeddingsByText.of_mixture(mixture))
    counts = {}
    for queries in query_sets(store, tasks, splits, splits_setting="augment.splits"):
        own = split_path(output_dir, queries.task, queries.split)
        name = f"{queries.task} {queries.split}"
        prints = {
            **mixture.fingerprints,
            query_documents.MEMORY_DIR: path_from(own, memory_dir),
            "queries": queries.fingerprint,
            "query_model": model.fingerprint,
            "settings": json.dumps([k, without_gold_of]),
        }
        with phase(f"augment {name}"):
            gold: Sequence[Sequence[int]] | Ragged = [()] * len(queries)
            if without_gold_of is not None and queries.split == "train":
                gold = mixture.gold(without_gold_of, queries)
            encode = model.encode_fn(Role.QUERY, task=queries.task)
            embeddings = encode_rows(encode, queries, np.arange(len(queries)), config=config)
            deeper = min(k + max(map(len, gold)), len(mixture))
            with_gold = searcher.search(embeddings, deeper)
            scores = np.where(among(with_gold.rows, gold), np.float32(-np.inf), with_gold.scores)
            result = top_k(with_gold.rows, scores, k)
        arrays = {"rows": result.rows, "scores": result.scores}
        QueryArrays(query_documents.KIND, queries.query_ids, arrays, prints).save(own)
        counts[name] = len(queries)
    return counts


@writes("{output_dir}", "{memory_dir}")
def look_up(
    *,
    memories: Mapping[str, str],
    memory_dir: str,
    model_dir: str,
    output_dir: str,
    shared_embeddings: str,
    k: int,
    config: EncodeConfig,
    **options: Any,
) -> dict[str, object]:
    """Makes a mixture of memories and looks queries up; returns what was encoded of each memory.

    Args:
        memories: name -> token store.
        memory_dir: the mixture.
        model_dir: the lookup.
        output_dir: of the queries' documents.
        shared_embeddings: embeddings by the lookup's passage tower.
        k: documents per query, of mixtures that have as many.
        config: batches and shards of encoding.
        options: further arguments of `augment`.
    """
    shared = {"model_dir": model_dir, "memory_dir": memory_dir}
    before = read_manifest(memory_dir)
    # A run that was killed may have added others, or in another order.
    if before and before.names != list(memories)[: len(before.names)]:
        write_manifest(memory_dir, dataclasses.replace(before, memories=()))
    encoded = {
        name: add_memory(
            name=name,
            token_store=path,
            shared_embeddings=shared_embeddings,
            config=config,
            **shared,
        )["encoded"]
        for name, path in memories.items()
    }
    k = min(k, len(Mixture.open(memory_dir)))
    augment(output_dir=output_dir, k=k, config=config, **shared, **options)
    return {"encoded": encoded}


def check_documents(count: int, available: int) -> None:
    """Refuses a number of documents per query that the mixture cannot give.

    Raises:
        ConfigError: naming both.
    """
    if not 1 <= count <= available:
        problem = f"{count} documents per query of a mixture of {available}"
        fix = f"set DOCUMENTS to 1 to {available}"
        raise ConfigError(problem, where="DOCUMENTS", fix=fix)


def ask_augmented(
    questions: Sequence[str],
    retriever: Retriever,
    *,
    memory_dir: str,
    lookup_dir: str | None,
    documents: int,
    data_dir: str,
    task: str | None,
    query_length: int | None,
    k: int,
) -> list[Answer]:
    """Looks documents up for each question, fuses them, and searches.

    Args:
        questions: questions as typed.
        retriever: the end retriever with its collection.
        memory_dir: the mixture of memories.
        lookup_dir: the model that they were added with.
        documents: documents fused with each question, K.
        data_dir: folder of the memories' collections.
        task: task whose prompt, length and query encoder are used.
        query_length: maximum tokens per question; None means as in training.
        k: passages per question.

    Returns:
        The answers, each with the documents fused with the question, most attended first.

    Raises:
        ConfigError: no lookup model, an end retriever that fuses no documents, or K beyond the
            mixture.
        FingerprintError: another model than the lookup encoded the memories.
    """
    if lookup_dir is None:
        fix = "give the model that `taser memory add` encoded them with"
        problem = "no model looks documents up in the memories"
        raise ConfigError(problem, where="LOOKUP_DIR", fix=fix)
    model, mixture = retriever.model, Mixture.open(memory_dir)
    if not model.model.config.fuses:
        raise model.model.config.no_fusion()
    check_documents(documents, len(mixture))
    lookup = Retriever.load(lookup_dir, task=task, query_length=query_length)
    require_equal(
        f"memories {memory_dir}",
        mixture.manifest.fingerprints,
        {"model": lookup.model.passage_fingerprint},
        "name the model that they were added with as LOOKUP_DIR",
    )
    searcher = ExactSearcher(EmbeddingsByText.of_mixture(mixture))
    result = searcher.search(lookup.encode_queries(questions), documents)
    texts = AugmentedTexts(
        retriever.query_tokens(questions),
        result.rows,
        query_documents.document_reader(model.model.config, mixture),
    )
    encode = model.encode_fn(Role.QUERY, task=task)
    embeddings = encode_rows(encode, texts, np.arange(len(questions)), config=EncodeConfig())
    attention = query_documents.document_attention(model, texts, task=task, config=EncodeConfig())
    shown = documents_shown(mixture, result, attention, data_dir=data_dir)
    hits = retriever.search_embeddings(embeddings, k=k)
    return [Answer(best, sources=lines) for best, lines in zip(hits, shown, strict=True)]


def documents_shown(
    mixture: Mixture,
    result: SearchResult,
    attention: Float32[np.ndarray, "queries segments"],
    *,
    data_dir: str,
) -> list[list[str]]:
    """Lines about the documents fused with each query, most attended first.

    Each line has the document's share of the attention to the query's documents, its memory, its
    score and its text.

    Args:
        mixture: the memories.
        result: the documents of each query, of which the first K are fused.
        attention: attention to the query's own tokens, then to each of these K.
        data_dir: folder of the memories' collections.
    """
    stores = [
        PassageStore.open(data_dir, memory.collection) for memory in mixture.manifest.memories
    ]
    by_query = []
    for rows, scores, weights in zip(result.rows, result.scores, attention[:, 1:], strict=True):
        present = np.flatnonzero(rows[: len(weights)] >= 0)
        whole = max(float(weights[present].sum()), 1e-30)
        lines = ["  from memory:"] if len(present) else []
        for place in present[np.argsort(-weights[present], kind="stable")]:
            [memory], [row] = mixture.places(rows[[place]])
            passage, share = stores[memory][int(row)], 100 * weights[place] / whole
            text = textwrap.shorten(f"{passage.title}: {passage.text}", 90, placeholder=" ...")
            name = mixture.manifest.names[memory]
            lines.append(f"   {share:3.0f}%  {name}  [{scores[place]:.2f}]  {text}")
        by_query.append(lines)
    return by_query
