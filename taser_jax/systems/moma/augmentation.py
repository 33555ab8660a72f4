"""Queries with documents of a mixture, from `taser augment`, for training and encoding."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from taser_jax.assembly.model_directory import LoadedModel
from taser_jax.assembly.text_sources import QUERY_DOCUMENTS
from taser_jax.data.batches.padding import Texts
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.bert_fusion import BertFusionConfig, FusedStates
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.storage.artifacts import (
    ARRAY_ERRORS,
    FINGERPRINTS,
    METADATA,
    FilePath,
    fingerprint,
    read_metadata,
    replacing,
    require_equal,
    split_path,
    write_json,
)
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.json_files import read_strings
from taser_jax.systems.moma.attention import document_attention
from taser_jax.systems.moma.joined import JoinedEmbeddings
from taser_jax.systems.moma.memories import AugmentedTexts, Lookup, Mixture
from taser_jax.systems.moma.query_documents import write_fused

KIND = "documents of queries"
_VERSION = 1
_LOOKUP, _QUERY_IDS = "documents.npz", "query_ids.json"


def lookup_directory(directory: FilePath, task: str, split: str) -> pathlib.Path:
    """Where the documents of one split's queries are."""
    return split_path(directory, task, split)


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
        lookup: the documents found.
        memory_dir: the mixture's directory.
        fingerprints: fingerprints of the queries, the mixture and the lookup model.
    """
    own = lookup_directory(directory, task, split)
    own.mkdir(parents=True, exist_ok=True)
    with replacing(own / _LOOKUP, recorded=True) as scratch, open(scratch, "wb") as file:
        np.savez(file, rows=lookup.rows, scores=lookup.scores)
    write_json(own / _QUERY_IDS, lookup.query_ids)
    metadata = {
        "format_version": _VERSION,
        "kind": KIND,
        "fingerprints": dict(fingerprints),
        "memory_dir": os.path.relpath(memory_dir, own),
    }
    write_json(own / METADATA, metadata)


def read_lookup(directory: FilePath, task: str, split: str) -> tuple[Lookup, dict]:
    """The documents of a split's queries, and the metadata beside them.

    Raises:
        DataError: the split was not augmented.
    """
    own = lookup_directory(directory, task, split)
    if not (own / METADATA).is_file():
        raise DataError(
            f"no documents of task {task!r}, split {split!r}",
            where=str(own),
            fix="run `taser augment` for this task and split",
        )
    metadata = read_metadata(own, KIND, _VERSION, fields={"fingerprints": FINGERPRINTS})
    again = f"delete {own} and run `taser augment` again"
    query_ids = read_strings(own / _QUERY_IDS, fix=again)
    try:
        with np.load(own / _LOOKUP) as arrays:
            return Lookup(query_ids, arrays["rows"], arrays["scores"]), metadata
    except ARRAY_ERRORS as error:
        raise DataError(
            f"missing or damaged: {error}", where=str(own / _LOOKUP), fix=again
        ) from error


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The documents of a token store's queries, in place of cached states.

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
        found, metadata = read_lookup(self.directory, queries.task, queries.split)
        where = str(lookup_directory(self.directory, queries.task, queries.split))
        if found.rows.shape[1] < self.per_query:
            raise ConfigError(
                f"{self.per_query} documents per query of {found.rows.shape[1]} looked up",
                where=where,
                expected="no more than `taser augment` looked up",
                fix="lower DOCUMENTS, or augment with a larger k",
            )
        memory_dir = pathlib.Path(where) / metadata["memory_dir"]
        mixture = Mixture.open(memory_dir)
        require_equal(
            where,
            metadata["fingerprints"],
            mixture.fingerprints,
            "the memories have changed: run `taser augment` again",
        )
        lines = found.of(queries.query_ids, where=where)
        documents = document_reader(self.config, mixture)
        return AugmentedTexts(queries, lines.rows[:, : self.per_query], documents)

    def renamed(self, queries: TokenizedQueries) -> TokenizedQueries:
        """The same queries with a fingerprint that depends on their documents."""
        found, metadata = read_lookup(self.directory, queries.task, queries.split)
        looked_up = json.dumps(metadata["fingerprints"])
        content = fingerprint([queries.fingerprint, looked_up, found.rows, self.per_query])
        return dataclasses.replace(queries, fingerprint=content)

    def write_attention(
        self,
        model: LoadedModel,
        queries: TokenizedQueries,
        queries_dir: FilePath,
        *,
        config: EncodeConfig,
    ) -> None:
        """Writes which documents a split's queries were fused with, and how much each counted."""
        found, metadata = read_lookup(self.directory, queries.task, queries.split)
        prints = metadata["fingerprints"]
        write_fused(
            queries_dir,
            found.of(queries.query_ids, where=self.directory),
            document_attention(model, self.of_queries(queries), task=queries.task, config=config),
            fingerprints={name: prints[name] for name in ("model", "vocabulary", "mixture")},
        )


def document_reader(config: ModelConfig, mixture: Mixture) -> Callable[[np.ndarray], Any]:
    """Rows of a mixture -> documents as a model fuses them: tokens, or embeddings."""
    is_late = isinstance(config, BertFusionConfig) and config.documents is FusedStates.EMBEDDINGS
    return JoinedEmbeddings(mixture).take if is_late else mixture.tokens


QUERY_DOCUMENTS.register(Augmentation.open)
