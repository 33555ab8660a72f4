"""Scores of given pairs, from runs and from embeddings."""

import numpy as np
import pytest

from taser_jax.commands.mine import EmbeddingScorer, RunScorer
from taser_jax.models.batch import Tokens
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts
from taser_jax.retrieval.runs import SearchResult


def result_of(rows, scores):
    return SearchResult(np.array(rows, np.int32), np.array(scores, np.float32))


def test_a_run_by_hand(caplog):
    run = result_of([[7, 4], [2, -1], [-1, -1]], [[3, 1], [-5, -np.inf], [-np.inf, -np.inf]])
    scorer = RunScorer(run, "bm25/runs")
    queries = np.array([0, 0, 0, 1, 1, 2, 0])
    rows = np.array([7, 4, 9, 2, 7, 7, 2])
    # What is not found gets the lowest score of its query; 0 where nothing was found.
    with caplog.at_level("INFO", logger="taser"):
        assert scorer(queries, rows).tolist() == [3, 1, 1, -5, -5, 0, 1]
    assert "bm25/runs: 4 of 7 pairs are not in the run" in caplog.text


def test_a_random_run_equals_a_dictionary():
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(40)[:9] for _ in range(50)])
    run = result_of(rows, rng.normal(size=rows.shape))
    known = {
        (query, int(row)): float(score)
        for query in range(50)
        for row, score in zip(run.rows[query], run.scores[query], strict=True)
    }
    queries, wanted = rng.integers(0, 50, 600), rng.integers(0, 60, 600)
    lowest = run.scores.min(axis=1)
    expected = [
        known.get((query, row), float(lowest[query]))
        for query, row in zip(queries.tolist(), wanted.tolist(), strict=True)
    ]
    assert RunScorer(run, "runs")(queries, wanted).tolist() == expected


@pytest.fixture
def embeddings(tmp_path):
    """Two directories of random embeddings in several shards."""
    table = np.random.default_rng(1).normal(size=(60, 6)).astype(np.float32)

    class Texts:
        def __init__(self, count, first):
            self.lengths, self._first = np.ones(count, np.int32), first

        def tokens(self, rows):
            ids = (rows + self._first)[:, None].astype(np.int32)
            return Tokens(ids, np.ones_like(ids, bool))

    config = EncodeConfig(shard_rows=7, length_multiple=1)
    found = []
    for name, count, first in (("queries", 20, 0), ("passages", 40, 20)):
        encode_texts(
            lambda tokens: table[tokens.ids[:, 0]],
            Texts(count, first),
            tmp_path / name,
            fingerprints={"model": "m"},
            config=config,
        )
        found.append(Embeddings.open(tmp_path / name))
    return table, found


def test_embeddings_give_inner_products(embeddings, monkeypatch):
    monkeypatch.setattr("taser_jax.commands.mine._PAIRS_AT_ONCE", 16)
    table, (queries, passages) = embeddings
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, 20, 50), rng.integers(0, 40, 50)
    scores = EmbeddingScorer(queries, passages)(first, second)
    exact = table.astype(np.float64)
    expected = [exact[i] @ exact[20 + j] for i, j in zip(first, second, strict=True)]
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
