"""The passages that a retriever searches, on disk and in memory, densely and with BM25 beside."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from taser_jax.data.collections.store import PassageStore
from taser_jax.retrieval import fusion
from taser_jax.retrieval.bm25 import Bm25Index, title_and_text
from taser_jax.retrieval.exact import ExactSearcher, Searcher
from taser_jax.retrieval.runs import NO_ROW, Run, SearchResult, merge
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage


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
class Sparse:
    """BM25 beside the dense scores.

    Attributes:
        index: of the same passages.
        alpha: weight of its scores in the sum.
        normalization: of the lists that α was chosen for; None means by their scores.
    """

    index: Bm25Index
    alpha: float
    normalization: fusion.ScoreNormalization | None = None


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


class Passages:
    """The passages that a retriever searches: those on disk, without what was removed, and more.

    Rows are those on disk, then those in memory. Every task's view of a retriever has the same.

    Attributes:
        sparse: BM25 beside those on disk; None without it.

    Args:
        collection: passages on disk; None begins with none.
    """

    def __init__(self, collection: Collection | None) -> None:
        self.collection = collection
        self._stored = 0 if collection is None else len(collection.store)
        self._removed: set[int] = set()
        self._added: dict[str, Passage] = {}
        self._embeddings = np.zeros((0, 0), np.float32)
        self._searcher: Searcher | None = None
        self._bm25: tuple[Bm25Index, np.ndarray] | None = None
        self.sparse = None if collection is None else collection.sparse
        if self.sparse is not None:
            self._bm25 = self.sparse.index, np.arange(self._stored)

    def __len__(self) -> int:
        return self._stored - len(self._removed) + len(self._added)

    def rows(self) -> list[int]:
        """Rows of all passages."""
        on_disk = [row for row in range(self._stored) if row not in self._removed]
        return on_disk + list(range(self._stored, self._stored + len(self._added)))

    def find(self, id: str) -> Passage | None:
        """The passage of an id; None if there is none."""
        row = None if id in self._added else self._row_on_disk(id)
        return self._added.get(id) if row is None else self.get([row])[0]

    def _row_on_disk(self, id: str) -> int | None:
        store = None if self.collection is None else self.collection.store
        row = None if store is None else store.find(id)
        # The id of a merged duplicate leads to another passage, which must not go in its place.
        is_own = store is not None and row is not None and store.ids[row] == id
        return row if is_own and row not in self._removed else None

    def get(self, rows: Sequence[int]) -> list[Passage]:
        """Passages of rows."""
        on_disk = [row for row in rows if row < self._stored]
        read = [] if self.collection is None else self.collection.store.get_many(on_disk)
        stored = dict(zip(on_disk, read, strict=True))
        added = list(self._added.values()) if len(on_disk) < len(rows) else []
        return [stored[row] if row < self._stored else added[row - self._stored] for row in rows]

    def add(
        self, passages: Sequence[Passage], embeddings: Float[np.ndarray, "passages dim"]
    ) -> None:
        """Adds passages with new ids."""
        self._keep(
            self._added | {passage.id: passage for passage in passages},
            np.concatenate([self._embeddings, embeddings]) if self._added else embeddings,
        )

    def remove(self, ids: set[str]) -> None:
        """Removes passages that are there."""
        stays = [id not in ids for id in self._added]
        self._removed |= {
            row
            for id in ids
            if id not in self._added and (row := self._row_on_disk(id)) is not None
        }
        self._keep(
            {id: passage for id, passage in self._added.items() if id not in ids},
            self._embeddings[stays] if self._added else self._embeddings,
        )

    def _keep(self, added: dict[str, Passage], embeddings: np.ndarray) -> None:
        self._added, self._embeddings, self._bm25 = added, embeddings, None
        self._searcher = ExactSearcher(embeddings) if added else None

    def embeddings(
        self, encode: Callable[[Sequence[Passage]], np.ndarray]
    ) -> Float[np.ndarray, "passages dim"]:
        """Embeddings of `rows()`; encoded again where an approximate index has none to read."""
        on_disk = [row for row in self.rows() if row < self._stored]
        parts = [self._embeddings] if self._added else []
        if on_disk and self.collection is not None:
            searcher = self.collection.searcher
            if isinstance(searcher, ExactSearcher):
                stored = searcher.embeddings[:][on_disk]
            else:
                stored = encode(self.get(on_disk))
            parts.insert(0, np.asarray(stored, np.float32))
        return np.concatenate(parts)

    def bm25(self) -> tuple[Bm25Index, Int[np.ndarray, " passages"]]:
        """BM25's index of all passages, and their rows; built anew when they have changed."""
        if self._bm25 is None:
            rows = self.rows()
            # What is mapped stays readable without its file.
            with tempfile.TemporaryDirectory(prefix="taser-bm25-") as folder:
                texts = map(title_and_text, self.get(rows))
                config = None if self.sparse is None else self.sparse.index.config
                self._bm25 = Bm25Index.build(texts, folder, config=config), np.array(rows)
        return self._bm25

    def search(self, embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k rows by inner product; of equal scores those on disk first.

        Raises:
            ConfigError: k below 1.
        """
        k = self._at_most(k)
        results = []
        if self.collection is not None:
            result = self.collection.searcher.search(embeddings, k + len(self._removed))
            is_gone = np.isin(result.rows, list(self._removed))
            results.append(SearchResult(np.where(is_gone, NO_ROW, result.rows), result.scores))
        if self._searcher is not None:
            result = self._searcher.search(embeddings, k)
            rows = np.where(result.rows == NO_ROW, NO_ROW, result.rows + self._stored)
            results.append(SearchResult(rows, result.scores))
        return merge(results, k)

    def _at_most(self, k: int) -> int:
        """The number of passages to return, where k may be more than there are."""
        if k < 1:
            # An index is asked for more, where passages on disk were removed.
            raise ConfigError(f"k is {k}", where="search", expected="at least 1")
        return int(min(k, len(self)))

    def hybrid_search(
        self, questions: Sequence[str], embeddings: Float[np.ndarray, "queries dim"], *, k: int
    ) -> list[list[Hit]]:
        """The best sums of dense scores and α times BM25's, of both lists' first hundred or more.

        Args:
            questions: as BM25 takes them.
            embeddings: of the same questions.
            k: passages per question.
        """
        k = self._at_most(k)
        config = fusion.HybridConfig(depth=max(k, fusion.HybridConfig.depth))
        numbers = [str(number) for number in range(len(questions))]
        dense = Run.of(numbers, self.search(embeddings, config.depth))
        index, row_of = self.bm25()
        result = index.search(questions, config.depth)
        rows = np.where(result.rows == NO_ROW, NO_ROW, row_of[result.rows])
        sparse = Run.of(numbers, SearchResult(rows.astype(np.int32), result.scores))
        if self.sparse is None:
            alpha = fusion.default_alpha(fusion.settle(config, [(dense, sparse)]))
        else:
            alpha = self.sparse.alpha
            config = dataclasses.replace(config, normalization=self.sparse.normalization)
        fused = fusion.fuse(dense, sparse, alpha=alpha, k=k, config=config)
        by_row = zip(*map(_scores_by_row, (dense, sparse, fused)), strict=True)
        return [
            [
                Hit(passage, score, dense_scores.get(row), sparse_scores.get(row))
                for passage, (row, score) in zip(
                    self.get(list(scores)), scores.items(), strict=True
                )
            ]
            for dense_scores, sparse_scores, scores in by_row
        ]

    def hits(self, result: SearchResult) -> list[list[Hit]]:
        """The passages of results."""
        return [
            [Hit(*pair) for pair in zip(self.get(list(scores)), scores.values(), strict=True)]
            for scores in _scores_by_row(result)
        ]


def _scores_by_row(run: Run | SearchResult) -> list[dict[int, float]]:
    """Row -> score, of each query."""
    return [
        {int(row): float(score) for row, score in zip(rows, scores, strict=True) if row != NO_ROW}
        for rows, scores in zip(run.rows, run.scores, strict=True)
    ]
