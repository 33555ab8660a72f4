"""The token store: a tokenised collection as memory-mapped arrays, read with NumPy alone.

A directory that a machine without TensorFlow trains from::

    passages/ids.npy        [passages, passage_length], uint16 where the vocabulary fits, else int32
    passages/lengths.npy    [passages], int32
    queries/<task>/<split>/ ids.npy, lengths.npy, query_ids.json,
                            {positives,hard_negatives}.{offsets,values}.npy
    vocabulary/             what `Vocabulary.save` wrote
    metadata.json           written last: a store without it is unfinished
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Literal

import numpy as np

from taser_jax.batch import Tokens
from taser_jax.data.token_arrays import Ragged, TokenArray, TokenizedQueries, id_dtype, pack_tokens
from taser_jax.errors import ConfigError, DataError
from taser_jax.fingerprint import Fingerprint, fingerprint
from taser_jax.storage import storage_errors

FORMAT_VERSION = 1
_METADATA = "metadata.json"
_BLOCK_ROWS = 4096
_REMAKE = "make the token store again with `taser tokenize`"

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class QueriesEntry:
    """What the metadata says of one task's split."""

    task: str
    split: str
    count: int
    length: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class TokenStoreMetadata:
    """What `metadata.json` holds.

    Attributes:
        collection: name of the collection that was tokenised.
        collection_fingerprint: content fingerprint of its passages.
        vocabulary_fingerprint: of the vocabulary the ids belong to.
        vocabulary_size: ids are below it.
        query_length: tokens a query is padded to, where its task sets none of its own.
        passage_length: tokens a passage is padded to.
        num_passages: rows of the store.
        passages_fingerprint: of the passages' token ids and lengths.
        queries: one entry a task and split.
        fingerprint: of everything in the store.
        format_version: of the directory's layout.
    """

    collection: str
    collection_fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    query_length: int
    passage_length: int
    num_passages: int
    passages_fingerprint: str
    queries: tuple[QueriesEntry, ...]
    fingerprint: str
    format_version: int = FORMAT_VERSION


class TokenStore:
    """A finished token store, memory-mapped.

    Example:
        store = TokenStore.open("workspace/tokens")
        store.passage_tokens([3, 1]).ids.shape   # (2, passage_length)
        store.queries("squad", "train").positives[0]
    """

    def __init__(
        self, directory: PathLike, metadata: TokenStoreMetadata, passages: TokenArray
    ) -> None:
        self.directory = pathlib.Path(directory)
        self.metadata = metadata
        self.passages = passages

    @classmethod
    def open(cls, directory: PathLike) -> TokenStore:
        """Opens a store that `TokenStoreWriter.finish` has completed.

        Raises:
            DataError: the store is absent, unfinished, damaged or of another format version.
        """
        directory = pathlib.Path(directory)
        metadata = _read_metadata(directory)
        passages = _open_tokens(directory / "passages", metadata.num_passages)
        return cls(directory, metadata, passages)

    @property
    def vocabulary_directory(self) -> pathlib.Path:
        """Where the vocabulary of the ids is."""
        return self.directory / "vocabulary"

    @property
    def tasks(self) -> dict[str, list[str]]:
        """Task -> its splits."""
        tasks: dict[str, list[str]] = {}
        for entry in self.metadata.queries:
            tasks.setdefault(entry.task, []).append(entry.split)
        return tasks

    def __len__(self) -> int:
        return len(self.passages)

    def passage_tokens(self, rows: Sequence[int] | np.ndarray) -> Tokens:
        """Ids and mask of the given passages. Shape [rows, passage_length]."""
        return self.passages.tokens(rows)

    def queries(self, task: str, split: str) -> TokenizedQueries:
        """One task's split.

        Raises:
            ConfigError: the store has no such task or split; names what it has.
        """
        for entry in self.metadata.queries:
            if (entry.task, entry.split) == (task, split):
                return _open_queries(self.directory, entry, self.metadata.collection_fingerprint)
        if task in self.tasks:
            found, known = f"task {task!r} has no split {split!r}", self.tasks[task]
        else:
            found, known = f"no task {task!r}", sorted(self.tasks)
        nearest = difflib.get_close_matches(split if task in self.tasks else task, known, n=1)
        raise ConfigError(
            found,
            where=str(self.directory),
            expected=f"one of {', '.join(known) or '(the store has no queries)'}",
            fix=f"did you mean {nearest[0]!r}?" if nearest else None,
        )


