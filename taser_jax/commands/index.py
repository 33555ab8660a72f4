"""`taser index`: an exact or ScaNN index of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.exact import ExactConfig, search_devices
from taser_jax.retrieval.index import IndexConfig, IndexKind, build_index
from taser_jax.retrieval.query_embeddings import QueryEmbeddings, encoded_splits
from taser_jax.retrieval.scann_shards import ScannConfig
from taser_jax.storage.progress import logger, phase

# Makes the draw of sample queries independent of all other draws.
_PURPOSE = 0x1DE7


@writes("{index_dir}")
@first_host_only
def index(
    *,
    embeddings_dir: str,
    index_dir: str,
    config: IndexConfig = IndexConfig(),
    sample_split: str = "validation",
    tasks: Sequence[str] | None = None,
) -> str:
    """Builds an index; a finished one is checked and kept.

    For a ScaNN index, prints the recall against exact search, measured on the split's encoded
    queries, or on passages if there are none.

    Args:
        embeddings_dir: from `taser encode`.
        index_dir: where the index goes.
        config: exact (a pointer to the embeddings) or ScaNN.
        sample_split: split whose queries measure the recall; not the one that is reported.
        tasks: tasks whose queries measure it; None means all that have the split.

    Returns:
        The index's directory.

    Raises:
        FingerprintError: the directory holds an index of other embeddings, or the queries were
            encoded with another model than the passages.
    """
    queries = None
    if config.kind is IndexKind.SCANN:
        queries = _sample(
            embeddings_dir, split=sample_split, tasks=tasks, count=config.scann.recall_queries
        )
    with phase("build index"):
        build_index(
            embeddings_dir,
            index_dir,
            config=config,
            sample_queries=queries,
            devices=search_devices(),
        )
    return index_dir


def _sample(
    embeddings_dir: str, *, split: str, tasks: Sequence[str] | None, count: int
) -> np.ndarray | None:
    """Embeddings of some queries, equally many per task; None where no task has the split."""
    encoded = [task for task, encoded in encoded_splits(embeddings_dir) if encoded == split]
    names = encoded if tasks is None else [task for task in tasks if task in encoded]
    if not names:
        logger.info("no %s queries: recall is measured on passages", split)
        return None
    passages = Embeddings(embeddings_dir).fingerprints
    share = -(-count // len(names))
    parts = []
    for task in names:
        queries = QueryEmbeddings.of_split(embeddings_dir, task, split, fingerprints=passages)
        rows = np.random.default_rng([_PURPOSE, len(queries)]).permutation(len(queries))
        parts.append(queries.take(rows[:share]))
    return np.concatenate(parts)


CONFIGURABLES = (ExactConfig, IndexConfig, ScannConfig)
