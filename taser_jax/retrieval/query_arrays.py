"""Arrays with one line per query, as an artefact: ranked lists and specialists' confidences.

    <directory>/    arrays.npz, query_ids.json, metadata.json

Rows of lists are rows of the passage store; TREC run files hold shorter lists.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.retrieval.runs import Run
from taser_jax.storage.artifacts import (
    ARRAY_ERRORS,
    FINGERPRINTS,
    METADATA,
    FilePath,
    read_metadata,
    replacing,
    require_equal,
    write_json,
)
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_fields import JsonField, JsonType
from taser_jax.storage.json_files import read_strings

LISTS, CONFIDENCE, FUSED_LISTS = "ranked lists", "confidence", "fused lists"
_VERSION = 1
_FIELDS = {
    "fingerprints": FINGERPRINTS,
    "columns": JsonField(JsonType.LIST, required=True, items=JsonField(JsonType.STRING)),
}
_ARRAYS, _QUERY_IDS = "arrays.npz", "query_ids.json"


@dataclasses.dataclass(frozen=True)
class QueryArrays:
    """Arrays of the same queries.

    Attributes:
        kind: LISTS, CONFIDENCE or FUSED_LISTS.
        query_ids: one per line of each array.
        arrays: name -> [queries, ...].
        fingerprints: fingerprints of their sources.
        columns: names along the second axis; for confidences, the specialists.
    """

    kind: str
    query_ids: list[str]
    arrays: Mapping[str, np.ndarray]
    fingerprints: Mapping[str, str]
    columns: tuple[str, ...] = ()

    @classmethod
    def of_run(cls, run: Run, *, fingerprints: Mapping[str, str]) -> QueryArrays:
        """A run's rows and scores."""
        arrays = {"rows": run.rows, "scores": run.scores}
        return cls(LISTS, run.query_ids, arrays, fingerprints)

    @property
    def run(self) -> Run:
        """The lists."""
        return Run(self.query_ids, self.arrays["rows"], self.arrays["scores"])

    def save(self, directory: FilePath) -> None:
        """Writes the artefact, its metadata last."""
        directory = pathlib.Path(directory)
        with (
            replacing(directory / _ARRAYS, recorded=True) as scratch,
            open(scratch, "wb") as file,
        ):
            np.savez(file, allow_pickle=False, **self.arrays)
        write_json(directory / _QUERY_IDS, self.query_ids)
        metadata = {"kind": self.kind, "format_version": _VERSION, "columns": list(self.columns)}
        write_json(directory / METADATA, {**metadata, "fingerprints": dict(self.fingerprints)})

    @classmethod
    def open(
        cls, directory: FilePath, kind: str, *, fingerprints: Mapping[str, str] | None = None
    ) -> QueryArrays:
        """Opens a finished artefact.

        Args:
            directory: where it is.
            kind: the required kind.
            fingerprints: required fingerprints of its sources.

        Raises:
            DataError: nothing finished there, another kind, or a damaged file.
            FingerprintError: it was made from something else.
        """
        directory = pathlib.Path(directory)
        metadata = read_metadata(directory, kind, _VERSION, fields=_FIELDS)
        again = f"delete {directory}, then run the same command again, or name another directory"
        require_equal(f"{kind} {directory}", metadata["fingerprints"], fingerprints or {}, again)
        try:
            with np.load(directory / _ARRAYS) as file:
                arrays = {name: file[name] for name in file.files}
        except ARRAY_ERRORS as error:
            raise DataError(
                f"missing or damaged: {error}", where=str(directory), fix=again
            ) from error
        query_ids = read_strings(directory / _QUERY_IDS, fix=again)
        return cls(kind, query_ids, arrays, metadata["fingerprints"], tuple(metadata["columns"]))


def is_finished(directory: FilePath) -> bool:
    """Whether a finished artefact of any kind is there."""
    return (pathlib.Path(directory) / METADATA).is_file()


def require_queries(found: Sequence[str], expected: Sequence[str], *, where: str) -> None:
    """Refuses lines for other queries, or in another order.

    Raises:
        DataError: naming the first query that differs.
    """
    for line, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            raise DataError(f"query {one!r} in line {line}", where=where, expected=repr(other))
    if len(found) != len(expected):
        raise DataError(f"{len(found)} queries", where=where, expected=str(len(expected)))
