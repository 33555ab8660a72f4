"""Writes a token store; `store` documents its directory and reads it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from taser_jax.data.files import in_blocks
from taser_jax.data.token_store import store
from taser_jax.data.token_store.arrays import Ragged, id_dtype, pack_tokens
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import DataError

_BLOCK_ROWS = 4096
# Fields of the metadata that enter the store's fingerprint as they are.
_HEADER = (
    *("collection", "collection_fingerprint", "vocabulary_fingerprint", "vocabulary_size"),
    *("query_length", "passage_length"),
)


class TokenStoreWriter:
    """Writes a token store; after `finish`, `TokenStore.open` accepts it.

    Example:
        about = TokenStoreMetadata(collection="squad", ..., passage_length=256)
        writer = TokenStoreWriter(directory, about)
        vocabulary.save(writer.vocabulary_directory)
        writer.write_passages(id_lists, count=len(passages))
        writer.write_queries("squad", "train", query_ids=..., tokens=..., positives=...)
        store = writer.finish()

    Args:
        directory: created if missing; no finished store, which `artifacts.replacing` replaces.
        metadata: what the store will be of; what is counted and fingerprinted is filled in.
    """

    def __init__(self, directory: artifacts.FilePath, metadata: store.TokenStoreMetadata) -> None:
        self.directory = pathlib.Path(directory)
        self._metadata = dataclasses.replace(metadata, num_passages=0, queries=())
        if (self.directory / artifacts.METADATA).exists():
            # Whoever has it open would read other ids.
            artifacts.check_empty(self.directory)
        with artifacts.storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def vocabulary_directory(self) -> pathlib.Path:
        """The directory to save the vocabulary to."""
        return self.directory / "vocabulary"

    def write_passages(self, token_lists: Iterable[Sequence[int]], *, count: int) -> None:
        """Streams the passages' ids to disk, in row order.

        Args:
            token_lists: ids of each passage, special tokens included, at most `passage_length`.
            count: their number.

        Raises:
            DataError: more or fewer than `count`; a passage that is empty or too long; an id
                outside the vocabulary.
            StorageError: the disk is full or the directory cannot be written.
        """
        folder = self.directory / "passages"
        length, vocabulary_size = self._metadata.passage_length, self._metadata.vocabulary_size
        content = artifacts.Fingerprint()
        lengths = np.zeros(count, np.int32)
        done = 0

        def where(row: int) -> str:
            return f"passages, row {done + row}"

        with artifacts.storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "ids.npy", "wb") as file:
                dtype = id_dtype(vocabulary_size).str
                header = {"descr": dtype, "fortran_order": False, "shape": (count, length)}
                np.lib.format.write_array_header_1_0(file, header)
                for block in in_blocks(token_lists, _BLOCK_ROWS):
                    if done + len(block) > count:
                        raise DataError(f"more than {count} passages", where=str(folder))
                    array = pack_tokens(block, length, vocabulary_size, where)
                    # Plain writes, since a full disk under a memory map kills the process.
                    file.write(array.ids.tobytes())
                    content.add(array.ids).add(array.lengths)
                    lengths[done : done + len(block)] = array.lengths
                    done += len(block)
            np.save(folder / "lengths.npy", lengths)
        if done != count:
            raise DataError(f"{done} passages", where=str(folder), expected=f"{count}")
        self._metadata = dataclasses.replace(
            self._metadata, num_passages=count, passages_fingerprint=content.hex()
        )

    def write_queries(
        self,
        task: str,
        split: str,
        *,
        query_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        positives: Iterable[Sequence[int]],
        hard_negatives: Iterable[Sequence[int]] | None = None,
        length: int | None = None,
        settings: store.QuerySettings = store.QuerySettings(),
    ) -> None:
        """Writes one task's split, with one list of each kind per query.

        Args:
            task: the task's name.
            split: "train", "validation" or "test".
            query_ids: the source's own ids.
            tokens: ids of each query, special tokens included.
            positives: rows of the passages, gold first; may be empty outside training.
            hard_negatives: rows of the passages; None means none.
            length: padded length of this task's queries; None means the store's `query_length`.
            settings: how texts became tokens.

        Raises:
            DataError: lists that do not match, or tokens that do not fit.
            StorageError: the disk is full or the directory cannot be written.
        """
        where = f"task {task!r}, split {split!r}"
        gold = Ragged.from_lists(positives)
        hard = Ragged.from_lists([[]] * len(tokens) if hard_negatives is None else hard_negatives)
        if {len(query_ids), len(gold), len(hard)} != {len(tokens)}:
            raise DataError(
                f"{len(query_ids)} query ids, {len(gold)} lists of positives and {len(hard)} of "
                f"hard negatives for {len(tokens)} token lists",
                where=where,
            )
        length = self._metadata.query_length if length is None else length
        vocabulary_size = self._metadata.vocabulary_size
        packed = pack_tokens(tokens, length, vocabulary_size, lambda i: f"{where}, {query_ids[i]}")
        # In the order of their fingerprint.
        arrays = {
            "ids": packed.ids,
            "lengths": packed.lengths,
            "positives.offsets": gold.offsets,
            "positives.values": gold.values,
            "hard_negatives.offsets": hard.offsets,
            "hard_negatives.values": hard.values,
        }
        ids = json.dumps(list(query_ids))
        folder = store.queries_folder(self.directory, task, split)
        with artifacts.storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
            (folder / "query_ids.json").write_text(ids, encoding="utf-8")
        content = artifacts.fingerprint([task, split, ids, *arrays.values()])
        form = settings.normalization.value, settings.prompt
        entry = store.QueriesEntry(task, split, len(tokens), length, content, *form)
        self._metadata = dataclasses.replace(
            self._metadata, queries=(*self._metadata.queries, entry)
        )

    def finish(self) -> store.TokenStore:
        """Records checksums, writes `metadata.json` atomically and opens the store.

        Raises:
            DataError: no passages were written.
        """
        metadata = self._metadata
        if not metadata.num_passages:
            raise DataError("no passages were written", where=str(self.directory))
        # Not titles and prompts: the tokens already depend on them.
        header = {name: getattr(metadata, name) for name in _HEADER}
        content = artifacts.fingerprint(
            [json.dumps(header, sort_keys=True), metadata.passages_fingerprint]
            + [entry.fingerprint for entry in metadata.queries]
        )
        metadata = dataclasses.replace(metadata, fingerprint=content)
        with artifacts.storage_errors(self.directory):
            checksums.seal(self.directory)
        artifacts.write_json(self.directory / artifacts.METADATA, dataclasses.asdict(metadata))
        return store.TokenStore.open(self.directory)
