"""The receipt of a prepared collection: its content and the inputs it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from etils import epath

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.storage.artifacts import FilePath, read_json, split_path, write_json, write_text
from taser_jax.storage.errors import TaserError

_RECEIPT = "prepare.json"
_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedSplit:
    """Counts of one task and split.

    Attributes:
        task: its task.
        split: "train", "validation" or "test".
        queries: number written.
        without_positive: questions without a positive, dropped or kept.
        missing_positives: positives dropped because they are not in the collection.
        missing_hard_negatives: hard negatives dropped for the same reason.
        fingerprint: fingerprint of the query set.
    """

    task: str
    split: str
    queries: int
    without_positive: int
    missing_positives: int
    missing_hard_negatives: int
    fingerprint: str

    @classmethod
    def of(cls, queries: QuerySet, counts: Mapping[str, int]) -> PreparedSplit:
        """A written query set with what its mapper counted."""
        return cls(
            task=queries.task,
            split=queries.split,
            queries=len(queries),
            without_positive=counts.get("without_positive", 0),
            missing_positives=counts.get("missing_positives", 0),
            missing_hard_negatives=counts.get("missing_hard_negatives", 0),
            fingerprint=queries.fingerprint,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCollection:
    """A summary of what was prepared.

    Attributes:
        collection: its name.
        passages: number written.
        merged: passages skipped because their title and text occurred before.
        renamed: passages whose id was taken, now written label:id.
        fingerprint: fingerprint of the collection.
        splits: the query sets.
        reused: whether the same had been prepared before, so that nothing was done.
    """

    collection: str
    passages: int
    merged: int
    renamed: int
    fingerprint: str
    splits: tuple[PreparedSplit, ...]
    reused: bool = False


def write_receipt(
    data_dir: FilePath,
    store: PassageStore,
    splits: Sequence[PreparedSplit],
    *,
    inputs: str,
    merged: int = 0,
    renamed: int = 0,
) -> PreparedCollection:
    """Records what was prepared, for `already_prepared`, and returns it.

    Args:
        data_dir: folder of collections.
        store: the collection.
        splits: its query sets.
        inputs: fingerprint of the inputs.
        merged: as in `PreparedCollection`.
        renamed: as in `PreparedCollection`.
    """
    prepared = PreparedCollection(
        collection=store.name,
        passages=len(store),
        merged=merged,
        renamed=renamed,
        fingerprint=store.fingerprint,
        splits=tuple(splits),
    )
    receipt = epath.Path(data_dir) / store.name / _RECEIPT
    content = {"format_version": _FORMAT_VERSION, "inputs": inputs}
    write_json(receipt, {**content, "prepared": dataclasses.asdict(prepared)})
    return prepared


def without_positive_file(data_dir: FilePath, collection: str, task: str, split: str) -> epath.Path:
    """The list of a file's questions without a positive; absent where all have one."""
    name = split_path("without_positive", task, split, ".txt")
    return epath.Path(data_dir) / collection / name


def write_without_positive(
    data_dir: FilePath, collection: str, task: str, split: str, lines: Sequence[str]
) -> None:
    """Lists the questions without a positive: file, line and text of each."""
    path = without_positive_file(data_dir, collection, task, split)
    path.unlink(missing_ok=True)
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in lines))


def already_prepared(data_dir: FilePath, collection: str, inputs: str) -> PreparedCollection | None:
    """The collection prepared earlier from the same inputs, if all of it still exists."""
    receipt = epath.Path(data_dir) / collection / _RECEIPT
    if not receipt.exists():
        return None
    content = read_json(receipt)
    if content.get("format_version") != _FORMAT_VERSION or content["inputs"] != inputs:
        return None
    splits = tuple(PreparedSplit(**split) for split in content["prepared"].pop("splits"))
    prepared = PreparedCollection(**content["prepared"], splits=splits)
    try:
        intact = PassageStore.open(data_dir, collection).fingerprint == prepared.fingerprint
        for one in splits:
            queries = QuerySet.open(data_dir, collection, one.task, one.split)
            intact = intact and queries.fingerprint == one.fingerprint
    except TaserError:
        return None
    return dataclasses.replace(prepared, reused=True) if intact else None
