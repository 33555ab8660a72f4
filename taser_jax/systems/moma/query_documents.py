"""Queries with documents of a mixture, from `taser augment`, for training and encoding.

<directory>/<task>.<split>/documents.npz   rows of the mixture and their scores, of each query
<directory>/<task>.<split>/metadata.json   whose queries, and where the mixture is
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int

from taser_jax.assembly.model_directory import LoadedModel
from taser_jax.assembly.text_sources import QUERY_DOCUMENTS, DocumentStates
from taser_jax.data.batches.stream import Texts
from taser_jax.data.token_store.arrays import CachedStates, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Augmented, EncoderInput
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig, Params
from taser_jax.models.encoded import static_task
from taser_jax.models.fusion import BertFusionConfig, FusedStates, encode_with_attention
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.storage.artifacts import (
    ARRAY_ERRORS,
    METADATA,
    FilePath,
    Metadata,
    fingerprint,
    read_metadata,
    replacing,
    require_equal,
    split_path,
    write_json,
)
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import read_typed
from taser_jax.systems.moma.embeddings import EmbeddingsByText
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture

KIND = "documents of queries"
_VERSION = 1
_LOOKUP, _QUERY_IDS = "documents.npz", "query_ids.json"


class LookupMetadata(Metadata, frozen=True):
    """What is recorded of a split's documents."""

    memory_dir: str = ""


def write_lookup(
    directory: FilePath,
    task: str,
    split: str,
    lookup: Lookup,
    *,
    memory_dir: FilePath,
    fingerprints: Mapping[str, str],
) -> None:
    """Writes the documents of a split's queries.

    Args:
        directory: folder of all splits.
        task: the queries' task.
        split: their split.
        lookup: the documents that were looked up.
        memory_dir: the mixture's directory.
        fingerprints: fingerprints of the queries, the mixture and the lookup model.
    """
    own = split_path(directory, task, split)
    own.mkdir(parents=True, exist_ok=True)
    with replacing(own / _LOOKUP) as scratch, open(scratch, "wb") as file:
        np.savez(file, rows=lookup.rows, scores=lookup.scores)
    write_json(own / _QUERY_IDS, lookup.query_ids)
    metadata = {
        "format_version": _VERSION,
        "kind": KIND,
        "fingerprints": dict(fingerprints),
        "memory_dir": os.path.relpath(memory_dir, own),
    }
    write_json(own / METADATA, metadata)


