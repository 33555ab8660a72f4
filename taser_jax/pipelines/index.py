"""`taser index`: an exact or ScaNN index of embeddings."""

from __future__ import annotations

from taser_jax.progress import phase
from taser_jax.retrieval.exact import ExactConfig
from taser_jax.retrieval.index import IndexConfig, build_index
from taser_jax.retrieval.scann_index import ScannConfig


def index(*, embeddings_dir: str, index_dir: str, config: IndexConfig = IndexConfig()) -> str:
    """Builds an index once; where it is built already, it is checked and kept.

    A ScaNN index prints its measured recall against exact search.

    Args:
        embeddings_dir: from `taser encode`.
        index_dir: where the index goes.
        config: exact (a pointer to the embeddings) or ScaNN.

    Returns:
        The index's directory.
    """
    with phase("build index"):
        build_index(embeddings_dir, index_dir, config=config)
    return index_dir


CONFIGURABLES = (ExactConfig, IndexConfig, ScannConfig)
