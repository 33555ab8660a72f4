"""Embeddings to files of vector stores (`taser export`), and back (`taser import embeddings`)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Sequence

from taser_jax.assembly.model_directory import load_model
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.devices.hosts import writes
from taser_jax.interop.export_source import METADATA
from taser_jax.retrieval import embedding_files
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, encoded_splits
from taser_jax.retrieval.index import Codes, Coding
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.progress import logger, phase


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
    formats: Sequence[str],
    source: EmbeddingsExport,
    model_dir: str | None,
    output_dir: pathlib.Path,
    *,
    step: int | None,
) -> dict[str, pathlib.Path]:
    """Writes embeddings, and those of queries, in formats of vector stores.

    Args:
        formats: some of `embedding_files.FORMATS`.
        source: embeddings and collection.
        model_dir: the model that encoded them; None leaves it unchecked.
        output_dir: parent of the formats' directories.
        step: step of the model's checkpoint; None means the best one.

    Returns:
        Format -> its directory.

    Raises:
        ConfigError: no embeddings or no collection are named, codes in another format than
            Parquet, or FAISS is not installed.
        FingerprintError: the embeddings are of another model or collection.
    """
    if source.embeddings_dir is None or source.data_dir is None or source.collection is None:
        problem = "embeddings are exported with their ids and texts, and these are not all given"
        fix = "--gin.EMBEDDINGS_DIR=... --gin.DATA_DIR=... --gin.COLLECTION=..."
        raise ConfigError(problem, where="taser export", fix=fix)
    if source.codes is not Codes.FLOAT32 and list(formats) != [embedding_files.PARQUET]:
        problem, fix = f"{source.codes.value} codes are for Parquet", "taser export embeddings"
        raise ConfigError(problem, where="EmbeddingsExport.codes", fix=fix)
    if embedding_files.FAISS in formats and importlib.util.find_spec("faiss") is None:
        fix = how_to_install("faiss")
        raise ConfigError("FAISS is not installed", where="format 'faiss'", fix=fix)
    store = PassageStore.open(source.data_dir, source.collection)
    expected = {"collection": store.fingerprint}
    if model_dir is not None:
        expected["model"] = load_model(model_dir, step=step).fingerprint
    embeddings = Embeddings.open(source.embeddings_dir, fingerprints=expected)
    prints = embeddings.fingerprints
    queries = [
        (
            QueryEmbeddings.of_split(source.embeddings_dir, task, split, fingerprints=prints),
            QuerySet.open(source.data_dir, source.collection, task, split),
        )
        for task, split in encoded_splits(source.embeddings_dir)
    ]
    coding = Coding.of(source.codes, embeddings)
    facts = _query_encoders(output_dir, prints.get("model"))
    directories = {format: output_dir / format for format in formats}
    for format, directory in directories.items():
        with phase(f"export {format}"):
            embedding_files.export_embeddings(
                embeddings,
                store,
                directory,
                format=format,
                coding=coding,
                queries=queries if format == embedding_files.PARQUET else (),
                facts=facts,
            )
        logger.info("%s: %s", format, directory)
    return directories


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


@writes("{output_dir}", kinds=[])
def import_embeddings(*, source: str, output_dir: str, data_dir: str, collection: str) -> int:
    """Makes a directory of embeddings from Parquet; `taser search` then needs no model.

    Args:
        source: directory of the Parquet files, as `taser export embeddings` writes it; others'
            needs the columns `id` and `embedding` alone.
        output_dir: gets what `taser encode` writes; must hold no embeddings.
        data_dir: folder of collections.
        collection: the collection, whose ids the files name.

    Returns:
        Number of passages.

    Raises:
        ConfigError: the directory has embeddings already.
        DataError: files that do not fit the collection.
    """
    store = PassageStore.open(data_dir, collection)
    with phase("import embeddings"):
        embedding_files.import_embeddings(
            pathlib.Path(source),
            pathlib.Path(output_dir),
            store=store,
            open_queries=functools.partial(QuerySet.open, data_dir, collection),
        )
    logger.info("%s: %d passages in %s", source, len(store), output_dir)
    return len(store)
