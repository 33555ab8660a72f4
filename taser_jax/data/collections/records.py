"""One ArrayRecord data set in TFDS's layout: written as a stream, published at once, read by row.

TFDS's own generator path is not used for writing: with `disable_shuffling` it puts every record in
one shuffle bucket and sorts that bucket in memory at the end, which is too much for 21 million
passages. `tfds.core.SequentialWriter` appends to shards and writes the same files, so that
`tfds.builder_from_directory` can read them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from taser_jax.data.blocks import in_blocks
from taser_jax.storage import checksums
from taser_jax.storage.artifacts import (
    METADATA,
    check_version,
    is_remote,
    read_json,
    storage_errors,
    write_json,
)
from taser_jax.storage.errors import DataError

FORMAT_VERSION = 1
_STAGING = ".building"
_BATCH = 2048
logger = logging.getLogger("taser")


class RecordDataset:
    """A published data set: metadata and records by row.

    Args:
        directory: its directory.
    """

    def __init__(self, directory: epath.Path) -> None:
        self.directory = directory
        self.metadata = read_metadata(directory)
        builder = tfds.builder_from_directory(directory)
        self._source = builder.as_data_source(split=self.metadata["name"])

    def __len__(self) -> int:
        return len(self._source)

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Decoded records of the rows, in their order; text comes as bytes."""
        for row in rows:
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of {self.directory}, which has {len(self)}")
        if len(rows) == 1:
            # Reading one record directly avoids the thread pool that reading many starts.
            return [self._source[int(rows[0])]]
        return list(self._source.__getitems__([int(row) for row in rows]))


def read_metadata(directory: epath.Path) -> dict[str, Any]:
    """Metadata of a published data set.

    Raises:
        DataError: there is none, or its format is not supported.
    """
    path = directory / METADATA
    if not path.exists():
        unfinished = staging_directory(directory).exists()
        raise DataError(
            "its build did not finish" if unfinished else "there is no such data set",
            where=str(directory),
            expected=f"a folder with {METADATA}",
            fix="run the `taser prepare` command that makes it (again)",
        )
    metadata = read_json(path)
    again = "run the `taser prepare` command that makes it again"
    check_version(metadata, FORMAT_VERSION, where=path, fix=again)
    if not is_remote(directory):
        checksums.check_directory(directory, fix=f"delete {directory} and {again}")
    return metadata


def staging_directory(directory: epath.Path) -> epath.Path:
    """The directory in which a data set is built before it is published."""
    return directory.parent / f"{directory.name}{_STAGING}"


def start_staging(directory: epath.Path) -> epath.Path:
    """Makes an empty staging directory and removes what an interrupted build left."""
    staging = staging_directory(directory)
    with storage_errors(staging):
        if staging.exists():
            logger.warning("%s: an earlier build did not finish, building again", directory)
            staging.rmtree()
        staging.mkdir(parents=True)
    return staging


def write_records(
    staging: epath.Path,
    examples: Iterable[Mapping[str, Any]],
    *,
    name: str,
    features: tfds.features.FeaturesDict,
    description: str,
    examples_per_shard: int,
) -> int:
    """Writes examples to ArrayRecord shards in order, holding a few thousand at a time.

    Args:
        staging: directory from `start_staging`.
        examples: one mapping of features per record.
        name: name of the data set and of its only split.
        features: TFDS features of one example.
        description: for dataset_info.json.
        examples_per_shard: maximum records per shard.

    Returns:
        The number of examples written.
    """
    identity = tfds.core.DatasetIdentity(
        name=name, version=tfds.core.Version("1.0.0"), data_dir=str(staging), module_name=""
    )
    info = tfds.core.DatasetInfo(
        builder=identity, features=features, description=description, disable_shuffling=True
    )
    writer = tfds.core.SequentialWriter(
        ds_info=info,
        max_examples_per_shard=examples_per_shard,
        file_format=tfds.core.FileFormat.ARRAY_RECORD.value,
    )
    count = 0
    with storage_errors(staging):
        writer.initialize_splits([name])
    try:
        # One call per batch: each call rewrites dataset_info.json.
        for batch in in_blocks(examples, _BATCH):
            with storage_errors(staging):
                writer.add_examples({name: batch})
            count += len(batch)
    finally:
        with storage_errors(staging):
            writer.close_all()
    return count


def publish(staging: epath.Path, directory: epath.Path, metadata: Mapping[str, Any]) -> bool:
    """Turns a complete staging directory into the data set, unless an equal one exists.

    Args:
        staging: directory with everything but the metadata.
        directory: directory of the data set.
        metadata: must have "fingerprint"; the format version is added.

    Returns:
        False if a data set with the same fingerprint existed and was left in place.
    """
    metadata = {"format_version": FORMAT_VERSION, **metadata}
    with storage_errors(directory):
        if (directory / METADATA).exists():
            existing = read_json(directory / METADATA)
            if existing == metadata:
                staging.rmtree()
                return False
            logger.warning(
                "%s: fingerprint %s is replaced by %s; what was made from it must be made again",
                directory,
                existing.get("fingerprint"),
                metadata["fingerprint"],
            )
        if directory.exists():
            directory.rmtree()
        if not is_remote(staging):
            checksums.seal(staging)
        # Last: its presence means that the build is complete.
        write_json(staging / METADATA, metadata)
        staging.rename(directory)
    return True


def discard(staging: epath.Path) -> None:
    """Removes a staging directory whose build failed with an error."""
    if staging.exists():
        staging.rmtree()
