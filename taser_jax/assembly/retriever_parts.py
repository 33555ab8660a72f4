"""`retriever.json`: where the parts of a retriever lie."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from taser_jax.storage.artifacts import FilePath, check_version, read_json, write_json
from taser_jax.storage.errors import DataError

RETRIEVER_FILE = "retriever.json"
_VERSION = 1
_FIX = "run the command that wrote it again"


@dataclasses.dataclass(frozen=True)
class RetrieverParts:
    """The directories that make a retriever.

    Attributes:
        model_dir: the trained model.
        index_dir: an index of its embeddings.
        data_dir: folder of collections.
        collection: the collection.
    """

    model_dir: str
    index_dir: str
    data_dir: str
    collection: str


def write_parts(directory: FilePath, parts: RetrieverParts) -> None:
    """Writes the `retriever.json` that `Retriever.load` reads; its folders are relative to it."""
    places = dataclasses.asdict(parts)
    name = places.pop("collection")
    relative = {key: os.path.relpath(path, directory) for key, path in places.items()}
    write_json(
        pathlib.Path(directory) / RETRIEVER_FILE,
        {"format_version": _VERSION, **relative, "collection": name},
    )


def read_parts(directory: FilePath) -> RetrieverParts | None:
    """The parts that a directory's `retriever.json` names; None where it has none.

    Raises:
        DataError: it is damaged, or of another format version.
    """
    path = pathlib.Path(directory) / RETRIEVER_FILE
    if not path.is_file():
        return None
    value = read_json(path, fix=_FIX)
    check_version(value, _VERSION, where=path, fix=_FIX)
    names = [field.name for field in dataclasses.fields(RetrieverParts)]
    absent = [name for name in names if not isinstance(value.get(name), str)]
    if absent:
        raise DataError(f"no {absent[0]}", where=str(path), expected=", ".join(names), fix=_FIX)
    folders = {name: str(path.parent / value[name]) for name in names if name != "collection"}
    return RetrieverParts(**folders, collection=value["collection"])
