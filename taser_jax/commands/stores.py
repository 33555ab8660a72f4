"""Embeddings to the files of vector stores (`taser export`) and back (`taser import`)."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import numpy as np

from taser_jax.assembly.model_directory import load_model
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.interop.export_source import METADATA
from taser_jax.retrieval.embedding_files import StoreFormat, export_embeddings, import_embeddings
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, encoded_splits
from taser_jax.retrieval.index import Codes, Coding, recall_of_codes
from taser_jax.retrieval.scann import RECALL_QUERIES
from taser_jax.storage.artifacts import METADATA as EMBEDDINGS_METADATA
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.locks import one_writer
from taser_jax.storage.progress import logger, phase

# Results by which the recall of codes is measured.
_RECALL_K = 20


@dataclasses.dataclass(frozen=True)
class EmbeddingsExport:
    """Embeddings to export, and the collection that they are of.

    Attributes:
        embeddings_dir: from `taser encode`; the queries' embeddings are exported too.
        data_dir: folder of collections, for ids, titles and texts.
        collection: the collection.
        codes: how Parquet holds the passages' numbers; the recall that int8 and binary cost is
            measured on the encoded queries, printed and recorded.
    """

    embeddings_dir: str | None = None
    data_dir: str | None = None
    collection: str | None = None
    codes: Codes = Codes.FLOAT32


def export_stores(
    formats: Sequence[StoreFormat],
    source: EmbeddingsExport,
    model_dir: str | None,
    output_dir: pathlib.Path,
    *,
    step: int | None,
) -> dict[str, pathlib.Path]:
    """Writes embeddings, and those of queries, in formats of vector stores.

    Args:
        formats: the formats.
        source: embeddings and collection.
        model_dir: the model that encoded them; None leaves it unchecked.
        output_dir: parent of the formats' directories.
        step: step of the model's checkpoint; None means the best one.

    Returns:
        Format -> its directory.

    Raises:
        ConfigError: no embeddings or no collection are named.
        FingerprintError: the embeddings are of another model or collection.
    """
    if source.embeddings_dir is None or source.data_dir is None or source.collection is None:
        problem = "embeddings are exported with their ids and texts, and these are not all given"
        fix = "--gin.EMBEDDINGS_DIR=... --gin.DATA_DIR=... --gin.COLLECTION=..."
        raise ConfigError(problem, where="taser export", fix=fix)
    store = PassageStore.open(source.data_dir, source.collection)
    expected = {"collection": store.fingerprint}
    if model_dir is not None:
        expected["model"] = load_model(model_dir, step=step).fingerprint
    embeddings = Embeddings.open(source.embeddings_dir, fingerprints=expected)
    queries = [
        (
            QueryEmbeddings.of_split(
                source.embeddings_dir, task, split, fingerprints=embeddings.fingerprints
            ),
            QuerySet.open(source.data_dir, source.collection, task, split),
        )
        for task, split in encoded_splits(source.embeddings_dir)
    ]
    coding = Coding.of(source.codes, embeddings)
    facts: dict[str, object] = {}
    if source.codes is not Codes.FLOAT32:
        if list(formats) != [StoreFormat.PARQUET]:
            problem, fix = f"{source.codes.value} codes are for Parquet", "taser export embeddings"
            raise ConfigError(problem, where="EmbeddingsExport.codes", fix=fix)
        facts = {"recall": _print_recall(embeddings, [query for query, _ in queries], coding)}
    facts |= _query_encoders(output_dir, embeddings.fingerprints.get("model"))
    directories = {format.value: output_dir / format.value for format in formats}
    for format in formats:
        with phase(f"export {format.value}"):
            export_embeddings(
                embeddings,
                store,
                directories[format.value],
                format=format,
                coding=coding,
                queries=queries if format is StoreFormat.PARQUET else (),
                facts=facts,
            )
        logger.info("%s: %s", format.value, directories[format.value])
    return directories


def _print_recall(
    embeddings: Embeddings, encoded: Sequence[QueryEmbeddings], coding: Coding
) -> dict[str, float]:
    """Measures what codes cost on some of all queries; without any, on passages."""
    share = -(-RECALL_QUERIES // max(len(encoded), 1))
    samples = [
        source.take(np.linspace(0, len(source) - 1, min(share, len(source)), dtype=np.int64))
        for source in (*encoded, *([] if encoded else [embeddings]))
    ]
    queries = np.concatenate(samples).astype(np.float32)
    recall = recall_of_codes(embeddings, queries, coding, k=_RECALL_K)
    logger.info(
        f"{coding.codes.value} codes: recall@{_RECALL_K} {recall['alone']:.4f} against exact "
        f"search, {recall['rescored']:.4f} with the first {4 * _RECALL_K} scored again by whole "
        f"embeddings; {len(queries)} {'queries' if encoded else 'passages as queries'}"
    )
    return recall


def _query_encoders(output_dir: pathlib.Path, fingerprint: str | None) -> dict[str, object]:
    """The exports of the embeddings' model that lie beside them, and its queries' prompts."""
    encoders, prompts = {}, None
    for path in sorted(output_dir.glob(f"*/{METADATA}")):
        facts = read_json(path)
        if fingerprint is None or facts["fingerprints"].get("model") != fingerprint:
            continue
        encoders[facts["format"]] = f"../{path.parent.name}"
        settings = path.parent / "config_sentence_transformers.json"
        prompts = read_json(settings, absent={}).get("prompts") or prompts
    return {"query_encoders": encoders, "prompts": prompts}


@dataclasses.dataclass(frozen=True)
class EmbeddingsImport:
    """Embeddings in Parquet, and the collection that they are of.

    Attributes:
        source: directory of the Parquet files, as `taser export embeddings` writes it; others'
            needs the columns `id` and `embedding` alone.
        output_dir: gets what `taser encode` writes.
        data_dir: folder of collections.
        collection: the collection, whose ids the files name.
    """

    source: str
    output_dir: str
    data_dir: str
    collection: str


def import_stores(given: EmbeddingsImport) -> int:
    """Makes a directory of embeddings from Parquet; `taser search` then needs no model.

    Returns:
        Number of passages.

    Raises:
        ConfigError: the directory has embeddings already.
        DataError: files that do not fit the collection.
    """
    directory = pathlib.Path(given.output_dir)
    if (directory / EMBEDDINGS_METADATA).exists():
        fix = "choose another EMBEDDINGS_DIR, an empty or new directory"
        raise ConfigError("there are embeddings here", where=given.output_dir, fix=fix)
    store = PassageStore.open(given.data_dir, given.collection)
    with one_writer(directory), phase("import embeddings"):
        import_embeddings(
            pathlib.Path(given.source),
            directory,
            store=store,
            open_queries=functools.partial(QuerySet.open, given.data_dir, given.collection),
        )
    logger.info("%s: %d passages in %s", given.source, len(store), directory)
    return len(store)
