"""Queries with documents of a mixture, from `taser augment`, for training and encoding.

<directory>/<task>.<split>/    `QueryArrays`: rows of the mixture and their scores, of each query
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from taser_jax.assembly.model_directory import LoadedModel
from taser_jax.assembly.text_sources import DocumentStates
from taser_jax.data.batches.stream import Texts, TextSource
from taser_jax.data.token_store.arrays import CachedStates, TokenizedQueries
from taser_jax.models.batch import Augmented, EncoderInput, static_task
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig, Params
from taser_jax.models.fusion import BertFusionConfig, FusedStates, encode_with_attention
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.retrieval.runs import QueryArrays, is_finished
from taser_jax.storage.artifacts import FilePath, fingerprint, require_equal, split_path
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.systems.moma.memories import AugmentedTexts, Mixture
from taser_jax.systems.moma.memory import EmbeddingsByText

KIND = "documents of queries"
# Among the fingerprints: where the mixture is, from the split's folder.
MEMORY_DIR = "memory_dir"


def read_lookup(directory: FilePath, task: str, split: str) -> QueryArrays:
    """The documents of a split's queries: rows of the mixture, best first, and their scores.

    Raises:
        DataError: the split was not augmented.
    """
    own = split_path(directory, task, split)
    if not is_finished(own):
        fix = "run `taser augment` for this task and split"
        raise DataError(f"no documents of task {task!r}, split {split!r}", where=str(own), fix=fix)
    return QueryArrays.open(own, KIND)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The documents of a token store's queries.

    Attributes:
        directory: what `taser augment` wrote.
        per_query: documents fused with each query, K.
        config: the model that fuses them.
        store: the token store, or states of frozen blocks in place of its tokens.
        of_documents: likewise in place of the documents' tokens.

    Raises:
        ConfigError: the model takes no documents, or fewer than one document per query.
    """

    directory: FilePath
    per_query: int
    config: ModelConfig
    store: TextSource
    of_documents: DocumentStates | None = None

    def __post_init__(self) -> None:
        if not self.config.fuses:
            raise self.config.no_fusion()
        if self.per_query < 1:
            problem = f"{self.per_query} documents"
            raise ConfigError(problem, where="DOCUMENTS", expected="1 or more")

    def on_states(self, states: CachedStates, of_documents: DocumentStates) -> Augmentation:
        """The same with states of frozen blocks in place of tokens; embeddings stay."""
        return dataclasses.replace(self, store=states, of_documents=of_documents)

    @property
    def passages(self) -> Texts:
        """The store's passages, as tokens or states."""
        return self.store.passages

    def of_queries(self, queries: TokenizedQueries) -> AugmentedTexts:
        """These queries with their documents.

        Raises:
            ConfigError: fewer documents were looked up.
            DataError: the split was not augmented, or a query has no documents.
            FingerprintError: the mixture or its model has changed since.
        """
        looked_up = read_lookup(self.directory, queries.task, queries.split)
        where = str(split_path(self.directory, queries.task, queries.split))
        rows = looked_up.arrays["rows"]
        if rows.shape[1] < self.per_query:
            problem = f"{self.per_query} documents per query of {rows.shape[1]} looked up"
            fix = "lower DOCUMENTS, or augment with a larger k"
            raise ConfigError(problem, where=where, fix=fix)
        mixture = Mixture.open(pathlib.Path(where) / looked_up.fingerprints[MEMORY_DIR])
        fix = "the memories have changed: run `taser augment` again"
        require_equal(where, looked_up.fingerprints, mixture.fingerprints, fix)
        line_of = {query_id: line for line, query_id in enumerate(looked_up.query_ids)}
        missing = [query_id for query_id in queries.query_ids if query_id not in line_of]
        if missing:
            problem = f"{len(missing)} queries have no documents, {missing[0]!r} for example"
            fix = "augment the token store's queries again, into another directory"
            raise DataError(problem, where=where, fix=fix)
        rows = rows[[line_of[query_id] for query_id in queries.query_ids], : self.per_query]
        reader = document_reader(self.config, mixture, self.of_documents)
        return AugmentedTexts(self.store.of_queries(queries), rows, reader)

    def renamed(self, queries: TokenizedQueries) -> TokenizedQueries:
        """The same queries with a fingerprint that depends on their documents."""
        looked_up = read_lookup(self.directory, queries.task, queries.split)
        prints = json.dumps(dict(looked_up.fingerprints))
        content = fingerprint(
            [queries.fingerprint, prints, looked_up.arrays["rows"], self.per_query]
        )
        return dataclasses.replace(queries, fingerprint=content)


def document_reader(
    config: ModelConfig, mixture: Mixture, states: DocumentStates | None = None
) -> Callable[[np.ndarray], Any]:
    """Rows of a mixture -> documents as a model fuses them: tokens, or states, or embeddings."""
    if isinstance(config, BertFusionConfig) and config.documents is FusedStates.EMBEDDINGS:
        return EmbeddingsByText.of_mixture(mixture).take
    if states is not None:
        return states(mixture, mixture.length, mixture.manifest.fingerprint).tokens
    return mixture.tokens


def document_attention(
    model: LoadedModel,
    texts: Texts,
    *,
    task: str | None = None,
    config: EncodeConfig = EncodeConfig(),
) -> Float32[np.ndarray, "queries segments"]:
    """The attention of each query to its own tokens and to its documents (equation 9).

    Args:
        model: the end retriever.
        texts: queries with documents, as tokens or states.
        task: the queries' task.
        config: sizes of batches.
    """
    static = static_task(model.model.query_tasks, task)

    def attend(batch: EncoderInput) -> jax.Array:
        return _attention(model.params, model.put(batch), model=model.model, task=static)

    return encode_rows(attend, texts, np.arange(len(texts.lengths)), config=config)


@functools.partial(jax.jit, static_argnames=("model", "task"))
def _attention(
    params: Params, texts: Augmented, *, model: DualEncoder, task: str | None
) -> jax.Array:
    _, attention = encode_with_attention(model, params, texts, task=task)
    return jnp.maximum(attention, jnp.finfo(attention.dtype).min)
