"""`taser index`: an exact or ScaNN index of embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taser_jax.assembly.model_directory import LoadedModel, check_vocabulary, load_model
from taser_jax.batch import Role
from taser_jax.commands.inputs import search_devices
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.hosts import first_host_only
from taser_jax.progress import logger, phase
from taser_jax.retrieval.embeddings import EncodeConfig, encode_queries
from taser_jax.retrieval.exact import ExactConfig
from taser_jax.retrieval.index import IndexConfig, IndexKind, build_index
from taser_jax.retrieval.scann_shards import ScannConfig

# Keeps the draw of sample queries apart from every other use of their number.
_PURPOSE = 0x1DE7


def index(
    *,
    embeddings_dir: str,
    index_dir: str,
    config: IndexConfig = IndexConfig(),
    model_dir: str | None = None,
    token_store: str | None = None,
    sample_split: str = "validation",
    tasks: Sequence[str] | None = None,
    step: int | None = None,
) -> str:
    """Builds an index once; where it is built already, it is checked and kept.

    A ScaNN index prints its measured recall against exact search. Given a model and a token store
    it is measured on queries, as it should be; without them, on passages.

    Args:
        embeddings_dir: from `taser encode`.
        index_dir: where the index goes.
        config: exact (a pointer to the embeddings) or ScaNN.
        model_dir: the model that encodes the sample of queries.
        token_store: their tokens.
        sample_split: whose queries; not those that are reported.
        tasks: which tasks' queries; None means all that have the split.
        step: which checkpoint; None means the best one.

    Returns:
        The index's directory.
    """
    if (model_dir is None) != (token_store is None):
        raise ConfigError(
            "one of model_dir and token_store is given",
            where="index",
            expected="both, to measure recall on queries, or neither",
            fix="set both",
        )
    model = None
    if config.kind is IndexKind.SCANN and model_dir is not None and token_store is not None:
        model = load_model(model_dir, step=step)

    @first_host_only
    def build() -> str:
        queries = None
        if model is not None and token_store is not None:
            queries = _sample(
                model,
                TokenStore.open(token_store),
                split=sample_split,
                tasks=tasks,
                count=config.scann.recall_queries,
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

    return build()


def _sample(
    model: LoadedModel,
    tokens: TokenStore,
    *,
    split: str,
    tasks: Sequence[str] | None,
    count: int,
) -> np.ndarray | None:
    """Embeddings of some queries, as many of each task; None where no task has the split."""
    names = [task for task, splits in tokens.tasks.items() if split in splits]
    names = [task for task in names if tasks is None or task in tasks]
    if not names:
        logger.info("no %s queries: recall is measured on passages", split)
        return None
    check_vocabulary(model, tokens)
    share = -(-count // len(names))
    config = EncodeConfig(batch_multiple=model.batch_multiple)
    parts = []
    for task in names:
        embeddings = encode_queries(
            model.encode_fn(Role.QUERY, task=task), tokens.queries(task, split), config=config
        )
        rows = np.random.default_rng([_PURPOSE, len(embeddings)]).permutation(len(embeddings))
        parts.append(embeddings[rows[:share]])
    return np.concatenate(parts)


CONFIGURABLES = (ExactConfig, IndexConfig, ScannConfig)
