"""States of frozen blocks on disk, which replace a store's tokens; read with NumPy alone.

    passages/states.npy                 [tokens of all passages, width]
    queries/<task>.<split>/states.npy   [tokens of all queries, width]
    plan.json beside each               their sources

Numbers are float32, or bfloat16 stored as uint16. Texts follow one another without padding; the
token store knows their lengths.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int

from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.models.batch import States
from taser_jax.storage.artifacts import FilePath, split_path
from taser_jax.storage.checksums import check_file
from taser_jax.storage.errors import DataError

STATES = "states.npy"


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
        try:
            states = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"missing or damaged ({error})", where=str(path), fix=fix) from error
        ends = np.cumsum(lengths, dtype=np.int64)
        if states.ndim != 2 or len(states) != ends[-1]:
            expected = f"those of {ends[-1]} tokens"
            raise DataError(f"shape {states.shape}", where=str(path), expected=expected, fix=fix)
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


def passages_directory(directory: FilePath) -> pathlib.Path:
    """The directory of the passages' states."""
    return pathlib.Path(directory) / "passages"


def queries_directory(directory: FilePath, task: str, split: str) -> pathlib.Path:
    """The directory of the states of one split's queries."""
    return split_path(pathlib.Path(directory) / "queries", task, split)
