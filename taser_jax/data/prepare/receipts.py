"""Files beside a prepared collection: its receipt, lists of what was left out, KILT's gold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from etils import epath

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.storage.artifacts import FilePath, read_json, write_json, write_text
from taser_jax.storage.errors import TaserError
from taser_jax.storage.typed_files import typed

_RECEIPT = "prepare.json"
_GOLD = "kilt.jsonl"
_LEFT_OUT = "left_out"


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedSplit:
    """Counts of one task and split.

    Attributes:
        task: its task.
        split: "train", "validation" or "test".
        queries: number written.
        left_out: kind -> number of what its files lack.
        fingerprint: fingerprint of the query set.
        has_gold: whether KILT's gold is beside it.
    """

    task: str
    split: str
    queries: int
    left_out: Mapping[str, int]
    fingerprint: str
    has_gold: bool

    @classmethod
    def of(cls, queries: QuerySet, left_out: Mapping[str, int]) -> PreparedSplit:
        """A written query set with what its mapper counted."""
        counts = {kind: count for kind, count in left_out.items() if count}
        has_gold = gold_path(queries).exists()
        return cls(queries.task, queries.split, len(queries), counts, queries.fingerprint, has_gold)


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCollection:
    """A summary of what was prepared.

    Attributes:
        collection: its name.
        passages: number written.
        merged: passages skipped because their title and text occurred before.
        renamed: passages whose id was taken, now written label:id.
        left_out: kind -> number of passages left out.
        fingerprint: fingerprint of the collection.
        splits: the query sets.
        reused: whether the same had been prepared before, so that nothing was done.
    """

    collection: str
    passages: int
    merged: int
    renamed: int
    left_out: Mapping[str, int]
    fingerprint: str
    splits: tuple[PreparedSplit, ...]
    reused: bool = False


def write_receipt(
    data_dir: FilePath, prepared: PreparedCollection, *, inputs: str
) -> PreparedCollection:
    """Records what was prepared from inputs with this fingerprint, for `already_prepared`."""
    receipt = epath.Path(data_dir) / prepared.collection / _RECEIPT
    write_json(receipt, {"inputs": inputs, "prepared": dataclasses.asdict(prepared)})
    return prepared


def gold_path(queries: QuerySet) -> epath.Path:
    """The official gold of a query set that was prepared from KILT's files."""
    return queries.directory / _GOLD


def left_out_directory(data_dir: FilePath, collection: str) -> epath.Path:
    """The lists of what was left out, one a query set; passages.txt is that of the passages."""
    return epath.Path(data_dir) / collection / _LEFT_OUT


def write_left_out(
    data_dir: FilePath, collection: str, file: FilePath, lines: Sequence[str]
) -> None:
    """Lists what was left out: file, line and reason of each.

    Args:
        data_dir: folder of collections.
        collection: its name.
        file: "passages.txt", or task and split as `split_path` names them.
        lines: the list; without any there is no file.
    """
    path = left_out_directory(data_dir, collection) / file
    path.unlink(missing_ok=True)
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in lines))


def already_prepared(data_dir: FilePath, collection: str, inputs: str) -> PreparedCollection | None:
    """The collection prepared earlier from the same inputs, if all of it still exists."""
    path = epath.Path(data_dir) / collection / _RECEIPT
    receipt = read_json(path) if path.exists() else {}
    if receipt.get("inputs") != inputs:
        return None
    prepared = typed(receipt["prepared"], PreparedCollection, where=str(path))
    try:
        intact = PassageStore.open(data_dir, collection).fingerprint == prepared.fingerprint
        for prepared_split in prepared.splits:
            queries = QuerySet.open(data_dir, collection, prepared_split.task, prepared_split.split)
            intact = intact and queries.fingerprint == prepared_split.fingerprint
            intact = intact and (not prepared_split.has_gold or gold_path(queries).exists())
    except TaserError:
        return None
    return dataclasses.replace(prepared, reused=True) if intact else None
