"""The token store: a tokenised collection as memory-mapped arrays, read with NumPy alone.

Training needs only this directory, and no TensorFlow::

    passages/ids.npy        [passages, passage_length], uint16 where the vocabulary fits, else int32
    passages/lengths.npy    [passages], int32
    queries/<task>/<split>/ ids.npy, lengths.npy, query_ids.json,
                            {positives,hard_negatives}.{offsets,values}.npy
    vocabulary/             what `Vocabulary.save` wrote
    checksums.txt           sizes and checksums of all these
    metadata.json           written last: a store without it is unfinished
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import urllib.parse
from collections.abc import Sequence

import numpy as np

from taser_jax.data.token_store.arrays import Ragged, TokenArray, TokenizedQueries, load_array
from taser_jax.storage.artifacts import METADATA, FilePath, read_json
from taser_jax.storage.checksums import check_directory
from taser_jax.storage.errors import ConfigError, DataError, did_you_mean
from taser_jax.storage.typed_files import read_typed

FORMAT_VERSION = 1
# The ids of a token store depend on this version as well as on its settings; it is raised when
# formatting changes. 2: passages get the ids of Hugging Face's tokenizers also where a title is
# blank or longer than half the passage.
PREPROCESSING_VERSION = 2
_PARTS = ("offsets", "values")
_REMAKE = "make the token store again with `taser tokenize`"


class QueryNormalization(enum.Enum):
    """Normalisation of a query before tokenisation.

    CURLY_APOSTROPHE: ’ becomes ', as in DPR's `normalize_question`.
    """

    NONE = "none"
    CURLY_APOSTROPHE = "curly_apostrophe"


class Titles(enum.Enum):
    """Whether a passage's title precedes its text.

    INCLUDE: as a text of its own, `[CLS] title [SEP] text [SEP]`, as in DPR.
    JOIN: in one text with it, `[CLS] title text [SEP]`, as sentence-transformers does.
    OMIT: not at all.
    """

    INCLUDE = "include"
    JOIN = "join"
    OMIT = "omit"

    def applied(
        self, titles: Sequence[str], texts: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Titles and texts as they become tokens.

        Example:
            >>> Titles.JOIN.applied(["Paris"], ["lies on the Seine."])
            ([''], ['Paris lies on the Seine.'])
        """
        if self is Titles.INCLUDE:
            return titles, texts
        if self is Titles.JOIN:
            texts = [
                f"{title} {text}" if title else text
                for title, text in zip(titles, texts, strict=True)
            ]
        return [""] * len(texts), texts


@dataclasses.dataclass(frozen=True)
class QuerySettings:
    """How a task's queries become tokens, besides vocabulary and length.

    Attributes:
        normalization: normalisation of the text.
        prompt: token ids between [CLS] and the text.
    """

    normalization: QueryNormalization = QueryNormalization.NONE
    prompt: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class QueriesEntry:
    """The metadata of one task's split.

    Attributes:
        task: the task's name.
        split: "train", "validation" or "test".
        count: number of queries.
        length: padded length in tokens.
        fingerprint: fingerprint of their content.
        normalization: value of a `QueryNormalization`.
        prompt: token ids between [CLS] and text.
    """

    task: str
    split: str
    count: int
    length: int
    fingerprint: str
    normalization: str = QueryNormalization.NONE.value
    prompt: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenStoreMetadata:
    """The content of `metadata.json`; a writer fills in what it has written.

    Attributes:
        collection: name of the collection that was tokenised.
        collection_fingerprint: content fingerprint of its passages.
        vocabulary_fingerprint: fingerprint of the ids' vocabulary.
        vocabulary_size: ids are below it.
        query_length: padded length of queries, unless their task sets another.
        passage_length: padded length of passages.
        num_passages: number of rows.
        passages_fingerprint: fingerprint of the passages' token ids and lengths.
        queries: one entry per task and split.
        fingerprint: fingerprint of everything in the store.
        format_version: version of the directory's layout.
        titles: value of a `Titles`.
        passage_prompt: token ids between [CLS] and a passage.
        preprocessing_version: version of the code that turned texts into ids; the current one is
            `PREPROCESSING_VERSION`.
    """

    collection: str
    collection_fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    query_length: int
    passage_length: int
    num_passages: int = 0
    passages_fingerprint: str = ""
    queries: tuple[QueriesEntry, ...] = ()
    fingerprint: str = ""
    format_version: int = FORMAT_VERSION
    titles: str = Titles.INCLUDE.value
    passage_prompt: tuple[int, ...] = ()
    preprocessing_version: int = PREPROCESSING_VERSION


