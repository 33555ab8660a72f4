"""Token ids, lists of rows and states of many texts, as NumPy arrays.

States of frozen blocks replace a store's tokens. On disk they are float32, or bfloat16 stored as
uint16; texts follow one another without padding, and the token store knows their lengths:

    passages/states.npy                 [tokens of all passages, width]
    queries/<task>.<split>/states.npy   [tokens of all queries, width]
    plan.json beside each               their sources
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int

from taser_jax.models.batch import States, Tokens
from taser_jax.storage.artifacts import ARRAY_ERRORS, FilePath, fingerprint
from taser_jax.storage.checksums import check_file
from taser_jax.storage.errors import DataError

STATES = "states.npy"


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Lists of rows of different lengths, end to end.

    Example:
        >>> Ragged.from_lists([[7, 3], [], [5]])[0].tolist()
        [7, 3]

    Attributes:
        offsets: list i is `values[offsets[i]:offsets[i + 1]]`. Shape [lists + 1], int64.
        values: all lists' values in order. Shape [total], int32.
    """

    offsets: Int[np.ndarray, " lists_plus_1"]
    values: Int[np.ndarray, " total"]

    @classmethod
    def from_lists(cls, lists: Iterable[Sequence[int] | np.ndarray]) -> Ragged:
        """Packs lists of integers."""
        arrays = [np.asarray(values, np.int32).reshape(-1) for values in lists]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(array) for array in arrays], out=offsets[1:])
        return cls(offsets, np.concatenate([np.zeros(0, np.int32), *arrays]))

    @property
    def lengths(self) -> Int[np.ndarray, " lists"]:
        """Length of each list."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Int[np.ndarray, " length"]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"list {index} of {len(self)}")
        index %= len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))


@dataclasses.dataclass(frozen=True)
class TokenArray:
    """Token ids of many texts, padded at the end to one length.

    Attributes:
        ids: shape [texts, length], uint16 or int32; may be memory-mapped.
        lengths: real tokens of each text. Shape [texts], int32.
    """

    ids: Int[np.ndarray, "texts length"]
    lengths: Int[np.ndarray, " texts"]

    @classmethod
    def of(cls, tokens: Tokens) -> TokenArray:
        """Tokens in memory."""
        return cls(np.asarray(tokens.ids), np.asarray(tokens.mask).sum(axis=1))

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, rows: Sequence[int] | np.ndarray) -> Tokens:
        """Ids and mask of the given rows, in their order. Shape [rows, length]."""
        rows = np.asarray(rows, np.int64)
        positions = np.arange(self.ids.shape[1], dtype=np.int32)
        return Tokens(
            ids=self.ids[rows].astype(np.int32),
            mask=positions[None, :] < self.lengths[rows][:, None],
        )


@dataclasses.dataclass(frozen=True)
class TokenizedQueries(TokenArray):
    """One split of one task: token ids, positives and hard negatives of each query.

    Attributes:
        positives: rows of the passage store, gold first.
        hard_negatives: rows of the passage store.
        query_ids: the source's own ids.
        task: the task's name.
        split: "train", "validation" or "test".
        fingerprint: fingerprint of the tokens and all of the above.
        collection_fingerprint: that of the rows' collection; empty if unknown.
    """

    positives: Ragged
    hard_negatives: Ragged
    query_ids: list[str]
    task: str
    split: str
    fingerprint: str
    collection_fingerprint: str = ""

    def with_hard_negatives(self, hard_negatives: Ragged) -> TokenizedQueries:
        """The same queries with other hard negatives, such as mined ones, and a new fingerprint.

        Args:
            hard_negatives: a list for each query.
        """
        content = fingerprint([self.fingerprint, hard_negatives.offsets, hard_negatives.values])
        return dataclasses.replace(self, hard_negatives=hard_negatives, fingerprint=content)


def load_array(
    path: pathlib.Path, *, fix: str, mmap_mode: Literal["r"] | None = None
) -> np.ndarray:
    """Reads or maps an array.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        return np.load(path, mmap_mode=mmap_mode)
    except ARRAY_ERRORS as error:
        raise DataError(f"missing or damaged ({error})", where=str(path), fix=fix) from error


def id_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest stored dtype for all ids of a vocabulary."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")


