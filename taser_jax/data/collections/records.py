"""One ArrayRecord data set in TFDS's layout: written as a stream, published at once, read by row.

TFDS's own generator path is not used for writing: with `disable_shuffling` it puts every record in
one shuffle bucket and sorts that bucket in memory at the end, which is too much for 21 million
passages. `tfds.core.SequentialWriter` appends to shards and writes the same files, so that
`tfds.builder_from_directory` can read them.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core import example_serializer

from taser_jax.data.files import in_blocks
from taser_jax.storage import checksums, records
from taser_jax.storage.artifacts import METADATA, Fingerprint, read_json, storage_errors, write_json
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import read_typed

FORMAT_VERSION = 1
_TEXT, _ROWS = tfds.features.Text(), tfds.features.Sequence(np.int32)
# In the order of their fingerprint.
PASSAGE_FEATURES = dict.fromkeys(("id", "text", "title", "page_id"), _TEXT)
# A query's task is that of the data set.
QUERY_FEATURES = {
    **dict.fromkeys(("id", "text"), _TEXT),
    **dict.fromkeys(("positives", "relevance", "hard_negatives"), _ROWS),
    "answers": tfds.features.Sequence(_TEXT),
}
_BLOCK = 2048
_PER_SHARD = 1 << 18
R = TypeVar("R")


class RecordMetadata(TypedDict, total=False):
    """metadata.json of passages, or of the queries of a task and split."""

    format_version: int
    name: str
    count: int
    fingerprint: str
    collection: str
    task: str
    split: str
    collection_fingerprint: str


class RecordDataset(Generic[R]):
    """A published data set: records by row.

    Args:
        directory: its directory.
    """

    def __init__(self, directory: epath.Path) -> None:
        self.directory = directory
        self._metadata = read_metadata(directory)
        self.fingerprint = self._metadata["fingerprint"]
        builder = tfds.builder_from_directory(directory)
        self._source = builder.as_data_source(split=self._metadata["name"])

    def _decoded(self, record: Mapping[str, Any]) -> R:
        """A record of the source, whose text comes as bytes."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> R:
        return self.get_many([row])[0]

    def __iter__(self) -> Iterator[R]:
        for start in range(0, len(self), _BLOCK):
            yield from self.get_many(range(start, min(start + _BLOCK, len(self))))

    def get_many(self, rows: Sequence[int]) -> list[R]:
        """Records of the rows, in their order.

        Raises:
            IndexError: a row is negative or beyond the last.
        """
        for row in rows:
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of {self.directory}, which has {len(self)}")
        if len(rows) == 1:
            # Reading one record directly avoids the thread pool that reading many starts.
            return [self._decoded(self._source[int(rows[0])])]
        return [*map(self._decoded, self._source.__getitems__([int(row) for row in rows]))]


def read_metadata(directory: epath.Path) -> RecordMetadata:
    """Metadata of a published data set.

    Raises:
        DataError: there is none, or its format is not supported.
    """
    path = directory / METADATA
    if not path.exists():
        fix = "run the `taser prepare` command that makes it (again)"
        raise DataError("there is no such data set", where=str(directory), fix=fix)
    again = "run the `taser prepare` command that makes it again"
    metadata = read_typed(path, RecordMetadata, fix=again, version=FORMAT_VERSION)
    checksums.check_directory(directory, fix=f"delete {directory} and {again}")
    return metadata


class _SameBytes(example_serializer.ExampleSerializer):
    """Writes the features of an example in one order, not in another in each process."""

    def serialize_example(self, example: Mapping[str, Any]) -> bytes:
        return self.get_tf_example(example).SerializeToString(deterministic=True)


def write_records(
    scratch: epath.Path,
    examples: Iterable[Mapping[str, object]],
    *,
    name: str,
    features: Mapping[str, tfds.features.FeatureConnector],
    where: str,
) -> int:
    """Writes examples to ArrayRecord shards in order, holding a few thousand at a time.

    Args:
        scratch: directory to write to; created.
        examples: one mapping of features per record.
        name: name of the data set and of its only split.
        features: of one example.
        where: what they are of, for dataset_info.json.

    Returns:
        The number of examples written.
    """
    identity = tfds.core.DatasetIdentity(
        name=name, version=tfds.core.Version("1.0.0"), data_dir=str(scratch), module_name=""
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict(features),
        description=f"{name.capitalize()} of {where}; the record's position is its row.",
        disable_shuffling=True,
    )
    writer = tfds.core.SequentialWriter(
        ds_info=info,
        max_examples_per_shard=_PER_SHARD,
        file_format=tfds.core.FileFormat.ARRAY_RECORD.value,
    )
    # TFDS has no setting for it.
    writer._serializer = _SameBytes(info.features.get_serialized_info())
    count = 0
    with storage_errors(scratch):
        scratch.mkdir(parents=True, exist_ok=True)
        writer.initialize_splits([name])
    try:
        # One call per batch: each call rewrites dataset_info.json.
        for batch in in_blocks(examples, _BLOCK):
            with storage_errors(scratch):
                writer.add_examples({name: batch})
            count += len(batch)
    finally:
        with storage_errors(scratch):
            writer.close_all()
    return count


