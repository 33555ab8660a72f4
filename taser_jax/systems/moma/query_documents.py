"""The documents that queries were fused with and the attention to them, beside the embeddings."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32

from taser_jax.storage.artifacts import (
    FINGERPRINTS,
    FilePath,
    read_json,
    replacing,
    require_equal,
    write_json,
)
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_fields import JsonField, JsonType
from taser_jax.systems.moma.memories import Lookup, Mixture

# Files beside a split's query embeddings: the documents with their attention, and their mixture.
_FUSED, _MIXTURE = "documents.npz", "documents.json"
_FIELDS = {
    "fingerprints": FINGERPRINTS,
    "query_ids": JsonField(JsonType.LIST, required=True, items=JsonField(JsonType.STRING)),
}


def write_fused(
    directory: FilePath,
    lookup: Lookup,
    attention: Float32[np.ndarray, "queries segments"],
    *,
    fingerprints: Mapping[str, str],
) -> None:
    """Writes the documents that a split's queries were fused with, beside their embeddings.

    Args:
        directory: directory of the split's embeddings.
        lookup: the documents of each query.
        attention: attention to the query's own tokens, then to each document.
        fingerprints: fingerprints of the mixture.
    """
    folder = pathlib.Path(directory)
    with replacing(folder / _FUSED) as scratch, open(scratch, "wb") as file:
        np.savez(file, rows=lookup.rows, scores=lookup.scores, attention=attention)
    value = {"query_ids": lookup.query_ids, "fingerprints": dict(fingerprints)}
    write_json(folder / _MIXTURE, value)


def read_fused(
    directory: FilePath, mixture: Mixture
) -> tuple[Lookup, Float32[np.ndarray, "queries segments"]]:
    """Reads what `write_fused` wrote.

    Raises:
        DataError: the queries were encoded without documents, or without attention.
        FingerprintError: their documents are of another mixture.
    """
    folder = pathlib.Path(directory)
    value = read_json(folder / _MIXTURE, fields=_FIELDS, absent={})
    if not value:
        raise DataError(
            "no documents beside the queries' embeddings",
            where=str(folder),
            expected="queries that `taser encode` fused with documents",
            fix="encode with AUGMENTATION_DIR and encode.attention=True, or drop MEMORY_DIR",
        )
    require_equal(
        str(folder), value["fingerprints"], mixture.fingerprints, "name the mixture they are of"
    )
    with np.load(folder / _FUSED) as arrays:
        lookup = Lookup(value["query_ids"], arrays["rows"], arrays["scores"])
        return lookup, arrays["attention"]