class TokenStoreWriter:
    """Writes a token store; `finish` makes it one that `TokenStore.open` accepts.

    Example:
        writer = TokenStoreWriter(directory, collection="squad", ..., passage_length=256)
        vocabulary.save(writer.vocabulary_directory)
        writer.write_passages(id_lists, count=len(passages))
        writer.write_queries("squad", "train", query_ids=..., tokens=..., positives=...)
        store = writer.finish()

    Args:
        directory: made where absent; a finished store there becomes unfinished at once.
        collection: see `TokenStoreMetadata`, as all that follow.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        collection: str,
        collection_fingerprint: str,
        vocabulary_fingerprint: str,
        vocabulary_size: int,
        query_length: int,
        passage_length: int,
    ) -> None:
        for name, value in (
            ("vocabulary_size", vocabulary_size),
            ("query_length", query_length),
            ("passage_length", passage_length),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}", expected="1 or more")
        self.directory = pathlib.Path(directory)
        self._header: dict[str, Any] = {
            "collection": collection,
            "collection_fingerprint": collection_fingerprint,
            "vocabulary_fingerprint": vocabulary_fingerprint,
            "vocabulary_size": vocabulary_size,
            "query_length": query_length,
            "passage_length": passage_length,
        }
        self._num_passages: int | None = None
        self._passages_fingerprint = ""
        self._entries: list[QueriesEntry] = []
        self._largest_row = (-1, "")
        with storage_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / _METADATA).unlink(missing_ok=True)

    @property
    def vocabulary_directory(self) -> pathlib.Path:
        """Where the vocabulary is to be saved."""
        return self.directory / "vocabulary"

    def write_passages(self, token_lists: Iterable[Sequence[int]], *, count: int) -> None:
        """Streams the passages' ids to disk, in row order.

        Args:
            token_lists: ids of each passage, special tokens included, at most `passage_length`.
            count: how many there are.

        Raises:
            DataError: more or fewer than `count`; a passage that is empty or too long; an id
                outside the vocabulary.
            StorageError: the disk is full or the directory cannot be written.
        """
        folder = self.directory / "passages"
        length, vocabulary_size = self._header["passage_length"], self._header["vocabulary_size"]
        content = Fingerprint()
        lengths = np.zeros(count, np.int32)
        done = 0
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "ids.npy", "wb") as file:
                _write_header(file, (count, length), id_dtype(vocabulary_size))
                for block in _blocks(token_lists, _BLOCK_ROWS):
                    if done + len(block) > count:
                        raise DataError(f"more than {count} passages", where=str(folder))
                    names = [f"row {row}" for row in range(done, done + len(block))]
                    array = pack_tokens(block, length, vocabulary_size, "passages", names)
                    # Plain writes, since a full disk under a memory map kills the process.
                    file.write(array.ids.tobytes())
                    content.add(array.ids).add(array.lengths)
                    lengths[done : done + len(block)] = array.lengths
                    done += len(block)
            np.save(folder / "lengths.npy", lengths)
        if done != count:
            raise DataError(f"{done} passages", where=str(folder), expected=f"{count}")
        self._num_passages, self._passages_fingerprint = count, content.hex()

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
    ) -> None:
        """Writes one task's split; one list of each kind a query.

        Args:
            task: the task's name.
            split: "train", "validation" or "test".
            query_ids: the source's own ids.
            tokens: ids of each query, special tokens included.
            positives: rows of the passages, gold first; may be empty outside training.
            hard_negatives: rows of the passages; None means none.
            length: tokens this task's queries are padded to; the store's `query_length` where None.

        Raises:
            DataError: lists that do not match, or tokens that do not fit.
            StorageError: the disk is full or the directory cannot be written.
        """
        if any((entry.task, entry.split) == (task, split) for entry in self._entries):
            raise DataError(f"task {task!r}, split {split!r} was written before")
        queries = TokenizedQueries.from_lists(
            task,
            split,
            query_ids=query_ids,
            tokens=tokens,
            positives=positives,
            hard_negatives=hard_negatives,
            length=self._header["query_length"] if length is None else length,
            vocabulary_size=self._header["vocabulary_size"],
        )
        self._check_rows(queries)
        folder = _queries_folder(self.directory, task, split)
        arrays = {"ids": queries.ids, "lengths": queries.lengths}
        for name in ("positives", "hard_negatives"):
            ragged: Ragged = getattr(queries, name)
            arrays[f"{name}.offsets"], arrays[f"{name}.values"] = ragged.offsets, ragged.values
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
            (folder / "query_ids.json").write_text(json.dumps(queries.query_ids), encoding="utf-8")
        self._entries.append(
            QueriesEntry(task, split, len(queries), queries.ids.shape[1], queries.fingerprint)
        )

    def finish(self) -> TokenStore:
        """Writes `metadata.json` atomically and opens the store.

        Raises:
            DataError: no passages were written, or a positive or hard negative is not among them.
        """
        if self._num_passages is None:
            raise DataError("no passages were written", where=str(self.directory))
        row, query = self._largest_row
        if row >= self._num_passages:
            raise DataError(
                f"passage row {row}",
                where=query,
                expected=f"a row below {self._num_passages}, the number of passages",
                fix="queries and passages must come from one collection: prepare it again",
            )
        content = fingerprint(
            [json.dumps(self._header, sort_keys=True), self._passages_fingerprint]
            + [entry.fingerprint for entry in self._entries]
        )
        metadata = TokenStoreMetadata(
            **self._header,
            num_passages=self._num_passages,
            passages_fingerprint=self._passages_fingerprint,
            queries=tuple(self._entries),
            fingerprint=content,
        )
        path, partial = self.directory / _METADATA, self.directory / f"{_METADATA}.partial"
        with storage_errors(path):
            partial.write_text(
                json.dumps(dataclasses.asdict(metadata), indent=2) + "\n", encoding="utf-8"
            )
            os.replace(partial, path)
        return TokenStore.open(self.directory)

    def _check_rows(self, queries: TokenizedQueries) -> None:
        """Negative rows are wrong at once; too large ones once the passages are counted."""
        for kind, ragged in (
            ("positive", queries.positives),
            ("hard negative", queries.hard_negatives),
        ):
            if not len(ragged.values):
                continue
            for at in (int(np.argmin(ragged.values)), int(np.argmax(ragged.values))):
                row = int(ragged.values[at])
                query = int(np.searchsorted(ragged.offsets, at, side="right")) - 1
                where = f"query {queries.query_ids[query]!r} of task {queries.task!r}, a {kind}"
                if row < 0:
                    raise DataError(f"passage row {row}", where=where, expected="0 or more")
                if row > self._largest_row[0]:
                    self._largest_row = (row, where)


def _blocks(items: Iterable[Sequence[int]], size: int) -> Iterator[list[Sequence[int]]]:
    block: list[Sequence[int]] = []
    for item in items:
        block.append(item)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


def _write_header(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _queries_folder(directory: pathlib.Path, task: str, split: str) -> pathlib.Path:
    quote = urllib.parse.quote
    return directory / "queries" / quote(task, safe="") / quote(split, safe="")


def _read_metadata(directory: pathlib.Path) -> TokenStoreMetadata:
    path = directory / _METADATA
    if not path.is_file():
        state = "is unfinished: it has no metadata.json" if directory.is_dir() else "does not exist"
        raise DataError(f"the token store {state}", where=str(directory), fix=_REMAKE)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        version = value["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"format version {version}",
                where=str(path),
                expected=f"format version {FORMAT_VERSION}",
                fix=_REMAKE,
            )
        value["queries"] = tuple(QueriesEntry(**entry) for entry in value["queries"])
        return TokenStoreMetadata(**value)
    except (ValueError, KeyError, TypeError) as error:
        found = f"not a token store's metadata ({error})"
        raise DataError(found, where=str(path), fix=_REMAKE) from error


def _load(path: pathlib.Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    try:
        return np.load(path, mmap_mode=mmap_mode)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, error) from error


def _damaged(path: pathlib.Path, error: Exception) -> DataError:
    return DataError(f"missing or damaged ({error})", where=str(path), fix=_REMAKE)


def _open_tokens(folder: pathlib.Path, count: int) -> TokenArray:
    # Lengths are touched at every step and small: read, not mapped.
    array = TokenArray(_load(folder / "ids.npy", "r"), _load(folder / "lengths.npy"))
    if not len(array.ids) == len(array.lengths) == count:
        raise DataError(
            f"{len(array.ids)} rows of ids and {len(array.lengths)} lengths",
            where=str(folder),
            expected=f"{count} of each",
            fix=_REMAKE,
        )
    return array


def _open_queries(
    directory: pathlib.Path, entry: QueriesEntry, collection_fingerprint: str
) -> TokenizedQueries:
    folder = _queries_folder(directory, entry.task, entry.split)
    array = _open_tokens(folder, entry.count)
    positives, hard_negatives = (
        Ragged(
            _load(folder / f"{name}.offsets.npy"),
            _load(folder / f"{name}.values.npy"),
        )
        for name in ("positives", "hard_negatives")
    )
    path = folder / "query_ids.json"
    try:
        query_ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return TokenizedQueries(
        array.ids,
        array.lengths,
        positives,
        hard_negatives,
        query_ids,
        entry.task,
        entry.split,
        entry.fingerprint,
        collection_fingerprint,
    )
