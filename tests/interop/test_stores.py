"""The scripts of examples/stores, with those engines that are installed."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from small_world import succeed
from store_world import PASSAGES, TABLE, StoreWorld

SCRIPTS = pathlib.Path(__file__).parents[2] / "examples" / "stores"
# Script -> the package of its engine. pgvector needs a server, sqlite-vec embeddings of length 1.
ENGINES = {
    "chroma_store": "chromadb",
    "lancedb_store": "lancedb",
    "milvus_store": "milvus_lite",
    "qdrant_store": "qdrant_edge",
}


@pytest.fixture
def exported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    succeed(*StoreWorld(tmp_path).make().export(tmp_path / "out", "embeddings"))
    return __import__("exported").Exported(tmp_path / "out")


def test_the_scripts_read_what_is_exported(exported):
    block = next(iter(exported))
    np.testing.assert_array_equal(block.embeddings, TABLE[: len(block.ids)])
    assert block.texts[0] == "passage 0, «quoted»"
    assert exported.texts_of(["q3", "q1"], "nq.test") == ["question q3", "question q1"]


def test_comparing_counts_the_queries_that_differ(exported, tmp_path, monkeypatch, capsys):
    lines = [f"q{query} Q0 p{row} {row + 1} {-row} x" for query in range(2) for row in range(20)]
    (tmp_path / "nq.test.trec").write_text("\n".join(lines))
    monkeypatch.setattr(type(exported), "encode", lambda self, texts: np.arange(len(texts)))

    def search(embedding, k):
        return [f"p{row}" for row in range(k - 1, -1, -1)] if embedding else ["p39"] * k

    __import__("exported").compare(exported, search, tmp_path / "nq.test.trec")
    assert "1 of 2 queries, 0 in its order" in capsys.readouterr().out


@pytest.mark.parametrize("script", ENGINES)
def test_a_store_finds_what_sorting_finds(exported, tmp_path, script):
    pytest.importorskip(
        ENGINES[script], reason="examples/stores: engines are not of the test extra"
    )
    (tmp_path / "place").mkdir()
    search = __import__(script).load(exported, tmp_path / "place")
    expected = np.argsort(-(TABLE[PASSAGES:] @ TABLE[:PASSAGES].T), axis=1)[:, :20]
    for query, rows in zip(TABLE[PASSAGES:], expected, strict=True):
        assert search(query, 20) == [f"p{row}" for row in rows]
