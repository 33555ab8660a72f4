"""Embeddings to the files of vector stores and back, through the command line."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from small_world import gin, refused, succeed
from store_world import DIM, PASSAGES, TABLE, StoreWorld
from test_export_command import make_model

from taser_jax.assembly.model_directory import load_model
from taser_jax.retrieval import embedding_files


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> StoreWorld:
    return StoreWorld(tmp_path_factory.mktemp("stores")).make()


@pytest.fixture(scope="module")
def exported(world: StoreWorld) -> pathlib.Path:
    succeed(*world.export(world.root / "out", "embeddings", "vertex"))
    return world.root / "out"


def test_parquet_has_a_file_per_shard_and_the_collections_texts(exported, world):
    folder = exported / "embeddings" / "passages"
    names = sorted(path.name for path in folder.glob("*.parquet"))
    assert names == [f"{shard:05d}-of-00003.parquet" for shard in range(3)]
    table = pyarrow.concat_tables(pyarrow.parquet.read_table(folder / name) for name in names)
    assert table.schema.names == ["id", "embedding", "title", "text", "task"]
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), DIM)
    passages = list(world.store)
    for name in ("id", "title", "text"):
        assert table[name].to_pylist() == [getattr(passage, name) for passage in passages]
    np.testing.assert_array_equal(table["embedding"].to_pylist(), TABLE[:PASSAGES])


def test_queries_have_their_texts_and_task(exported):
    table = pyarrow.parquet.read_table(exported / "embeddings" / "queries" / "nq.test.parquet")
    first = table.to_pylist()[0]
    assert (first["id"], first["text"], first["task"]) == ("q0", "question q0", "nq")
    np.testing.assert_array_equal(table["embedding"].to_pylist(), TABLE[PASSAGES:])


def test_metadata_says_what_a_reader_must_know(exported, world):
    facts = json.loads((exported / "embeddings" / "metadata.json").read_text())
    assert facts["fingerprints"] == {"model": "m1", "collection": world.store.fingerprint}
    expected = {"num_rows": PASSAGES, "dim": DIM, "dtype": "float32", "metric": "dot"}
    assert expected.items() <= facts.items()
    assert (facts["normalization"], facts["query_encoders"], facts["prompts"]) == (None, {}, None)


def test_vertex_has_json_lines_and_nothing_else_in_the_folder(exported):
    folder = exported / "vertex" / "passages"
    assert {path.suffix for path in folder.iterdir()} == {".json"}
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    assert [record["id"] for record in records] == [f"p{row}" for row in range(PASSAGES)]
    found = np.array([record["embedding"] for record in records], np.float32)
    np.testing.assert_array_equal(found, TABLE[:PASSAGES])


def test_faiss_finds_what_sorting_finds(tmp_path, world, capsys):
    faiss = pytest.importorskip("faiss", reason="FAISS is an optional extra")
    succeed(*world.export(tmp_path, "faiss"))
    index = faiss.read_index(str(tmp_path / "faiss" / "passages" / "index.faiss"))
    _, rows = index.search(TABLE[PASSAGES:], 5)
    expected = np.argsort(-(TABLE[PASSAGES:] @ TABLE[:PASSAGES].T), axis=1)[:, :5]
    np.testing.assert_array_equal(rows, expected)
    ids = (tmp_path / "faiss" / "passages" / "ids.txt").read_text().splitlines()
    assert ids == list(world.store.ids)


def test_without_faiss_its_extra_is_named(tmp_path, world, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    assert "[faiss]'" in refused(capsys, *world.export(tmp_path, "faiss"))


def test_a_killed_export_goes_on_at_the_next_shard(tmp_path, world, monkeypatch):
    write, calls = embedding_files._write_parquet, []

    def dies(path, blocks):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(path.name)
        write(path, blocks)

    monkeypatch.setattr(embedding_files, "_write_parquet", dies)
    from taser_jax.cli import main as cli

    assert cli.run(world.export(tmp_path, "embeddings")) == 130
    first = tmp_path / "embeddings" / "passages" / "00000-of-00003.parquet"
    before = first.stat().st_mtime_ns
    assert not (tmp_path / "embeddings" / "metadata.json").exists()
    monkeypatch.setattr(embedding_files, "_write_parquet", write)
    succeed(*world.export(tmp_path, "embeddings"))
    assert first.stat().st_mtime_ns == before
    assert (tmp_path / "embeddings" / "metadata.json").exists()


def test_the_model_must_be_the_embeddings_own_and_its_exports_encode_queries(
    tmp_path, capsys, world
):
    make_model(tmp_path / "model")
    fingerprint = load_model(tmp_path / "model").fingerprint
    (tmp_path / "own").mkdir()
    own = StoreWorld(tmp_path / "own", model=fingerprint).make()
    out = gin(MODEL_DIR=tmp_path / "model", EXPORT_DIR=tmp_path / "out")
    succeed("export", "sentence_transformers", *out)
    succeed("export", "embeddings", *out, *gin(EMBEDDINGS_DIR=own.embeddings), *own.where)
    facts = json.loads((tmp_path / "out" / "embeddings" / "metadata.json").read_text())
    assert facts["query_encoders"] == {"sentence_transformers": "../sentence_transformers"}
    assert facts["prompts"] == {"query": "", "document": ""}
    other = gin(MODEL_DIR=tmp_path / "model", EXPORT_DIR=tmp_path / "other")
    message = refused(
        capsys, "export", "embeddings", *other, *gin(EMBEDDINGS_DIR=world.embeddings), *world.where
    )
    assert "model m1" in message
    assert fingerprint in message


def test_embeddings_of_another_collection_are_refused(tmp_path, capsys, world, capitals):
    where = gin(MODEL_DIR=None, EXPORT_DIR=tmp_path, EMBEDDINGS_DIR=world.embeddings)
    message = refused(capsys, "export", "embeddings", *where, *capitals.where)
    assert world.store.fingerprint in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        (["embeddings"], "not all given"),
        (["embeddings", "onnx"], "formats of a model and of embeddings"),
        (["onnx"], "no model"),
        (["milvus"], "'milvus' is no format"),
    ],
)
def test_what_is_missing_is_named(tmp_path, capsys, formats, words):
    where = gin(MODEL_DIR=None, EXPORT_DIR=tmp_path)
    assert words in refused(capsys, "export", *formats, *where)
