"""Embeddings to the files of vector stores (`taser export`)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from taser_jax.assembly.model_directory import load_model
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.interop.model_card import METADATA
from taser_jax.retrieval.embedding_files import StoreFormat, export_embeddings
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, encoded_splits
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase


@dataclasses.dataclass(frozen=True)
class EmbeddingsExport:
    """Embeddings to export, and the collection that they are of.

    Attributes:
        embeddings_dir: from `taser encode`; the queries' embeddings are exported too.
        data_dir: folder of collections, for ids, titles and texts.
        collection: the collection.
    """

    embeddings_dir: str | None = None
    data_dir: str | None = None
    collection: str | None = None


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
    directories = {format.value: output_dir / format.value for format in formats}
    for format in formats:
        with phase(f"export {format.value}"):
            export_embeddings(
                embeddings,
                store,
                directories[format.value],
                format=format,
                queries=queries if format is StoreFormat.PARQUET else (),
                facts=_query_encoders(output_dir, embeddings.fingerprints.get("model")),
            )
        logger.info("%s: %s", format.value, directories[format.value])
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
