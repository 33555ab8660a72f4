"""Embeddings with ids and texts, in the files that vector stores load, and Parquet back.

    <directory>/passages/00000-of-00002.parquet    id, embedding, title, text, task
    <directory>/queries/<task>.<split>.parquet     the same columns
    <directory>/metadata.json                      dimension, metric, normalisation, fingerprints

FAISS has `passages/index.faiss` and `passages/ids.txt`, Vertex AI JSON lines; neither has queries.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from jaxtyping import Float32, Num

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.retrieval.embeddings import (
    QUERY_IDS,
    Codes,
    Coding,
    Embeddings,
    QueryEmbeddings,
    queries_directory,
    shard_bounds,
    split_of,
    write_embeddings,
)
from taser_jax.retrieval.exact import ExactSearcher, measure_recall
from taser_jax.retrieval.runs import SearchResult, top_k
from taser_jax.retrieval.scann import RECALL_QUERIES
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import bar, logger

FORMAT_VERSION = 1
KIND = "exported embeddings"
PASSAGES, QUERIES = "passages", "queries"
# By their names in `taser export`; nearly all stores load Parquet.
FORMATS = PARQUET, FAISS, VERTEX = "embeddings", "faiss", "vertex"
# Results by which the recall of codes is measured.
_RECALL_K = 20
# Candidates that are scored again by whole embeddings, as a multiple of k.
_RESCORED = 4
# Passages held in memory, with their texts.
_BLOCK = 8192
_ROWS = (
    "write one row per text: `id`, a string, and `embedding`, finite numbers, equally many in all"
)


def export_embeddings(
    embeddings: Embeddings,
    store: PassageStore,
    directory: pathlib.Path,
    *,
    format: str,
    coding: Coding = Coding(),
    queries: Sequence[tuple[QueryEmbeddings, QuerySet]] = (),
    facts: Mapping[str, object],
) -> None:
    """Writes embeddings in a store's format; if interrupted, a rerun goes on at the next shard.

    What codes cost in recall, on the queries, is printed and recorded.

    Args:
        embeddings: the passages'.
        store: their passages.
        directory: output directory.
        format: one of `FORMATS`.
        coding: how Parquet holds the passages' numbers; queries are float32.
        queries: embeddings of splits, with their queries; for Parquet alone.
        facts: further fields of metadata.json.

    Raises:
        FingerprintError: the directory holds other embeddings.
        StorageError: the directory cannot be written.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "format": format,
        "fingerprints": dict(embeddings.fingerprints),
        "num_rows": len(embeddings),
        "dim": embeddings.shape[1],
        "dtype": coding.codes.value,
        "scale": coding.scale,
        "metric": "dot",
        "normalization": embeddings.metadata.normalization,
        "queries": {
            # Imported ones have no tokens, whose fingerprint it is.
            f"{texts.task}.{texts.split}": embedded.fingerprints.get("queries")
            for embedded, texts in queries
        },
    }
    artifacts.follow_plan(directory, metadata)
    if coding.codes is not Codes.FLOAT32:
        encoded = [embedded for embedded, _ in queries]
        metadata["recall"] = _print_recall(embeddings, encoded, coding)
    if format == FAISS:
        _write_faiss(embeddings, store, directory / PASSAGES)
    else:
        suffix, write = (
            ("parquet", _write_parquet) if format == PARQUET else ("json", _write_vertex)
        )
        bounds = shard_bounds(len(embeddings), embeddings.metadata.shard_rows)
        for shard, (start, stop) in enumerate(bounds):
            path = directory / PASSAGES / f"{shard:05d}-of-{len(bounds):05d}.{suffix}"
            if not path.exists():
                write(path, _blocks(embeddings, store, start, stop, coding))
    for embedded, texts in queries:
        path = artifacts.split_path(directory / QUERIES, texts.task, texts.split, ".parquet")
        if not path.exists():
            _write_parquet(path, iter([_query_block(embedded, texts)]))
    artifacts.write_json(directory / artifacts.METADATA, {**metadata, **facts})
    if format == VERTEX:
        checksums.seal(directory)