def finish(scratch: epath.Path, directory: epath.Path, metadata: Mapping[str, object]) -> None:
    """Completes a data set that is about to take its place; tells if it replaces another.

    Args:
        scratch: where everything but the metadata is.
        directory: directory of the data set.
        metadata: must have "fingerprint"; the format version is added.
    """
    former = read_json(directory / METADATA, absent={}).get("fingerprint")
    if former not in (None, metadata["fingerprint"]):
        logger.warning(
            "%s: fingerprint %s is replaced by %s; what was made from it must be made again",
            *(directory, former, metadata["fingerprint"]),
        )
    write_json(scratch / METADATA, {"format_version": FORMAT_VERSION, **metadata})
    checksums.seal(scratch)


class PassageIndexWriter:
    """Collects ids, hashes and the fingerprint of streamed passages.

    Args:
        where: the collection, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._ids, self._id_ends = bytearray(), array.array("q")
        self._id_hashes, self._content_hashes = array.array("Q"), array.array("Q")
        self._fingerprint = Fingerprint()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all passages so far."""
        return self._fingerprint.hex()

    def examples(self, passages: Iterable[records.Passage]) -> Iterator[dict[str, str]]:
        """TFDS examples of the passages, which are recorded as they are read."""
        for passage in passages:
            records.check_id(
                passage.id, where=f"{self._where}, row {len(self._id_hashes)}, field 'id'"
            )
            content = records.normalized_content(passage.title, passage.text)
            self._ids += f"{passage.id}\n".encode()
            self._id_ends.append(len(self._ids))
            self._id_hashes.append(records.text_hash(passage.id))
            self._content_hashes.append(records.text_hash(content))
            example = {name: getattr(passage, name) for name in PASSAGE_FEATURES}
            for part in example.values():
                self._fingerprint.add(part)
            yield example

    def save(self, directory: epath.Path, aliases: Mapping[str, int]) -> None:
        """Writes the files; `DataError` if an id occurs twice."""
        for alias, row in sorted(aliases.items()):
            self._fingerprint.add(alias).add(row)
        records.save_aliases(directory, aliases)
        records.Ids.save(directory, self._ids, self._id_ends)
        ids = records.Ids.open(directory)
        by_id = records.HashIndex.from_hashes(np.frombuffer(self._id_hashes, np.uint64))
        for first, second in by_id.repeated():
            if ids[first] == ids[second]:
                problem = f"the id {ids[first]!r} is used twice, in rows {first} and {second}"
                fix = "remove the duplicate or rename it"
                raise DataError(problem, where=f"{self._where}, field 'id'", fix=fix)
        by_id.save(directory, "id")
        by_content = records.HashIndex.from_hashes(np.frombuffer(self._content_hashes, np.uint64))
        by_content.save(directory, "content")


def query_examples(
    queries: Iterable[records.Query], content: Fingerprint, *, count: int, where: str
) -> Iterator[dict[str, object]]:
    """TFDS examples of queries; checks them and adds them to the fingerprint `content`.

    Args:
        queries: the queries.
        content: fingerprint to add to.
        count: number of passages in the collection.
        where: collection, task and split, for messages.

    Yields:
        One mapping per query.

    Raises:
        DataError: a repeated id, or a row outside the collection.
    """
    seen: set[str] = set()
    for query in queries:
        at = f"{where}, query {query.id!r}"
        records.check_id(query.id, where=at)
        if query.id in seen:
            raise DataError("the query id is used twice", where=at, fix="rename one of them")
        seen.add(query.id)
        for row in itertools.chain(query.positives, query.hard_negatives):
            if not 0 <= row < count:
                raise DataError(f"row {row}, which is not from 0 to {count - 1}", where=at)
        for part in (query.id, query.text):
            content.add(part)
        for values in (query.positives, query.relevance, query.hard_negatives):
            content.add(np.asarray(values, np.int32))
        content.add(len(query.answers))
        for answer in query.answers:
            content.add(answer)
        yield {name: getattr(query, name) for name in QUERY_FEATURES}