def pack_tokens(
    token_lists: Sequence[Sequence[int]],
    length: int,
    vocabulary_size: int,
    where: Callable[[int], str],
) -> TokenArray:
    """Pads lists of ids to [lists, length]; `where` says, for errors, what a list is."""
    lengths = np.fromiter((len(ids) for ids in token_lists), np.int32, len(token_lists))
    bad = np.flatnonzero((lengths < 1) | (lengths > length))
    if len(bad):
        expected = f"1 to {length} tokens, special tokens included"
        raise DataError(f"{lengths[bad[0]]} tokens", where=where(int(bad[0])), expected=expected)
    flat = np.fromiter((i for ids in token_lists for i in ids), np.int64, int(lengths.sum()))
    bad = np.flatnonzero((flat < 0) | (flat >= vocabulary_size))
    if len(bad):
        text = int(np.searchsorted(np.cumsum(lengths), bad[0], side="right"))
        expected = f"an id of the vocabulary, 0 to {vocabulary_size - 1}"
        raise DataError(f"token id {flat[bad[0]]}", where=where(text), expected=expected)
    ids = np.zeros((len(token_lists), length), id_dtype(vocabulary_size))
    ids[np.arange(length)[None, :] < lengths[:, None]] = flat
    return TokenArray(ids, lengths)


@dataclasses.dataclass(frozen=True)
class StateRows:
    """States of many texts, which `tokens` pads like a token array's ids.

    Attributes:
        states: states of all texts, one after another; may be memory-mapped. [total, width]
        starts: first state of each text. Shape [texts], int64.
        lengths: real tokens of each text. Shape [texts].
        length: tokens that texts are padded to.
    """

    states: Float[np.ndarray, "total width"]
    starts: Int[np.ndarray, " texts"]
    lengths: Int[np.ndarray, " texts"]
    length: int

    @classmethod
    def open(
        cls, directory: FilePath, lengths: Int[np.ndarray, " texts"], *, length: int
    ) -> StateRows:
        """Opens the states of all texts of a side.

        Args:
            directory: `passages/`, or that of one split.
            lengths: real tokens of the texts.
            length: tokens that texts are padded to.

        Raises:
            DataError: missing or damaged, or of another number of tokens.
        """
        path = pathlib.Path(directory) / STATES
        fix = f"delete {directory}, then run the command that made it again"
        check_file(path, fix=fix)
        states = load_array(path, fix=fix, mmap_mode="r")
        ends = np.cumsum(lengths, dtype=np.int64)
        if states.ndim != 2 or len(states) != ends[-1]:
            shape = f"shape {states.shape}, not those of {ends[-1]} tokens"
            raise DataError(shape, where=str(path), fix=fix)
        if states.dtype == np.uint16:
            states = states.view(ml_dtypes.bfloat16)
        return cls(states, ends - lengths, lengths, length)

    def take(self, rows: Int[np.ndarray, " kept"], *, length: int) -> StateRows:
        """States of some of the texts, padded to another length."""
        return dataclasses.replace(
            self, starts=self.starts[rows], lengths=self.lengths[rows], length=length
        )

    def tokens(self, rows: Int[np.ndarray, " rows"]) -> States:
        """States and mask of the given rows, in their order."""
        positions = np.arange(self.length)
        mask = positions < self.lengths[rows][:, None]
        hidden = np.zeros((*mask.shape, self.states.shape[1]), self.states.dtype)
        hidden[mask] = self.states[(self.starts[rows][:, None] + positions)[mask]]
        return States(hidden, mask)


@dataclasses.dataclass(frozen=True)
class CachedStates:
    """States of a token store's passages and of some of its queries.

    Attributes:
        passages: states of all passages.
        queries: (task, split) -> states of all its queries.
        query_rows: (task, split) -> query id -> its row.
    """

    passages: StateRows
    queries: Mapping[tuple[str, str], StateRows]
    query_rows: Mapping[tuple[str, str], Mapping[str, int]]

    def of_queries(self, queries: TokenizedQueries) -> StateRows:
        """The states of these queries, which may be a part of their split."""
        key = (queries.task, queries.split)
        rows = [self.query_rows[key][query_id] for query_id in queries.query_ids]
        return self.queries[key].take(np.array(rows, np.int64), length=queries.ids.shape[1])