def read_lookup(directory: FilePath, task: str, split: str) -> tuple[Lookup, LookupMetadata]:
    """The documents of a split's queries, and the metadata beside them.

    Raises:
        DataError: the split was not augmented.
    """
    own = split_path(directory, task, split)
    if not (own / METADATA).is_file():
        fix = "run `taser augment` for this task and split"
        raise DataError(f"no documents of task {task!r}, split {split!r}", where=str(own), fix=fix)
    metadata = read_metadata(own, KIND, _VERSION, LookupMetadata)
    again = f"delete {own} and run `taser augment` again"
    query_ids = read_typed(own / _QUERY_IDS, list[str], fix=again)
    where = str(own / _LOOKUP)
    try:
        with np.load(own / _LOOKUP) as arrays:
            return Lookup(query_ids, arrays["rows"], arrays["scores"]), metadata
    except ARRAY_ERRORS as error:
        raise DataError(f"missing or damaged: {error}", where=where, fix=again) from error


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The documents of a token store's queries.

    Attributes:
        directory: what `taser augment` wrote.
        per_query: documents fused with each query, K.
        config: the model that fuses them.
        passages: the token store's passages, unchanged.
    """

    directory: str
    per_query: int
    config: ModelConfig
    passages: Texts

    @classmethod
    def open(
        cls, directory: FilePath, *, per_query: int, config: ModelConfig, store: TokenStore
    ) -> Augmentation:
        """Checks that the model takes documents.

        Raises:
            ConfigError: it does not, or fewer than one document per query.
        """
        if not config.fuses:
            raise config.no_fusion()
        if per_query < 1:
            raise ConfigError(f"{per_query} documents", where="DOCUMENTS", expected="1 or more")
        return cls(os.fspath(directory), per_query, config, store.passages)

    def of_queries(self, queries: TokenizedQueries) -> AugmentedTexts:
        """These queries with their documents.

        Raises:
            ConfigError: fewer documents were looked up.
            DataError: the split was not augmented.
            FingerprintError: the mixture or its model has changed since.
        """
        rows, mixture = self.document_rows(queries)
        return AugmentedTexts(queries, rows, document_reader(self.config, mixture))

    def on_states(self, states: CachedStates, of_documents: DocumentStates) -> AugmentedStates:
        """The same with states of frozen blocks in place of tokens."""
        return AugmentedStates(self, states, of_documents)

    def document_rows(
        self, queries: TokenizedQueries
    ) -> tuple[Int[np.ndarray, "queries documents"], Mixture]:
        """Rows of the queries' documents, and the mixture that they are of."""
        looked_up, metadata = read_lookup(self.directory, queries.task, queries.split)
        where = str(split_path(self.directory, queries.task, queries.split))
        if looked_up.rows.shape[1] < self.per_query:
            title = f"{self.per_query} documents per query of {looked_up.rows.shape[1]} looked up"
            fix = "lower DOCUMENTS, or augment with a larger k"
            raise ConfigError(title, where=where, fix=fix)
        mixture = Mixture.open(pathlib.Path(where) / metadata.memory_dir)
        fix = "the memories have changed: run `taser augment` again"
        require_equal(where, metadata.fingerprints, mixture.fingerprints, fix)
        lines = looked_up.of(queries.query_ids, where=where)
        return lines.rows[:, : self.per_query], mixture

    def renamed(self, queries: TokenizedQueries) -> TokenizedQueries:
        """The same queries with a fingerprint that depends on their documents."""
        looked_up, metadata = read_lookup(self.directory, queries.task, queries.split)
        prints = json.dumps(metadata.fingerprints)
        content = fingerprint([queries.fingerprint, prints, looked_up.rows, self.per_query])
        return dataclasses.replace(queries, fingerprint=content)


@dataclasses.dataclass(frozen=True)
class AugmentedStates:
    """Queries with documents, as states of frozen blocks; embeddings in their place stay.

    Attributes:
        augmentation: the queries' documents.
        states: states of the token store.
        of_documents: states of a mixture's documents.
    """

    augmentation: Augmentation
    states: CachedStates
    of_documents: DocumentStates

    @property
    def passages(self) -> Texts:
        """The passages' states."""
        return self.states.passages

    def of_queries(self, queries: TokenizedQueries) -> AugmentedTexts:
        """The states of these queries and of their documents."""
        rows, mixture = self.augmentation.document_rows(queries)
        if _reads_embeddings(self.augmentation.config):
            reader = document_reader(self.augmentation.config, mixture)
        else:
            fingerprint = mixture.manifest.fingerprint
            reader = self.of_documents(mixture, mixture.length, fingerprint).tokens
        return AugmentedTexts(self.states.of_queries(queries), rows, reader)


def _reads_embeddings(config: ModelConfig) -> bool:
    return isinstance(config, BertFusionConfig) and config.documents is FusedStates.EMBEDDINGS


def document_reader(config: ModelConfig, mixture: Mixture) -> Callable[[np.ndarray], Any]:
    """Rows of a mixture -> documents as a model fuses them: tokens, or embeddings."""
    if _reads_embeddings(config):
        return EmbeddingsByText.of_mixture(mixture).take
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
    devices = dataclasses.replace(config, batch_multiple=model.batch_multiple)
    static = static_task(model.model.query_tasks, task)

    def attend(batch: EncoderInput) -> jax.Array:
        return _attention(model.params, model.put(batch), model=model.model, task=static)

    attention = encode_rows(attend, texts, np.arange(len(texts.lengths)), config=devices)
    return attention


@functools.partial(jax.jit, static_argnames=("model", "task"))
def _attention(
    params: Params, texts: Augmented, *, model: DualEncoder, task: str | None
) -> jax.Array:
    _, attention = encode_with_attention(model, params, texts, task=task)
    return jnp.maximum(attention, jnp.finfo(attention.dtype).min)


QUERY_DOCUMENTS.register(Augmentation.open)
