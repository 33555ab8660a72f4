"""`taser augment`: the documents that a mixture of memories has for each query."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from taser_jax.assembly.data import query_sets
from taser_jax.assembly.model_directory import LoadedModel, check_vocabulary, load_model
from taser_jax.commands.inputs import run_path
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.models.batch import Role
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retrieval.runs import NO_ROW, Run, top_k, write_trec_run
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase
from taser_jax.systems.moma.embeddings import EmbeddingsByText, tower_fingerprints
from taser_jax.systems.moma.memories import Lookup, Mixture
from taser_jax.systems.moma.query_documents import read_lookup, write_lookup


@writes("{output_dir}")
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
            lookup = _look_up(model, queries, searcher, mixture, k=k, gold=gold, config=config)
        write_lookup(output_dir, task, split, lookup, memory_dir=memory_dir, fingerprints=prints)
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
        _, metadata = read_lookup(output_dir, queries.task, queries.split)
    except DataError:
        return False
    return metadata.fingerprints == prints


def _look_up(
    model: LoadedModel,
    queries: TokenizedQueries,
    searcher: ExactSearcher,
    mixture: Mixture,
    *,
    k: int,
    gold: Sequence[Int[np.ndarray, " positives"]] | None,
    config: EncodeConfig,
) -> Lookup:
    """The best K documents of each query, without its `gold`."""
    config = dataclasses.replace(config, batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=queries.task)
    embeddings, _ = encode_rows(encode, queries, np.arange(len(queries)), config=config)
    deeper = 0 if gold is None else max(map(len, gold), default=0)
    result = searcher.search(embeddings, min(k + deeper, len(mixture)))
    rows = result.rows
    if gold is None:
        return Lookup(queries.query_ids, rows, result.scores)
    is_other = np.array([~np.isin(line, own) for line, own in zip(rows, gold, strict=True)])
    order = np.argsort(~is_other, axis=1, kind="stable")[:, :k]
    rows, scores, is_other = (
        np.take_along_axis(array, order, axis=1) for array in (rows, result.scores, is_other)
    )
    scores = np.where(is_other, scores, 0.0).astype(np.float32)
    return Lookup(queries.query_ids, np.where(is_other, rows, NO_ROW), scores)


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
