"""What a retriever is made of, and `retriever.json`, which says where its parts lie."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from taser_jax.data.collections.store import PassageStore
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.token_store.store import QuerySettings, Titles
from taser_jax.models.batch import Tokens
from taser_jax.retrieval.bm25 import Bm25Index
from taser_jax.retrieval.exact import Searcher
from taser_jax.retrieval.fusion import HybridConfig, fuse
from taser_jax.retrieval.runs import NO_ROW, Run
from taser_jax.storage.artifacts import FilePath, check_version, read_json, write_json
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

RETRIEVER_FILE = "retriever.json"
_VERSION = 1
# For models that were trained before lengths were recorded.
QUERY_LENGTH, PASSAGE_LENGTH = 32, 256
_FIX = "run the command that wrote it again"
_FOLDERS = ("model_dir", "index_dir", "data_dir", "bm25_dir")
_REQUIRED = ("model_dir", "index_dir", "data_dir", "collection")


@dataclasses.dataclass(frozen=True)
class RetrieverParts:
    """The directories that make a retriever.

    Attributes:
        model_dir: the trained model.
        index_dir: an index of its embeddings.
        data_dir: folder of collections.
        collection: the collection.
        bm25_dir: BM25's index of it, where a hybrid was recommended.
        alpha: weight of BM25's scores there.
    """

    model_dir: str
    index_dir: str
    data_dir: str
    collection: str
    bm25_dir: str | None = None
    alpha: float | None = None


def write_parts(directory: FilePath, parts: RetrieverParts) -> None:
    """Writes the `retriever.json` that `Retriever.load` reads; its folders are relative to it."""
    values = {name: value for name, value in dataclasses.asdict(parts).items() if value is not None}
    relative = {
        name: os.path.relpath(value, directory) if name in _FOLDERS else value
        for name, value in values.items()
    }
    write_json(pathlib.Path(directory) / RETRIEVER_FILE, {"format_version": _VERSION, **relative})


def read_parts(directory: FilePath) -> RetrieverParts | None:
    """The parts that a directory's `retriever.json` names; None where it has none.

    Raises:
        DataError: it is damaged, or of another format version.
    """
    path = pathlib.Path(directory) / RETRIEVER_FILE
    if not path.is_file():
        return None
    value = read_json(path, fix=_FIX)
    check_version(value, _VERSION, where=path, fix=_FIX)
    absent = [name for name in _REQUIRED if not isinstance(value.get(name), str)]
    if absent:
        raise DataError(f"no {absent[0]}", where=str(path), expected=", ".join(_REQUIRED), fix=_FIX)
    folders = {name: str(path.parent / value[name]) for name in _FOLDERS if name in value}
    alpha = value.get("alpha")
    if ("bm25_dir" in folders) != isinstance(alpha, int | float):
        raise DataError("one of bm25_dir and alpha without the other", where=str(path), fix=_FIX)
    return RetrieverParts(**folders, collection=value["collection"], alpha=alpha)


@dataclasses.dataclass(frozen=True)
class Hit:
    """One result of a search.

    Attributes:
        passage: what was found.
        score: inner product of the query's and the passage's embeddings; of a hybrid search, the
            sum by which it ranks.
        dense: of a hybrid search, the inner product; None where the dense list lacks the passage.
        sparse: of a hybrid search, BM25's score; None where BM25's list lacks the passage.
    """

    passage: Passage
    score: float
    dense: float | None = None
    sparse: float | None = None


@dataclasses.dataclass(frozen=True)
class Texts:
    """How texts become tokens for a model.

    Attributes:
        vocabulary: splits them.
        query_length: maximum tokens per query.
        passage_length: maximum tokens per passage.
        queries: prompt and normalisation of queries.
        titles: whether a passage's title precedes its text.
        passage_prompt: ids before every passage.
    """

    vocabulary: Vocabulary
    query_length: int = QUERY_LENGTH
    passage_length: int = PASSAGE_LENGTH
    queries: QuerySettings = QuerySettings()
    titles: Titles = Titles.INCLUDE
    passage_prompt: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sparse:
    """BM25 beside the dense scores.

    Attributes:
        index: of the same passages.
        alpha: weight of its scores in the sum.
    """

    index: Bm25Index
    alpha: float


@dataclasses.dataclass(frozen=True)
class Collection:
    """Passages on disk, with their index.

    Attributes:
        store: the passages, by row.
        searcher: an index of their embeddings.
        sparse: BM25's index of them; None without one.
    """

    store: PassageStore
    searcher: Searcher
    sparse: Sparse | None = None

    def hybrid_search(
        self, questions: Sequence[str], embeddings: Float[np.ndarray, "queries dim"], *, k: int
    ) -> list[list[Hit]]:
        """The best sums of dense scores and α times BM25's, of both lists' first hundred or more.

        Args:
            questions: as BM25 takes them.
            embeddings: of the same questions.
            k: passages per question.
        """
        assert self.sparse is not None
        config = HybridConfig(depth=max(k, HybridConfig.depth))
        numbers = [str(number) for number in range(len(questions))]
        dense = Run.of(numbers, self.searcher.search(embeddings, config.depth))
        sparse = Run.of(numbers, self.sparse.index.search(questions, config.depth))
        fused = fuse(dense, sparse, alpha=self.sparse.alpha, k=k, config=config)
        hits = []
        for dense_scores, sparse_scores, scores in zip(
            *map(_scores_by_row, (dense, sparse, fused)), strict=True
        ):
            passages = self.store.get_many(list(scores))
            hits.append(
                [
                    Hit(passage, score, dense_scores.get(row), sparse_scores.get(row))
                    for passage, (row, score) in zip(passages, scores.items(), strict=True)
                ]
            )
        return hits


class AddedPassages:
    """Passages in memory; every task's view of a retriever has the same ones."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.ids: set[str] = set()
        self.embeddings = np.zeros((0, 0), np.float32)
        self.searcher: Searcher | None = None


def open_sparse(parts: RetrieverParts | None, store: PassageStore) -> Sparse | None:
    """BM25's index, where retriever.json names one."""
    if parts is None or parts.bm25_dir is None or parts.alpha is None:
        return None
    prints = {"collection": store.fingerprint}
    return Sparse(Bm25Index.open(parts.bm25_dir, fingerprints=prints), parts.alpha)


@dataclasses.dataclass(frozen=True)
class TokensInMemory:
    """Tokens in memory, as the encoder reads them from a token store."""

    padded: Tokens

    @property
    def lengths(self) -> Int[np.ndarray, " texts"]:
        """Real tokens of each text."""
        return np.asarray(self.padded.mask).sum(axis=1)

    def tokens(self, rows: np.ndarray) -> Tokens:
        """Tokens of the given rows."""
        return Tokens(ids=self.padded.ids[rows], mask=self.padded.mask[rows])


@dataclasses.dataclass(frozen=True)
class MatrixRows:
    """Embeddings in memory, as an index reads them from disk."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dimensions)."""
        return self.array.shape[0], self.array.shape[1]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop."""
        return self.array[start:stop]


def _scores_by_row(run: Run) -> list[dict[int, float]]:
    """Row -> score, of each query."""
    return [
        {int(row): float(score) for row, score in zip(rows, scores, strict=True) if row != NO_ROW}
        for rows, scores in zip(run.rows, run.scores, strict=True)
    ]