class TokenStore:
    """A finished token store, memory-mapped.

    Example:
        store = TokenStore.open("workspace/tokens")
        store.passages.tokens([3, 1]).ids.shape   # (2, passage_length)
        store.queries("squad", "train").positives[0]
    """

    def __init__(
        self, directory: FilePath, metadata: TokenStoreMetadata, passages: TokenArray
    ) -> None:
        self.directory = pathlib.Path(directory)
        self.metadata = metadata
        self.passages = passages

    @classmethod
    def open(cls, directory: FilePath) -> TokenStore:
        """Opens a store that `TokenStoreWriter.finish` has completed.

        Raises:
            DataError: the store is missing, unfinished, damaged or of another format version.
        """
        directory = pathlib.Path(directory)
        metadata = _read_metadata(directory)
        passages = _open_tokens(directory / "passages", metadata.num_passages)
        return cls(directory, metadata, passages)

    @property
    def vocabulary_directory(self) -> pathlib.Path:
        """The directory of the ids' vocabulary."""
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

    def of_queries(self, queries: TokenizedQueries) -> TokenizedQueries:
        """The queries as they are: as a `TextSource`, the store is of tokens."""
        return queries

    def queries(self, task: str, split: str) -> TokenizedQueries:
        """One task's split.

        Raises:
            ConfigError: the store has no such task or split; names what it has.
            DataError: the store was replaced after it had been opened.
        """
        now = read_json(self.directory / METADATA, fix=_REMAKE).get("fingerprint")
        if now != self.metadata.fingerprint:
            raise DataError(
                f"replaced by a store with fingerprint {now}",
                where=str(self.directory),
                expected=f"{self.metadata.fingerprint}, with which it was opened",
                fix="run the same command again, into another directory if it trains",
            )
        for entry in self.metadata.queries:
            if (entry.task, entry.split) == (task, split):
                return _open_queries(self.directory, entry, self.metadata.collection_fingerprint)
        there = [f"{entry.task} {entry.split}" for entry in self.metadata.queries]
        problem = f"no task {task!r} with a split {split!r}"
        expected = f"one of {', '.join(there) or '(the store has no queries)'}"
        where, fix = str(self.directory), did_you_mean(f"{task} {split}", there)
        raise ConfigError(problem, where=where, expected=expected, fix=fix)


def queries_folder(directory: pathlib.Path, task: str, split: str) -> pathlib.Path:
    """The folder of one task's split; escapes special characters of its name."""
    quote = urllib.parse.quote
    return directory / "queries" / quote(task, safe="") / quote(split, safe="")


def _read_metadata(directory: pathlib.Path) -> TokenStoreMetadata:
    path = directory / METADATA
    if not path.is_file():
        state = "is unfinished: it has no metadata.json" if directory.is_dir() else "does not exist"
        raise DataError(f"the token store {state}", where=str(directory), fix=_REMAKE)
    check_directory(directory, fix=_REMAKE)
    metadata = read_typed(path, TokenStoreMetadata, fix=_REMAKE, version=FORMAT_VERSION)
    if metadata.preprocessing_version != PREPROCESSING_VERSION:
        raise DataError(
            f"texts became tokens by version {metadata.preprocessing_version} of the code",
            where=f"{path}, field 'preprocessing_version'",
            expected=f"version {PREPROCESSING_VERSION}",
            fix=f"{_REMAKE} --gin.tokenize.replace=True",
        )
    return metadata


def _open_tokens(folder: pathlib.Path, count: int) -> TokenArray:
    # Lengths are small and used at every step: read, not mapped.
    ids = load_array(folder / "ids.npy", fix=_REMAKE, mmap_mode="r")
    array = TokenArray(ids, load_array(folder / "lengths.npy", fix=_REMAKE))
    if not len(array.ids) == len(array.lengths) == count:
        rows = f"{len(array.ids)} rows of ids and {len(array.lengths)} lengths, not {count} of each"
        raise DataError(rows, where=str(folder), fix=_REMAKE)
    longest = array.ids.shape[1]
    bad = np.flatnonzero((array.lengths < 1) | (array.lengths > longest))
    if len(bad):
        problem = f"row {bad[0]} has length {array.lengths[bad[0]]}, not 1 to {longest}"
        raise DataError(problem, where=str(folder / "lengths.npy"), fix=_REMAKE)
    return array


def _open_queries(
    directory: pathlib.Path, entry: QueriesEntry, collection_fingerprint: str
) -> TokenizedQueries:
    folder = queries_folder(directory, entry.task, entry.split)
    array = _open_tokens(folder, entry.count)
    positives, hard_negatives = (
        Ragged(*(load_array(folder / f"{name}.{part}.npy", fix=_REMAKE) for part in _PARTS))
        for name in ("positives", "hard_negatives")
    )
    return TokenizedQueries(
        array.ids,
        array.lengths,
        positives,
        hard_negatives,
        read_typed(folder / "query_ids.json", list[str], fix=_REMAKE),
        entry.task,
        entry.split,
        entry.fingerprint,
        collection_fingerprint,
    )
