"""Token ids and lists of rows of many texts, as NumPy arrays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float32, Int

from taser_jax.models.batch import Tokens
from taser_jax.storage.artifacts import fingerprint
from taser_jax.storage.errors import DataError


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
class TeacherScores:
    """A teacher's scores of queries' passages.

    Attributes:
        positives: parallel to the values of `positives`.
        negatives: parallel to the values of `hard_negatives`.
    """

    positives: Float32[np.ndarray, " positives"]
    negatives: Float32[np.ndarray, " negatives"]


@dataclasses.dataclass(frozen=True)
class TokenArray:
    """Token ids of many texts, padded at the end to one length.

    Attributes:
        ids: shape [texts, length], uint16 or int32; may be memory-mapped.
        lengths: real tokens of each text. Shape [texts], int32.
    """

    ids: Int[np.ndarray, "texts length"]
    lengths: Int[np.ndarray, " texts"]

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
class TokenizedQueries:
    """One split of one task: token ids, positives and hard negatives of each query.

    Attributes:
        ids: shape [queries, query_length].
        lengths: real tokens of each query. Shape [queries].
        positives: rows of the passage store, gold first.
        hard_negatives: rows of the passage store.
        query_ids: the source's own ids.
        task: the task's name.
        split: "train", "validation" or "test".
        fingerprint: fingerprint of all of the above.
        collection_fingerprint: that of the rows' collection; empty if unknown.
        teacher: a teacher's scores of positives and hard negatives; None without.
    """

    ids: Int[np.ndarray, "queries length"]
    lengths: Int[np.ndarray, " queries"]
    positives: Ragged
    hard_negatives: Ragged
    query_ids: list[str]
    task: str
    split: str
    fingerprint: str
    collection_fingerprint: str = ""
    teacher: TeacherScores | None = None

    @classmethod
    def from_lists(
        cls,
        task: str,
        split: str,
        *,
        query_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        positives: Iterable[Sequence[int]],
        hard_negatives: Iterable[Sequence[int]] | None = None,
        length: int,
        vocabulary_size: int,
    ) -> TokenizedQueries:
        """Packs lists, one of each kind per query.

        Raises:
            DataError: numbers of lists differ, or a query's tokens do not fit.
        """
        where = f"task {task!r}, split {split!r}"
        array = pack_tokens(tokens, length, vocabulary_size, where, query_ids)
        gold = Ragged.from_lists(positives)
        hard = Ragged.from_lists([[]] * len(array) if hard_negatives is None else hard_negatives)
        for name, count in (
            ("query ids", len(query_ids)),
            ("lists of positives", len(gold)),
            ("lists of hard negatives", len(hard)),
        ):
            if count != len(array):
                raise DataError(f"{count} {name} for {len(array)} token lists", where=where)
        arrays = [array.ids, array.lengths]
        arrays += [gold.offsets, gold.values, hard.offsets, hard.values]
        content = fingerprint([task, split, json.dumps(list(query_ids)), *arrays])
        return cls(
            array.ids,
            array.lengths,
            gold,
            hard,
            list(query_ids),
            task,
            split,
            content,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, rows: Sequence[int] | np.ndarray) -> Tokens:
        """Ids and mask of the given queries. Shape [rows, query_length]."""
        return TokenArray(self.ids, self.lengths).tokens(rows)

    def with_hard_negatives(
        self, hard_negatives: Ragged, teacher: TeacherScores | None = None
    ) -> TokenizedQueries:
        """The same queries with other hard negatives, such as mined ones, and a new fingerprint.

        Args:
            hard_negatives: a list for each query.
            teacher: a teacher's scores of the positives and of these hard negatives.

        Raises:
            DataError: lists or scores that do not match.
        """
        where = f"task {self.task!r}, split {self.split!r}"
        if len(hard_negatives) != len(self):
            raise DataError(
                f"{len(hard_negatives)} lists of hard negatives for {len(self)} queries",
                where=where,
            )
        parts: list[str | np.ndarray] = [
            self.fingerprint,
            hard_negatives.offsets,
            hard_negatives.values,
        ]
        if teacher is not None:
            found = len(teacher.positives), len(teacher.negatives)
            wanted = len(self.positives.values), len(hard_negatives.values)
            if found != wanted:
                raise DataError(
                    f"teacher scores of {found[0]} positives and {found[1]} hard negatives",
                    where=where,
                    expected=f"of {wanted[0]} and {wanted[1]}",
                )
            parts += [teacher.positives, teacher.negatives]
        return dataclasses.replace(
            self,
            hard_negatives=hard_negatives,
            teacher=teacher,
            fingerprint=fingerprint(parts),
        )


def id_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest stored dtype for all ids of a vocabulary."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")


def pack_tokens(
    token_lists: Sequence[Sequence[int]],
    length: int,
    vocabulary_size: int,
    where: str,
    names: Sequence[str],
) -> TokenArray:
    """Pads lists of ids to [lists, length]; `names` identifies lists in errors."""
    lengths = np.fromiter((len(ids) for ids in token_lists), np.int32, len(token_lists))
    bad = np.flatnonzero((lengths < 1) | (lengths > length))
    if len(bad):
        raise DataError(
            f"{lengths[bad[0]]} tokens",
            where=f"{where}, {_name(names, bad[0])}",
            expected=f"1 to {length} tokens, special tokens included",
        )
    flat = np.fromiter((i for ids in token_lists for i in ids), np.int64, int(lengths.sum()))
    bad = np.flatnonzero((flat < 0) | (flat >= vocabulary_size))
    if len(bad):
        text = int(np.searchsorted(np.cumsum(lengths), bad[0], side="right"))
        raise DataError(
            f"token id {flat[bad[0]]}",
            where=f"{where}, {_name(names, text)}",
            expected=f"an id of the vocabulary, 0 to {vocabulary_size - 1}",
        )
    ids = np.zeros((len(token_lists), length), id_dtype(vocabulary_size))
    ids[np.arange(length)[None, :] < lengths[:, None]] = flat
    return TokenArray(ids, lengths)


def _name(names: Sequence[str], index: int) -> str:
    return str(names[index]) if index < len(names) else f"text {index}"
