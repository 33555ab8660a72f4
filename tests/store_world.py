"""Forty passages and eight queries with drawn embeddings, as `taser encode` leaves them."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from small_world import gin

from taser_jax.data.collections.store import PassageStore, write_collection, write_queries
from taser_jax.data.token_store.arrays import Ragged, TokenizedQueries
from taser_jax.models.batch import Tokens
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts
from taser_jax.storage.records import Passage, Query

PASSAGES, QUERIES, DIM = 40, 8, 16
TABLE = np.random.default_rng(7).standard_normal((PASSAGES + QUERIES, DIM)).astype(np.float32)


def _embed(tokens: Tokens) -> np.ndarray:
    """Text i is the single token i."""
    return TABLE[np.asarray(tokens.ids)[:, 0]]


@dataclasses.dataclass(frozen=True)
class StoreWorld:
    """A collection "drawn" with task "nq" and its embeddings.

    Attributes:
        root: holds data/ and embeddings/.
        model: fingerprint of the model.
    """

    root: pathlib.Path
    model: str = "m1"

    @property
    def embeddings(self) -> pathlib.Path:
        return self.root / "embeddings"

    @property
    def where(self) -> list[str]:
        return gin(DATA_DIR=self.root / "data", COLLECTION="drawn")

    @property
    def store(self) -> PassageStore:
        return PassageStore.open(self.root / "data", "drawn")

    def make(self) -> StoreWorld:
        texts = [f"passage {row}, «quoted»" for row in range(PASSAGES)]
        passages = [Passage(f"p{row}", text, f"title {row}") for row, text in enumerate(texts)]
        write_collection(self.root / "data", "drawn", passages)
        ids = [f"q{number}" for number in range(QUERIES)]
        queries = [Query(id, f"question {id}", "nq", (row,)) for row, id in enumerate(ids)]
        write_queries(self.root / "data", "drawn", "nq", "test", queries)
        fingerprints = {"model": self.model, "collection": self.store.fingerprint}
        encode_texts(
            _embed,
            self._tokens(range(PASSAGES)),
            self.embeddings,
            fingerprints=fingerprints,
            config=EncodeConfig(shard_rows=16),
        )
        tokens = self._tokens(range(PASSAGES, PASSAGES + QUERIES))
        encode_texts(_embed, tokens, self.embeddings, fingerprints=fingerprints, queries=tokens)
        return self

    def _tokens(self, numbers: range) -> TokenizedQueries:
        count = len(numbers)
        return TokenizedQueries(
            ids=np.array([[number, 0, 0, 0] for number in numbers], np.uint16),
            lengths=np.ones(count, np.int32),
            positives=Ragged.from_lists([[0]] * count),
            hard_negatives=Ragged.from_lists([[]] * count),
            query_ids=[f"q{number}" for number in range(count)],
            task="nq",
            split="test",
            fingerprint=f"tokens {numbers}",
        )

    def export(self, output_dir: pathlib.Path, *formats: str) -> list[str]:
        """Arguments of `taser export` without a model."""
        where = gin(MODEL_DIR=None, EXPORT_DIR=output_dir, EMBEDDINGS_DIR=self.embeddings)
        return ["export", *formats, *where, *self.where]
