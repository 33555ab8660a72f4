"""Query embeddings: an artefact beside the passages', so that only `taser encode` needs the model.

    <embeddings>/queries/<task>.<split>/    shards, query_ids.json, plan.json, metadata.json

Row i belongs to query i of the token store's split. Searching, sampling for an index, fusing models
and retrieving from several memories read these files with NumPy alone.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import urllib.parse
from collections.abc import Mapping

from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.retrieval.embeddings import Embeddings, EncodeFn, TokenRows, encode_texts
from taser_jax.retrieval.encode_config import EmbeddingDtype, EncodeConfig
from taser_jax.storage.artifacts import METADATA, FilePath, require_equal, split_path
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_files import read_strings

_QUERY_IDS = "query_ids.json"


class QueryEmbeddings(Embeddings):
    """Embeddings of one task's split, memory-mapped; row i is query i."""

    KIND = "query embeddings"

    @classmethod
    def of_split(
        cls,
        embeddings_dir: FilePath,
        task: str,
        split: str,
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> QueryEmbeddings:
        """Opens the queries of a task's split.

        Args:
            embeddings_dir: directory that `taser encode` wrote.
            task: the task's name.
            split: the split's name.
            fingerprints: those of the passages to search, or of their index: model, collection,
                vocabulary and token store must be the same.

        Raises:
            DataError: the split is not encoded, or not completely; names those that are.
            FingerprintError: queries and passages come from different models or token stores.
        """
        directory = queries_directory(embeddings_dir, task, split)
        if not (directory / METADATA).is_file():
            there = ", ".join(f"{task} {split}" for task, split in encoded_splits(embeddings_dir))
            raise DataError(
                f"no embeddings of task {task!r}, split {split!r}",
                where=str(directory),
                expected=f"one of {there}" if there else "embeddings of queries",
                fix="run `taser encode` for this task and split; it keeps what is finished",
            )
        queries = cls(directory)
        require_equal(
            f"query embeddings {directory}",
            queries.fingerprints,
            fingerprints or {},
            "encode queries and passages with one model, from one token store (`taser encode`), "
            "and index those passages; or correct EMBEDDINGS_DIR or INDEX_DIR",
        )
        return queries

    @functools.cached_property
    def query_ids(self) -> list[str]:
        """The source's own ids, one per row."""
        again = f"delete {self.directory}, then run `taser encode` again"
        ids = read_strings(self.directory / _QUERY_IDS, fix=again)
        if len(ids) != len(self):
            raise DataError(
                f"{len(ids)} query ids",
                where=str(self.directory / _QUERY_IDS),
                expected=f"{len(self)}, one per embedding",
                fix=again,
            )
        return ids


def encode_queries(
    encode_fn: EncodeFn,
    queries: TokenizedQueries,
    embeddings_dir: FilePath,
    *,
    fingerprints: Mapping[str, str],
    states: TokenRows | None = None,
    config: EncodeConfig | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> bool:
    """Encodes one task's split into its folder beside the passages; resumable, like these.

    Queries are always stored as float32: they are few, and every score depends on one.

    Args:
        encode_fn: tokens -> embeddings [batch, dim], for the role and task of these queries.
        queries: the split, from the token store.
        embeddings_dir: where the passages' embeddings are.
        fingerprints: those of the passages' embeddings; that of the queries' tokens is added.
        states: states of the queries, in place of their tokens.
        config: sizes of batches and shards.
        process_index: which process this is.
        process_count: how many share the work.

    Returns:
        Whether all shards are finished.

    Raises:
        FingerprintError: the folder was begun with another model or other tokens.
        DataError: no queries, or the model returned a number that is not finite.
        StorageError: the folder cannot be written.
    """
    return encode_texts(
        encode_fn,
        states or queries,
        queries_directory(embeddings_dir, queries.task, queries.split),
        kind=QueryEmbeddings.KIND,
        fingerprints={**fingerprints, "queries": queries.fingerprint},
        config=dataclasses.replace(config or EncodeConfig(), dtype=EmbeddingDtype.FLOAT32),
        process_index=process_index,
        process_count=process_count,
        attached={_QUERY_IDS: queries.query_ids},
    )


def queries_directory(embeddings_dir: FilePath, task: str, split: str) -> pathlib.Path:
    """The directory of one task's split."""
    return split_path(pathlib.Path(embeddings_dir) / "queries", task, split)


def encoded_splits(embeddings_dir: FilePath) -> list[tuple[str, str]]:
    """Every finished (task, split), by name."""
    found = []
    for metadata in sorted((pathlib.Path(embeddings_dir) / "queries").glob(f"*/{METADATA}")):
        task, _, split = metadata.parent.name.rpartition(".")
        found.append((urllib.parse.unquote(task), urllib.parse.unquote(split)))
    return found
