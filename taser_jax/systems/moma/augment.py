"""Documents of memories for queries: `taser augment`, and `taser ask` with memories."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int

from taser_jax.assembly.data import query_sets
from taser_jax.assembly.model_directory import LoadedModel, check_vocabulary, load_model
from taser_jax.commands.ask import MEMORIES, Answer
from taser_jax.commands.inputs import run_path
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.models.batch import Role
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retrieval.runs import NO_ROW, Run, top_k, write_trec_run
from taser_jax.retriever import Retriever
from taser_jax.retriever_parts import TokensInMemory
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.records import Passage
from taser_jax.systems.moma import query_documents
from taser_jax.systems.moma.embeddings import EmbeddingsByText, tower_fingerprints
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture


@writes("{output_dir}", kinds=[])
@first_host_only
def augment(
    *,
    memory_dir: str,
    token_store: str,
    model_dir: str,
    output_dir: str,
    data_dir: str | None = None,
    tasks: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    k: int = 10,
    without_gold_of: str | None = None,
    config: EncodeConfig = EncodeConfig(),
    step: int | None = None,
) -> dict[str, int]:
    """Looks up the K best documents of each query in a mixture, by one exact search (equation 4).

    Splits that the same model has already looked up in the same mixture are reused.

    Args:
        memory_dir: the mixture, from `taser memory add` with this model.
        token_store: the queries' tokens.
        model_dir: the model that looks documents up, f_a.
        output_dir: receives a folder `<task>.<split>/` and, with `data_dir`, a run file per split.
        data_dir: folder of the memories' collections, for documents' ids in runs (`memory:id`);
            None writes no run.
        tasks: tasks to use; None means all.
        splits: splits to use; None means all.
        k: documents per query.
        without_gold_of: the memory that holds the queries' positives; each training query's own
            positives are then left out of its documents. None keeps them, as the paper does.
        config: sizes of batches.
        step: step of the checkpoint; None means the best one.

    Returns:
        Queries, by task and split; 0 where they were reused.

    Raises:
        ConfigError: k below 1 or above the mixture, or an unknown task or split.
        FingerprintError: the mixture was encoded by another passage tower or vocabulary.
    """
    store, mixture = TokenStore.open(token_store), Mixture.open(memory_dir)
    model = load_model(model_dir, step=step)
    check_vocabulary(model, store)
    tower = tower_fingerprints(model, store)
    fix = "add the memories with this model, to a directory of their own"
    require_equal(f"memories {memory_dir}", mixture.manifest.fingerprints, tower, fix)
    check_documents(k, len(mixture))
    searcher = ExactSearcher(EmbeddingsByText.of_mixture(mixture), devices=search_devices())
    counts = {}
    for queries in query_sets(store, tasks, splits, splits_setting="augment.splits"):
        task, split = queries.task, queries.split
        prints = {
            **mixture.fingerprints,
            "queries": queries.fingerprint,
            "query_model": model.fingerprint,
            "settings": json.dumps([k, without_gold_of]),
        }
        name = f"{task} {split}"
        counts[name] = 0
        if _is_done(output_dir, queries, prints):
            logger.info("%s: looked up before", name)
            continue
        with phase(f"augment {name}"):
            gold = None
            if without_gold_of is not None and split == "train":
                gold = mixture.gold(without_gold_of, queries.positives)
            lookup = _look_up(model, queries, searcher, k=k, gold=gold, config=config)
        query_documents.write_lookup(
            output_dir, task, split, lookup, memory_dir=memory_dir, fingerprints=prints
        )
        if data_dir is not None:
            _write_run(output_dir, task, split, lookup, mixture, data_dir)
        counts[name] = len(queries)
    return counts


def check_documents(count: int, available: int) -> None:
    """Refuses a number of documents per query that the mixture cannot give.

    Raises:
        ConfigError: naming both.
    """
    if not 1 <= count <= available:
        title = f"{count} documents per query of a mixture of {available}"
        fix = f"set DOCUMENTS to 1 to {available}"
        raise ConfigError(title, where="DOCUMENTS", fix=fix)


def _is_done(output_dir: str, queries: TokenizedQueries, prints: dict[str, str]) -> bool:
    try:
        _, metadata = query_documents.read_lookup(output_dir, queries.task, queries.split)
    except DataError:
        return False
    return metadata.fingerprints == prints


def _look_up(
    model: LoadedModel,
    queries: TokenizedQueries,
    searcher: ExactSearcher,
    *,
    k: int,
    gold: Sequence[Int[np.ndarray, " positives"]] | None,
    config: EncodeConfig,
) -> Lookup:
    """The best K documents of each query, without its `gold`."""
    config = dataclasses.replace(config, batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=queries.task)
    embeddings = encode_rows(encode, queries, np.arange(len(queries)), config=config)
    if gold is None:
        result = searcher.search(embeddings, k)
        return Lookup(queries.query_ids, result.rows, result.scores)
    deeper = max(map(len, gold), default=0)
    result = searcher.search(embeddings, min(k + deeper, searcher.embeddings.shape[0]))
    is_gold = np.array([np.isin(line, own) for line, own in zip(result.rows, gold, strict=True)])
    order = np.argsort(is_gold, axis=1, kind="stable")[:, :k]
    rows, scores, is_gold = (
        np.take_along_axis(array, order, axis=1) for array in (result.rows, result.scores, is_gold)
    )
    # Where the mixture has too few others, gold is left at the end: no document.
    rows = np.where(is_gold, NO_ROW, rows)
    return Lookup(queries.query_ids, rows, np.where(is_gold, np.float32(0), scores))


def _write_run(
    output_dir: str, task: str, split: str, lookup: Lookup, mixture: Mixture, data_dir: str
) -> None:
    """Writes the lookup as a run file with passage ids `memory:id`."""
    real = np.unique(lookup.rows[lookup.rows >= 0])
    stores = [PassageStore.open(data_dir, memory.collection) for memory in mixture.memories]
    places = zip(*mixture.places(real), strict=True)
    ids = [f"{mixture.names[memory]}:{stores[memory].ids[row]}" for memory, row in places]
    run = Run.of(lookup.query_ids, top_k(lookup.rows, lookup.scores, lookup.rows.shape[1]))
    # Renumbered to these documents: reading the ids of all would take longer than searching.
    compact = np.where(run.rows >= 0, np.searchsorted(real, run.rows), NO_ROW).astype(np.int32)
    run = Run(run.query_ids, compact, run.scores)
    write_trec_run(run_path(output_dir, task, split), run, ids=ids, tag="memories")


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
        title = "no model looks documents up in the memories"
        raise ConfigError(title, where="LOOKUP_DIR", fix=fix)
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
    searcher = ExactSearcher(EmbeddingsByText.of_mixture(mixture), devices=search_devices())
    result = searcher.search(lookup.encode_queries(questions), documents)
    looked_up = Lookup([*map(str, range(len(questions)))], result.rows, result.scores)
    texts = AugmentedTexts(
        TokensInMemory(retriever.query_tokens(questions)),
        looked_up.rows,
        query_documents.document_reader(model.model.config, mixture),
    )
    config = EncodeConfig(batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=task)
    embeddings = encode_rows(encode, texts, np.arange(len(questions)), config=config)
    attention = query_documents.document_attention(model, texts, task=task, config=config)
    fused = fused_documents(mixture, looked_up, attention, data_dir=data_dir)
    hits = retriever.search_embeddings(embeddings, k=k)
    return [Answer(best, sources=_shown(own)) for best, own in zip(hits, fused, strict=True)]


def _shown(documents: Sequence[FusedDocument]) -> list[str]:
    lines = ["  from memory:"] if documents else []
    for document in documents:
        passage, share = document.passage, f"{100 * document.attention:3.0f}%"
        text = textwrap.shorten(f"{passage.title}: {passage.text}", 90, placeholder=" ...")
        lines.append(f"   {share}  {document.memory}  [{document.score:.2f}]  {text}")
    return lines


MEMORIES.register(ask_augmented)
