"""Embeddings with ids and texts, in the files that vector stores load.

    <directory>/passages/00000-of-00002.parquet    id, embedding, title, text, task
    <directory>/queries/<task>.<split>.parquet     the same columns
    <directory>/metadata.json                      dimension, metric, normalisation, fingerprints

FAISS has `passages/index.faiss` and `passages/ids.txt`, Vertex AI JSON lines; neither has queries.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow
import pyarrow.parquet
from jaxtyping import Float

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, shard_bounds
from taser_jax.storage.artifacts import (
    METADATA,
    follow_plan,
    replacing,
    split_path,
    write_json,
)
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.progress import bar

FORMAT_VERSION = 1
KIND = "exported embeddings"
PASSAGES, QUERIES = "passages", "queries"
# Passages held in memory, with their texts.
_BLOCK = 8192


class StoreFormat(enum.Enum):
    """Files that vector stores load.

    PARQUET: Parquet, which nearly all of them load, and `taser import`.
    FAISS: a flat FAISS index of inner products, with the ids of its rows.
    VERTEX: JSON lines for Vertex AI's Vector Search.
    """

    PARQUET = "embeddings"
    FAISS = "faiss"
    VERTEX = "vertex"


@dataclasses.dataclass(frozen=True)
class TextEmbeddings:
    """Consecutive texts with their embeddings.

    Attributes:
        ids: the texts' ids.
        embeddings: one per text.
        titles: titles of passages; empty for queries.
        texts: the texts.
        task: the queries' task; empty for passages.
    """

    ids: Sequence[str]
    embeddings: Float[np.ndarray, "texts dim"]
    titles: Sequence[str]
    texts: Sequence[str]
    task: str = ""

    def table(self) -> pyarrow.Table:
        """One row per text; embeddings as lists of a fixed size."""
        numbers = pyarrow.array(np.ascontiguousarray(self.embeddings).reshape(-1))
        columns = {
            "id": pyarrow.array(self.ids, pyarrow.string()),
            "embedding": pyarrow.FixedSizeListArray.from_arrays(numbers, self.embeddings.shape[1]),
            "title": pyarrow.array(self.titles, pyarrow.string()),
            "text": pyarrow.array(self.texts, pyarrow.string()),
            "task": pyarrow.array([self.task] * len(self.ids), pyarrow.string()),
        }
        return pyarrow.table(columns)


def export_embeddings(
    embeddings: Embeddings,
    store: PassageStore,
    directory: pathlib.Path,
    *,
    format: StoreFormat,
    queries: Sequence[tuple[QueryEmbeddings, QuerySet]] = (),
    facts: Mapping[str, object],
) -> None:
    """Writes embeddings in a store's format; if interrupted, a rerun goes on at the next shard.

    Args:
        embeddings: the passages'.
        store: their passages.
        directory: output directory.
        format: what is written.
        queries: embeddings of splits, with their queries; for Parquet alone.
        facts: further fields of metadata.json.

    Raises:
        FingerprintError: the directory holds other embeddings.
        ConfigError: FAISS is not installed.
        StorageError: the directory cannot be written.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "format": format.value,
        "fingerprints": dict(embeddings.fingerprints),
        "num_rows": len(embeddings),
        "dim": embeddings.shape[1],
        "dtype": "float32",
        "metric": "dot",
        "normalization": embeddings.metadata.normalization,
        "queries": {
            f"{texts.task}.{texts.split}": embedded.fingerprints["queries"]
            for embedded, texts in queries
        },
    }
    follow_plan(directory, metadata)
    if format is StoreFormat.FAISS:
        _write_faiss(embeddings, store, directory / PASSAGES)
    else:
        write = _write_parquet if format is StoreFormat.PARQUET else _write_vertex
        suffix = ".parquet" if format is StoreFormat.PARQUET else ".json"
        bounds = shard_bounds(len(embeddings), embeddings.metadata.shard_rows)
        for shard, (start, stop) in enumerate(bounds):
            name = f"{shard:05d}-of-{len(bounds):05d}{suffix}"
            if not (path := directory / PASSAGES / name).exists():
                write(path, _blocks(embeddings, store, start, stop))
    for embedded, texts in queries:
        path = split_path(directory / QUERIES, texts.task, texts.split, ".parquet")
        if not path.exists():
            _write_parquet(path, iter([_query_block(embedded, texts)]))
    write_json(directory / METADATA, {**metadata, **facts})


def _blocks(
    embeddings: Embeddings, store: PassageStore, start: int, stop: int
) -> Iterator[TextEmbeddings]:
    with bar("export", total=stop - start, unit="passage") as progress:
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            passages = list(store.iterate(first, last))
            yield TextEmbeddings(
                [passage.id for passage in passages],
                embeddings.rows(first, last).astype(np.float32),
                [passage.title for passage in passages],
                [passage.text for passage in passages],
            )
            progress.update(last - first)


def _query_block(embedded: QueryEmbeddings, queries: QuerySet) -> TextEmbeddings:
    texts = {query.id: query.text for query in queries}
    rows = np.array([row for row, id in enumerate(embedded.query_ids) if id in texts], np.int64)
    ids = [embedded.query_ids[row] for row in rows]
    found = [texts[id] for id in ids]
    return TextEmbeddings(ids, embedded.take(rows), [""] * len(ids), found, queries.task)


def _write_parquet(path: pathlib.Path, blocks: Iterator[TextEmbeddings]) -> None:
    """One row group per block."""
    with replacing(path, recorded=True) as scratch:
        first = next(blocks).table()
        with pyarrow.parquet.ParquetWriter(os.fspath(scratch), first.schema) as writer:
            writer.write_table(first)
            for block in blocks:
                writer.write_table(block.table())


def _write_vertex(path: pathlib.Path, blocks: Iterator[TextEmbeddings]) -> None:
    # Vertex AI takes every file of the folder as data: no checksums there.
    with replacing(path) as scratch, open(scratch, "w", encoding="utf-8") as file:
        for block in blocks:
            for id, embedding in zip(block.ids, block.embeddings.tolist(), strict=True):
                file.write(json.dumps({"id": id, "embedding": embedding}) + "\n")


def _write_faiss(embeddings: Embeddings, store: PassageStore, directory: pathlib.Path) -> None:
    """The index is built in memory: 4 bytes per number."""
    try:
        import faiss
    except ImportError as error:
        problem, fix = "FAISS is not installed", how_to_install("faiss")
        raise ConfigError(problem, where="format 'faiss'", fix=fix) from error
    index, ids = faiss.IndexFlatIP(embeddings.shape[1]), list[str]()
    for block in _blocks(embeddings, store, 0, len(embeddings)):
        index.add(block.embeddings)
        ids += block.ids
    with replacing(directory / "ids.txt", recorded=True) as scratch:
        scratch.write_text("".join(f"{id}\n" for id in ids), encoding="utf-8")
    with replacing(directory / "index.faiss", recorded=True) as scratch:
        faiss.write_index(index, os.fspath(scratch))
