"""`taser augment`: the documents that a mixture of memories has for each query."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from taser_jax.assembly.data import query_sets
from taser_jax.assembly.model_directory import LoadedModel, check_vocabulary, load_model
from taser_jax.commands.inputs import run_path
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.models.batch import Role
from taser_jax.retrieval.embeddings import encode_rows
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.retrieval.exact import ExactSearcher, search_devices
from taser_jax.retrieval.runs import NO_ROW, Run, top_k, write_trec_run
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase
from taser_jax.systems.moma.attention import gold_documents
from taser_jax.systems.moma.augmentation import read_lookup, write_lookup
from taser_jax.systems.moma.joined import JoinedEmbeddings
from taser_jax.systems.moma.memories import Lookup, Mixture
from taser_jax.systems.moma.shared_embeddings import tower_fingerprints


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
    excluded: Sequence[str] = (),
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
        excluded: memories that are not searched.
        without_gold_of: the memory that holds the queries' positives; each training query's own
            positives are then left out of its documents. None keeps them, as the paper does.
        config: sizes of batches.
        step: step of the checkpoint; None means the best one.

    Returns:
        Queries, by task and split; 0 where they were reused.

    Raises:
        ConfigError: k below 1 or above the mixture, or an unknown memory, task or split.
        FingerprintError: the mixture was encoded by another passage tower or vocabulary.
    """
    store, mixture = TokenStore.open(token_store), Mixture.open(memory_dir)
    model = load_model(model_dir, step=step)
    check_vocabulary(model, store)
    wanted = tower_fingerprints(model, store)
    fix = "add the memories with this model, to a directory of their own"
    require_equal(f"memories {memory_dir}", mixture.manifest.fingerprints, wanted, fix)
    searched = mixture_without(mixture, excluded)
    if not 1 <= k <= len(searched):
        raise ConfigError(
            f"k is {k}",
            where="DOCUMENTS",
            expected=f"1 to {len(searched)}, the documents of the mixture",
        )
    embeddings = JoinedEmbeddings(mixture)
    searcher = ExactSearcher(_Subset(embeddings, searched), devices=search_devices())
    counts = {}
    for queries in query_sets(store, tasks, splits, splits_setting="augment.splits"):
        task, split = queries.task, queries.split
        prints = {
            **embeddings.fingerprints,
            "queries": queries.fingerprint,
            "query_model": model.fingerprint,
            "settings": json.dumps([k, sorted(excluded), without_gold_of]),
        }
        name = f"{task} {split}"
        counts[name] = 0
        if _is_done(output_dir, queries, prints):
            logger.info("%s: looked up before", name)
            continue
        with phase(f"augment {name}"):
            own = None
            if without_gold_of is not None and split == "train":
                own = gold_documents(mixture, without_gold_of, queries.positives)
            lookup = _look_up(model, queries, searcher, searched, k=k, own=own, config=config)
        write_lookup(output_dir, task, split, lookup, memory_dir=memory_dir, fingerprints=prints)
        if data_dir is not None:
            _write_run(output_dir, task, split, lookup, mixture, data_dir)
        counts[name] = len(queries)
    return counts


def mixture_without(mixture: Mixture, excluded: Sequence[str]) -> np.ndarray:
    """Rows of the mixture's documents, without those of excluded memories."""
    if unknown := sorted(set(excluded) - set(mixture.names)):
        raise ConfigError(
            f"no memory {', '.join(unknown)}",
            where="augment.excluded",
            expected=f"some of {', '.join(mixture.names)}",
        )
    memory, _ = mixture.places(np.arange(len(mixture)))
    numbers = [mixture.names.index(name) for name in excluded]
    return np.flatnonzero(~np.isin(memory, numbers))


@dataclasses.dataclass(frozen=True)
class _Subset:
    """Embeddings of some documents."""

    embeddings: JoinedEmbeddings
    chosen: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.chosen), self.embeddings.shape[1]

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.embeddings.take(self.chosen[start:stop])


def _is_done(output_dir: str, queries: TokenizedQueries, prints: dict[str, str]) -> bool:
    try:
        _, metadata = read_lookup(output_dir, queries.task, queries.split)
    except DataError:
        return False
    return metadata["fingerprints"] == prints


def _look_up(
    model: LoadedModel,
    queries: TokenizedQueries,
    searcher: ExactSearcher,
    searched: np.ndarray,
    *,
    k: int,
    own: Sequence[np.ndarray] | None,
    config: EncodeConfig,
) -> Lookup:
    """The best K documents of each query, without its `own`."""
    config = dataclasses.replace(config, batch_multiple=model.batch_multiple)
    encode = model.encode_fn(Role.QUERY, task=queries.task)
    embeddings, _ = encode_rows(encode, queries, np.arange(len(queries)), config=config)
    deeper = 0 if own is None else max(map(len, own), default=0)
    found = searcher.search(embeddings, min(k + deeper, len(searched)))
    rows = np.where(found.rows >= 0, searched[found.rows], NO_ROW).astype(np.int32)
    if own is None:
        return Lookup(queries.query_ids, rows, found.scores)
    left = np.array([~np.isin(line, gold) for line, gold in zip(rows, own, strict=True)])
    order = np.argsort(~left, axis=1, kind="stable")[:, :k]
    kept = np.take_along_axis(left, order, axis=1)
    return Lookup(
        queries.query_ids,
        np.where(kept, np.take_along_axis(rows, order, axis=1), NO_ROW),
        np.where(kept, np.take_along_axis(found.scores, order, axis=1), 0.0).astype(np.float32),
    )


def _write_run(
    output_dir: str, task: str, split: str, lookup: Lookup, mixture: Mixture, data_dir: str
) -> None:
    """Writes the lookup as a run file with passage ids `memory:id`."""
    real = np.unique(lookup.rows[lookup.rows >= 0])
    ids = document_ids(mixture, real, data_dir)
    result = top_k(lookup.rows, lookup.scores, lookup.rows.shape[1])
    run = Run.of(lookup.query_ids, result)
    # Renumbered to the documents found: reading the ids of all would take longer than searching.
    places = np.searchsorted(real, run.rows)
    compact = Run(
        run.query_ids, np.where(run.rows >= 0, places, NO_ROW).astype(np.int32), run.scores
    )
    write_trec_run(run_path(output_dir, task, split), compact, ids=ids, tag="memories")


def document_ids(mixture: Mixture, rows: np.ndarray, data_dir: str) -> list[str]:
    """Each document's `memory:id`."""
    stores = [PassageStore.open(data_dir, one.collection) for one in mixture.manifest.memories]
    places = zip(*mixture.places(rows), strict=True)
    return [f"{mixture.names[memory]}:{stores[memory].ids[row]}" for memory, row in places]


CONFIGURABLES = (EncodeConfig,)
