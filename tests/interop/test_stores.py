"""The scripts of examples/stores, with those engines that are installed."""

import pathlib
import socket
import sys

import numpy as np
import pytest
from disks import no_room_beyond
from small_world import succeed
from store_world import PASSAGES, TABLE, StoreWorld

SCRIPTS = pathlib.Path(__file__).parents[2] / "examples" / "stores"
# Script -> the package of its engine; pgserver brings PostgreSQL with pgvector.
ENGINES = {
    "chroma_store": "chromadb",
    "lancedb_store": "lancedb",
    "milvus_store": "milvus_lite",
    "pgvector_store": "pgserver",
    "qdrant_store": "qdrant_edge",
    "sqlite_vec_store": "sqlite_vec",
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


def engine(package):
    pytest.importorskip(package, reason="examples/stores: engines are not of the test extra")


def load_of(script, exported):
    """The script's `load`; sqlite-vec takes embeddings of length 1 alone."""
    engine(ENGINES[script])
    if script == "sqlite_vec_store":
        exported.facts["normalization"] = "l2"
    return __import__(script).load


@pytest.fixture
def place_of(tmp_path, request):
    """Script -> its store: a folder, or the address of a server that runs for the test."""

    def make(script):
        if script != "pgvector_store":
            (tmp_path / script).mkdir()
            return tmp_path / script
        server = __import__("pgserver").get_server(tmp_path / script)
        request.addfinalizer(server.cleanup)
        return server.get_uri()

    return make


@pytest.mark.parametrize("script", ENGINES)
def test_a_store_finds_what_sorting_finds_and_is_filled_once(exported, place_of, script):
    load, place = load_of(script, exported), place_of(script)
    search = load(exported, place)
    passages = TABLE[:PASSAGES]
    if script == "sqlite_vec_store":
        passages = passages / np.linalg.norm(passages, axis=1, keepdims=True)
    expected = np.argsort(-(TABLE[PASSAGES:] @ passages.T), axis=1)[:, :20]
    for query, rows in zip(TABLE[PASSAGES:], expected, strict=True):
        assert search(query, 20) == [f"p{row}" for row in rows]
    refusals = __import__("exported").refusals
    with pytest.raises(SystemExit, match=r"the store refused"), refusals(place):
        search(TABLE[0, :3], 20)
    with pytest.raises(SystemExit, match=r"the store refused"), refusals(place):
        load(exported, place)


@pytest.mark.parametrize("script", ["lancedb_store", "sqlite_vec_store"])
def test_a_full_disk_is_told(exported, place_of, script):
    load, place = load_of(script, exported), place_of(script)
    refusals = __import__("exported").refusals
    told = rf"(?s)^{place}: the store refused: .*has room.*fix: "
    with pytest.raises(SystemExit, match=told), refusals(place), no_room_beyond(1000):
        load(exported, place)


def test_an_absent_service_is_told(exported, monkeypatch):
    engine("psycopg")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"postgresql://127.0.0.1:{unused.getsockname()[1]}/postgres"
    arguments = ["pgvector_store.py", str(exported.directory.parent), f"--place={address}"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=rf"(?s)^{address}: .*refused: Operational.*start it"):
        __import__("exported").main(__import__("pgvector_store").load)


def test_what_a_store_says_is_the_last_word(exported, monkeypatch):
    """Whatever an engine raises, in three lines."""
    monkeypatch.setattr(sys, "argv", ["a_store.py", str(exported.directory.parent), "--place=x"])

    def load(exported, place):
        raise ValueError("expected 8 dimensions, got 16\nand more")

    with pytest.raises(SystemExit) as told:
        __import__("exported").main(load)
    first, *others = str(told.value).splitlines()
    assert first == "x: the store refused: ValueError: expected 8 dimensions, got 16"
    assert [line.split(":")[0] for line in others] == ["  expected", "  fix"]


def test_inner_products_are_not_for_sqlite_vec(exported, tmp_path):
    engine("sqlite_vec")
    with pytest.raises(SystemExit, match="embeddings of length 1"):
        __import__("sqlite_vec_store").load(exported, tmp_path)
