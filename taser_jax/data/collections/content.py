"""Content of a collection's records: features, checks, indexes and fingerprints."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from taser_jax.data import id_index
from taser_jax.storage.artifacts import Fingerprint
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage, Query, check_id, empty_passage


def text_features(*names: str) -> tfds.features.FeaturesDict:
    """String features with these names."""
    return tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})


def passage_features() -> tfds.features.FeaturesDict:
    """TFDS features of a passage."""
    return text_features("id", "text", "title", "page_id")


def query_features() -> tfds.features.FeaturesDict:
    """TFDS features of a query; its task is that of the data set."""
    return tfds.features.FeaturesDict(
        {
            **text_features("id", "text"),
            "positives": tfds.features.Sequence(np.int32),
            "relevance": tfds.features.Sequence(np.int32),
            "hard_negatives": tfds.features.Sequence(np.int32),
            "answers": tfds.features.Sequence(tfds.features.Text()),
        }
    )


class PassageIndexWriter:
    """Collects ids, hashes and the fingerprint of streamed passages.

    Args:
        directory: where the index files go.
        where: the collection, for messages.
    """

    def __init__(self, directory: epath.Path, where: str) -> None:
        self._directory, self._where = directory, where
        self._ids = id_index.IdsWriter(directory)
        self._id_hashes, self._content_hashes = array.array("Q"), array.array("Q")
        self._fingerprint = Fingerprint()

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all passages so far."""
        return self._fingerprint.hex()

    def examples(
        self, passages: Iterable[Passage], empty: EmptyPassages
    ) -> Iterator[dict[str, str]]:
        """TFDS examples of the passages, which are recorded as they are read."""
        for passage in passages:
            if empty is not EmptyPassages.KEEP and not passage.text.strip():
                if empty is EmptyPassages.SKIP:
                    continue
                raise empty_passage(f"{self._where}, passage {passage.id!r}")
            check_id(passage.id, where=f"{self._where}, row {len(self._id_hashes)}, field 'id'")
            content = id_index.normalized_content(passage.title, passage.text)
            self._ids.add(passage.id)
            self._id_hashes.append(id_index.text_hash(passage.id))
            self._content_hashes.append(id_index.text_hash(content))
            for part in (passage.id, passage.text, passage.title, passage.page_id):
                self._fingerprint.add(part)
            yield {
                "id": passage.id,
                "text": passage.text,
                "title": passage.title,
                "page_id": passage.page_id,
            }

    def close(self, aliases: Mapping[str, int]) -> None:
        """Completes the files; `DataError` if an id occurs twice."""
        for alias, row in sorted(aliases.items()):
            self._fingerprint.add(alias).add(row)
        id_index.save_aliases(self._directory, aliases)
        self._ids.close()
        ids = id_index.Ids.open(self._directory)
        by_id = id_index.HashIndex.from_hashes(np.frombuffer(self._id_hashes, np.uint64))
        for first, second in by_id.repeated():
            if ids[first] == ids[second]:
                raise DataError(
                    f"the id {ids[first]!r} is used twice, in rows {first} and {second}",
                    where=f"{self._where}, field 'id'",
                    expected="a unique id for each passage",
                    fix="remove the duplicate or rename it",
                )
        by_id.save(self._directory, "id")
        by_content = id_index.HashIndex.from_hashes(np.frombuffer(self._content_hashes, np.uint64))
        by_content.save(self._directory, "content")

    def abandon(self) -> None:
        """Closes the open file without completing anything."""
        self._ids.abandon()


def query_examples(
    queries: Iterable[Query], content: Fingerprint, *, task: str, count: int, where: str
) -> Iterator[dict[str, Any]]:
    """TFDS examples of queries; checks them and adds them to the fingerprint `content`.

    Args:
        queries: the queries.
        content: fingerprint to add to.
        task: the task of all queries.
        count: number of passages in the collection.
        where: collection, task and split, for messages.

    Yields:
        One mapping per query.

    Raises:
        DataError: a repeated id, a query of another task, a row outside the collection.
    """
    seen: set[str] = set()
    for query in queries:
        at = f"{where}, query {query.id!r}"
        check_id(query.id, where=at)
        if query.id in seen:
            raise DataError("the query id is used twice", where=at, expected="unique ids")
        seen.add(query.id)
        if query.task != task:
            raise DataError(f"the query belongs to task {query.task!r}", where=at)
        for row in itertools.chain(query.positives, query.hard_negatives):
            if not 0 <= row < count:
                raise DataError(f"row {row}", where=at, expected=f"a row from 0 to {count - 1}")
        if query.relevance and len(query.relevance) != len(query.positives):
            raise DataError(
                f"{len(query.relevance)} grades for {len(query.positives)} positives",
                where=f"{at}, field 'relevance'",
                expected="one grade per positive, or none",
            )
        example = {
            "id": query.id,
            "text": query.text,
            "positives": list(query.positives),
            "relevance": list(query.relevance),
            "hard_negatives": list(query.hard_negatives),
            "answers": list(query.answers),
        }
        for part in (query.id, query.text):
            content.add(part)
        for values in (query.positives, query.relevance, query.hard_negatives):
            content.add(np.asarray(values, np.int32))
        content.add(len(query.answers))
        for answer in query.answers:
            content.add(answer)
        yield example
