"""Passage and query, the text records of all stages; looking them up by id or content.

An index takes a few bytes per passage, on disk and in memory.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
from etils import epath

from taser_jax.storage.artifacts import is_remote
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import Natural, read_typed

# Categories of white space, line ends, control characters and lone surrogates.
_SPLITTING = ("Cc", "Cs", "Zs", "Zl", "Zp")
# For `regex`, within brackets: scripts without spaces between words.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_IDS, _OFFSETS, _ALIASES = "ids.txt", "id_offsets.npy", "aliases.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable unit of text.

    Attributes:
        id: the source's own identifier, unique in its collection.
        text: the body; answers are matched against it, never against the title.
        title: may be empty.
        page_id: the page (article) that the passage was cut from; empty if the source has none.
    """

    id: str
    text: str
    title: str = ""
    page_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One question with its known answers.

    Attributes:
        id: unique in its task.
        text: the question itself, before any prompt or normalisation.
        task: the task (data set) it belongs to.
        positives: rows of the passage store, gold first.
        relevance: grade of each positive, parallel to `positives`; empty means all 1.
        hard_negatives: rows of the passage store that came with the data, for example BM25's.
        answers: strings, or for `regex` tasks patterns, that a passage must contain.
    """

    id: str
    text: str
    task: str
    positives: tuple[int, ...] = ()
    relevance: tuple[int, ...] = ()
    hard_negatives: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()


def check_id(id: str, *, where: str) -> str:
    """The id, if files that are split at white space can hold it.

    Example:
        >>> check_id("doc-1", where="corpus.jsonl:3, field '_id'")
        'doc-1'

    Args:
        id: of a passage or a query.
        where: file:line and field.

    Raises:
        DataError: it is empty, or has white space, a line separator or a control character.
    """
    expected = (
        "an id without white space, line ends and control characters: run files and qrels are "
        "split at them"
    )
    if not id:
        raise DataError("the id is empty", where=where, fix="write an id")
    # Most ids: one pass in C.
    if id.isprintable() and " " not in id:
        return id
    for character in id:
        if unicodedata.category(character) in _SPLITTING or character.isspace():
            name = unicodedata.name(character, "control character").lower()
            raise DataError(
                f"the id {id!r} has a {name} (U+{ord(character):04X})",
                where=where,
                expected=expected,
                fix="write another character in its place, in passages, queries and judgements "
                "alike",
            )
    return id


class DevelopmentSets(enum.Enum):
    """How several tasks' development sets give one figure.

    APART: the mean of the tasks' figures; every task counts the same (TACO-DR).
    COMBINED: one set of all their queries; every query counts the same, and golds are ranked among
        the passages of all (TASER, appendix D: "we combine NQ and TriviaQA development sets").
    """

    APART = "apart"
    COMBINED = "combined"


def text_hash(text: str) -> int:
    """64 bits of BLAKE2b, equal on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hash_share(text: str) -> float:
    """A text's hash as a number from 0 to below 1, for draws that are equal on every machine."""
    return text_hash(text) / float(1 << 64)


def normalized_content(title: str, text: str) -> str:
    """Title and text in the form compared between files: NFC, runs of white space as one space.

    Example:
        >>> normalized_content("A", "b  c") == normalized_content("A ", "b c")
        True
    """
    title, text = (" ".join(unicodedata.normalize("NFC", part).split()) for part in (title, text))
    return f"{title}\n{text}"


class HashIndex:
    """Rows by hash: a sorted array of hashes and the array of their rows.

    Args:
        hashes: sorted, uint64 [passages].
        rows: int32 [passages], parallel to `hashes`.
    """

    def __init__(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        self._hashes, self._rows = hashes, rows

    def candidates(self, key: int) -> list[int]:
        """Rows with this hash, ascending; almost always none or one."""
        start = np.searchsorted(self._hashes, np.uint64(key), side="left")
        stop = np.searchsorted(self._hashes, np.uint64(key), side="right")
        return sorted(self._rows[start:stop].tolist())

    @classmethod
    def from_hashes(cls, hashes: np.ndarray) -> HashIndex:
        """Index of rows 0, 1, ... by their hashes, given in row order."""
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], order.astype(np.int32))

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Pairs of rows with equal hashes."""
        for place in np.flatnonzero(self._hashes[1:] == self._hashes[:-1]).tolist():
            yield int(self._rows[place]), int(self._rows[place + 1])

    def save(self, directory: epath.Path, name: str) -> None:
        """Writes <name>_hashes.npy and <name>_rows.npy."""
        save_array(directory / f"{name}_hashes.npy", self._hashes)
        save_array(directory / f"{name}_rows.npy", self._rows)

    @classmethod
    def open(cls, directory: epath.Path, name: str) -> HashIndex:
        """Opens what `save` wrote, memory-mapped if the file is local."""
        return cls(
            load_array(directory / f"{name}_hashes.npy"), load_array(directory / f"{name}_rows.npy")
        )


class Ids(Sequence[str]):
    """All ids of a collection in row order, stored as one block of UTF-8.

    Args:
        data: the bytes of ids.txt (one id per line), uint8.
        offsets: start of each id, int64 [passages + 1].
    """

    def __init__(self, data: np.ndarray, offsets: np.ndarray) -> None:
        self._data, self._offsets = data, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        at = int(row) + len(self) if row < 0 else int(row)
        if not 0 <= at < len(self):
            raise IndexError(f"row {row} of {len(self)} ids")
        return self._data[self._offsets[at] : self._offsets[at + 1] - 1].tobytes().decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 1 << 16):
            stop = min(start + (1 << 16), len(self))
            block = self._data[self._offsets[start] : self._offsets[stop]].tobytes()
            yield from block.decode("utf-8").split("\n")[:-1]

    @staticmethod
    def save(directory: epath.Path, data: bytearray, ends: Sequence[int]) -> None:
        """Writes ids.txt, one id per line, and the offset of each line's end."""
        (directory / _IDS).write_bytes(data)
        save_array(directory / _OFFSETS, np.concatenate(([0], ends)).astype(np.int64))

    @classmethod
    def open(cls, directory: epath.Path) -> Ids:
        """Opens ids.txt, memory-mapped if it is local."""
        path = directory / _IDS
        if not is_remote(path):
            data: np.ndarray = np.memmap(path, np.uint8, mode="r")
        else:
            data = np.frombuffer(path.read_bytes(), np.uint8)
        return cls(data, load_array(directory / _OFFSETS))


def save_aliases(directory: epath.Path, aliases: Mapping[str, int]) -> None:
    """Writes aliases of passages: alias -> row."""
    (directory / _ALIASES).write_text(json.dumps(dict(aliases), ensure_ascii=False, indent=0))


def load_aliases(directory: epath.Path) -> dict[str, int]:
    """Reads what `save_aliases` wrote."""
    again = "run the `taser prepare` command that made it again"
    return read_typed(directory / _ALIASES, dict[str, Natural], fix=again)


def save_array(path: epath.Path, array: np.ndarray) -> None:
    """np.save to a local or gs:// path."""
    with path.open("wb") as file:
        np.save(file, array)


def load_array(path: epath.Path) -> np.ndarray:
    """np.load, memory-mapped if the file is local."""
    if not is_remote(path):
        return np.load(path, mmap_mode="r")
    with path.open("rb") as file:
        return np.load(file)