def _print_recall(
    embeddings: Embeddings, encoded: Sequence[QueryEmbeddings], coding: Coding
) -> dict[str, float]:
    """Measures what codes cost on some of all queries; without any, on passages.

    Binary search takes the signs of queries, int8 takes them whole.

    Returns:
        Shares of the exact top 20. "alone": of the best by codes; "rescored": of the four times as
        many best by codes, ordered again by whole embeddings.
    """
    sources: Sequence[Embeddings] = encoded or [embeddings]
    share = -(-RECALL_QUERIES // len(sources))
    samples = [
        source.take(np.linspace(0, len(source) - 1, min(share, len(source)), dtype=np.int64))
        for source in sources
    ]
    queries = np.concatenate(samples).astype(np.float32)
    exact = ExactSearcher(embeddings).search(queries, _RECALL_K)
    asked = coding.decode(coding.encode(queries)) if coding.codes is Codes.BINARY else queries
    by_codes = ExactSearcher(_Coded(embeddings, coding)).search(asked, _RESCORED * _RECALL_K)
    # Scores as exact search has them, by which ties are counted.
    scores = np.full(by_codes.rows.shape, -np.inf, np.float32)
    for query, rows in enumerate(by_codes.rows):
        there = rows >= 0
        passages = embeddings.take(rows[there]).astype(np.float32)
        scores[query, there] = passages @ queries[query]
    alone = SearchResult(by_codes.rows[:, :_RECALL_K], scores[:, :_RECALL_K])
    rescored = top_k(by_codes.rows, scores, _RECALL_K)
    recall = {"alone": measure_recall(alone, exact), "rescored": measure_recall(rescored, exact)}
    logger.info(
        f"{coding.codes.value} codes: recall@{_RECALL_K} {recall['alone']:.4f} against exact "
        f"search, {recall['rescored']:.4f} with the first {_RESCORED * _RECALL_K} scored again by "
        f"whole embeddings; {len(queries)} {'queries' if encoded else 'passages as queries'}"
    )
    return recall


def _blocks(
    embeddings: Embeddings, store: PassageStore, start: int, stop: int, coding: Coding
) -> Iterator[pyarrow.Table]:
    with bar("export", total=stop - start, unit="passage") as progress:
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            passages = store.get_many(range(first, last))
            yield _table(
                [passage.id for passage in passages],
                coding.encode(embeddings[first:last]),
                [passage.title for passage in passages],
                [passage.text for passage in passages],
            )
            progress.update(last - first)


def _query_block(embedded: QueryEmbeddings, queries: QuerySet) -> pyarrow.Table:
    texts = {query.id: query.text for query in queries}
    rows = np.array([row for row, id in enumerate(embedded.query_ids) if id in texts], np.int64)
    ids = [embedded.query_ids[row] for row in rows]
    titles, of_ids = [""] * len(ids), [texts[id] for id in ids]
    return _table(ids, embedded.take(rows), titles, of_ids, queries.task)


def _table(
    ids: Sequence[str],
    embeddings: Num[np.ndarray, "texts width"],
    titles: Sequence[str],
    texts: Sequence[str],
    task: str = "",
) -> pyarrow.Table:
    """One row per text; embeddings as lists of a fixed size."""
    numbers = pyarrow.array(np.ascontiguousarray(embeddings).reshape(-1))
    columns = {
        "id": pyarrow.array(ids, pyarrow.string()),
        "embedding": pyarrow.FixedSizeListArray.from_arrays(numbers, embeddings.shape[1]),
        "title": pyarrow.array(titles, pyarrow.string()),
        "text": pyarrow.array(texts, pyarrow.string()),
        "task": pyarrow.array([task] * len(ids), pyarrow.string()),
    }
    return pyarrow.table(columns)


def _write_parquet(path: pathlib.Path, blocks: Iterator[pyarrow.Table]) -> None:
    """One row group per block."""
    with artifacts.replacing(path) as scratch:
        first = next(blocks)
        with pyarrow.parquet.ParquetWriter(os.fspath(scratch), first.schema) as writer:
            writer.write_table(first)
            for block in blocks:
                writer.write_table(block)


def _write_vertex(path: pathlib.Path, blocks: Iterator[pyarrow.Table]) -> None:
    # Vertex AI takes every file of the folder as data: its checksums lie above.
    with (
        artifacts.replacing(path, recorded=False) as scratch,
        open(scratch, "w", encoding="utf-8") as file,
    ):
        for block in blocks:
            for row in block.select(["id", "embedding"]).to_pylist():
                file.write(json.dumps(row) + "\n")


def _write_faiss(embeddings: Embeddings, store: PassageStore, directory: pathlib.Path) -> None:
    """The index is built in memory: 4 bytes per number."""
    import faiss

    index = faiss.IndexFlatIP(embeddings.shape[1])
    for start in range(0, len(embeddings), _BLOCK):
        index.add(embeddings[start : start + _BLOCK].astype(np.float32))
    ids = "".join(f"{id}\n" for id in store.ids)
    artifacts.write_text(directory / "ids.txt", ids)
    with artifacts.replacing(directory / "index.faiss") as scratch:
        faiss.write_index(index, os.fspath(scratch))


def import_embeddings(
    source: pathlib.Path, directory: pathlib.Path, *, store: PassageStore
) -> dict[str, str]:
    """Reads Parquet of `id` and `embedding`, in any order of rows, into our directories.

    `source` is laid out as `export_embeddings` writes it. Others' needs no metadata.json, and its
    passages may lie in it directly.

    Args:
        source: directory of the Parquet files.
        directory: gets what `taser encode` writes.
        store: the collection, whose passages and queries the ids name.

    Returns:
        Fingerprints of model and collection. For a model that is not named, the former is that of
        its passages' embeddings.

    Raises:
        DataError: no Parquet, other columns, an id that is unknown, absent or there twice, or an
            embedding that is null, not finite or of another dimension.
        FingerprintError: the embeddings are of another collection.
    """
    facts = artifacts.read_json(source / artifacts.METADATA, absent={})
    if facts.get("kind") != KIND:
        # Others' files have metadata of their own, or none.
        facts = {"fingerprints": {}}
    collection = {"collection": store.fingerprint}
    fix = "import them for the collection that they were exported from"
    artifacts.require_equal(f"embeddings {source}", facts["fingerprints"], collection, fix)
    coding = Coding(Codes(facts.get("dtype", "float32")), facts.get("scale", 1.0))
    inner = source / PASSAGES
    paths = sorted((inner if inner.is_dir() else source).glob("*.parquet"))
    ids, embeddings = _read(paths, coding, where=inner)
    places = [store.find(id) for id in ids]
    unknown = [id for id, place in zip(ids, places, strict=True) if place is None]
    _refuse(unknown, "is no passage of the collection", inner)
    # Equal passages under two ids are one row, that of the first.
    rows, first = np.unique(np.array(places, np.int64), return_index=True)
    absent = np.setdiff1d(np.arange(len(store)), rows)
    _refuse([store.ids[row] for row in absent.tolist()], "is absent", inner)
    ordered = embeddings[first]
    model = facts["fingerprints"].get("model") or artifacts.Fingerprint().add(ordered).hex()
    fingerprints = {"model": model, **collection}
    normalization = facts.get("normalization")
    # Signs have another length, and int8 codes one that is rounded.
    if normalization is None or coding.codes is Codes.BINARY:
        lengths = np.linalg.norm(ordered, axis=1)
        normalization = "l2" if np.allclose(lengths, 1, atol=1e-3) else "none"
    for path in sorted((source / QUERIES).glob("*.parquet")):
        task, split = split_of(path.stem)
        ids, embeddings = _read([path], Coding(), where=path)
        of_split = {query.id for query in store.queries(task, split)}
        unknown = [id for id in ids if id not in of_split]
        _refuse(unknown, "is no query of this split", path)
        if embeddings.shape[1] != ordered.shape[1]:
            problem = f"{embeddings.shape[1]} dimensions, and passages {ordered.shape[1]}"
            raise DataError(problem, where=str(path), fix="take passages and queries of one model")
        target = queries_directory(directory, task, split)
        artifacts.write_json(target / QUERY_IDS, ids)
        write_embeddings(target, embeddings, fingerprints, normalization, of=QueryEmbeddings)
    write_embeddings(directory, ordered, fingerprints, normalization)
    return fingerprints


def _refuse(ids: Sequence[str], problem: str, where: pathlib.Path) -> None:
    """Refuses a file where some ids have a problem."""
    if ids:
        problem = f"id {ids[0]!r} {problem} ({len(ids):,} in all)"
        raise DataError(problem, where=str(where), fix=_ROWS)


def _read(
    paths: Sequence[pathlib.Path], coding: Coding, *, where: pathlib.Path
) -> tuple[list[str], Float32[np.ndarray, "texts dim"]]:
    """Ids and embeddings of Parquet files, decoded to float32."""
    if not paths:
        raise DataError("no Parquet files here", where=str(where), fix=_ROWS)
    try:
        table = pyarrow.concat_tables(
            pyarrow.parquet.read_table(path, columns=["id", "embedding"]) for path in paths
        )
        ids, column = table["id"].to_pylist(), table["embedding"].combine_chunks()
        numbers = column.flatten().to_numpy(zero_copy_only=False)
    except (OSError, KeyError, AttributeError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot be read: {error}", where=str(where), fix=_ROWS) from error
    repeated = [id for id, count in collections.Counter(ids).items() if count > 1]
    _refuse(repeated, "is there more than once", where)
    sizes = np.unique(pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False))
    if len(sizes) != 1 or not sizes[0] > 0:
        problem = f"embeddings of {', '.join(map(str, sizes))} numbers"
        raise DataError(problem, where=str(where), fix=_ROWS)
    embeddings = coding.decode(numbers.reshape(len(ids), -1))
    finite = np.isfinite(embeddings).all(axis=1)
    _refuse([ids[row] for row in np.flatnonzero(~finite)], "has NaN or infinite numbers", where)
    return [str(id) for id in ids], embeddings


@dataclasses.dataclass(frozen=True)
class _Coded:
    """Embeddings as their codes have them, coded and decoded as they are read."""

    whole: Embeddings
    coding: Coding

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.coding.decode(self.coding.encode(self.whole[rows]))
