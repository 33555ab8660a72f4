"""Embeddings to the files of vector stores and back, through the command line."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from disks import killed_at_call
from small_world import gin, refused, succeed
from store_world import DIM, PASSAGES, QUERIES, TABLE, StoreWorld
from test_export_command import make_model
from written_files import run_of

from taser_jax.assembly.model_directory import load_model
from taser_jax.cli import main as cli
from taser_jax.data.collections.store import write_collection
from taser_jax.retrieval import embedding_files
from taser_jax.retrieval.embeddings import Embeddings, write_embeddings
from taser_jax.storage.records import Passage


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> StoreWorld:
    return StoreWorld(tmp_path_factory.mktemp("stores")).make()


@pytest.fixture(scope="module")
def exported(world: StoreWorld) -> pathlib.Path:
    succeed(*world.export(world.root / "out", "embeddings", "vertex"))
    return world.root / "out"


def test_parquet_has_a_file_per_shard_the_texts_and_what_a_reader_must_know(exported, world):
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
    table = pyarrow.parquet.read_table(exported / "embeddings" / "queries" / "nq.test.parquet")
    first = table.to_pylist()[0]
    assert (first["id"], first["text"], first["task"]) == ("q0", "question q0", "nq")
    np.testing.assert_array_equal(table["embedding"].to_pylist(), TABLE[PASSAGES:])
    facts = json.loads((exported / "embeddings" / "metadata.json").read_text())
    assert facts["fingerprints"] == {"model": "m1", "collection": world.store.fingerprint}
    expected = {"num_rows": PASSAGES, "dim": DIM, "dtype": "float32", "metric": "dot"}
    assert expected.items() <= facts.items()
    assert (facts["normalization"], facts["query_encoders"], facts["prompts"]) == (None, {}, None)


def test_vertex_has_json_lines_and_nothing_else_in_the_folder(exported):
    succeed("verify", str(exported / "vertex"))
    folder = exported / "vertex" / "passages"
    assert {path.suffix for path in folder.iterdir()} == {".json"}
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    assert [record["id"] for record in records] == [f"p{row}" for row in range(PASSAGES)]
    numbers = np.array([record["embedding"] for record in records], np.float32)
    np.testing.assert_array_equal(numbers, TABLE[:PASSAGES])


def test_faiss_finds_what_sorting_finds(tmp_path, world, capsys):
    faiss = pytest.importorskip("faiss", reason="FAISS is an optional extra")
    succeed(*world.export(tmp_path, "faiss"))
    index = faiss.read_index(str(tmp_path / "faiss" / "passages" / "index.faiss"))
    _, rows = index.search(TABLE[PASSAGES:], 5)
    expected = np.argsort(-(TABLE[PASSAGES:] @ TABLE[:PASSAGES].T), axis=1)[:, :5]
    np.testing.assert_array_equal(rows, expected)
    ids = (tmp_path / "faiss" / "passages" / "ids.txt").read_text().splitlines()
    assert ids == list(world.store.ids)


def test_a_killed_export_goes_on_at_the_next_shard(tmp_path, world, monkeypatch):
    dies_once = killed_at_call(2, embedding_files._write_parquet)
    monkeypatch.setattr(embedding_files, "_write_parquet", dies_once)
    assert cli.run(world.export(tmp_path, "embeddings")) == 130
    first = tmp_path / "embeddings" / "passages" / "00000-of-00003.parquet"
    before = first.stat().st_mtime_ns
    assert not (tmp_path / "embeddings" / "metadata.json").exists()
    succeed(*world.export(tmp_path, "embeddings"))
    assert first.stat().st_mtime_ns == before
    assert (tmp_path / "embeddings" / "metadata.json").exists()


def test_the_model_must_be_the_embeddings_own_and_its_exports_encode_queries(
    tmp_path, capsys, world
):
    make_model(tmp_path / "model")
    fingerprint = load_model(tmp_path / "model").fingerprint
    own = StoreWorld(tmp_path / "own", model=fingerprint).make()
    out = gin(MODEL_DIR=tmp_path / "model", EXPORT_DIR=tmp_path / "out")
    succeed("export", "sentence_transformers", *out)
    succeed("export", "embeddings", *out, *gin(EMBEDDINGS_DIR=own.embeddings), *own.where)
    facts = json.loads((tmp_path / "out" / "embeddings" / "metadata.json").read_text())
    assert facts["query_encoders"] == {"sentence_transformers": "../sentence_transformers"}
    assert facts["prompts"] == {"query": "", "document": ""}
    others = world.export(tmp_path / "other", "embeddings")
    message = refused(capsys, *others, *gin(MODEL_DIR=tmp_path / "model"))
    assert "model m1" in message
    assert fingerprint in message


def test_embeddings_of_another_collection_are_refused(tmp_path, capsys, world, capitals):
    message = refused(capsys, *world.export(tmp_path, "embeddings"), *capitals.where)
    assert world.store.fingerprint in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("formats", "more", "words"),
    [
        (["embeddings"], {"EMBEDDINGS_DIR": None}, "not all given"),
        (["embeddings", "onnx"], {}, "formats of a model and of embeddings"),
        (["onnx"], {}, "no model"),
        (["milvus"], {}, "'milvus' is no format"),
        (["gguf"], {}, "sentence_transformers, saved_model, stablehlo, onnx"),
        (["vertex"], {"CODES": "int8"}, "int8 codes are for Parquet"),
        (["faiss"], {}, "[faiss]'"),
    ],
)
def test_what_is_missing_is_named(tmp_path, capsys, world, monkeypatch, formats, more, words):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert words in refused(capsys, *world.export(tmp_path, *formats), *gin(**more))


def _import(world: StoreWorld, source: pathlib.Path, output: pathlib.Path) -> list[str]:
    return ["import", "embeddings", *gin(SOURCE=source, EMBEDDINGS_DIR=output), *world.where]


def _search(world: StoreWorld, embeddings: pathlib.Path, output: pathlib.Path) -> list[str]:
    where = gin(EMBEDDINGS_DIR=embeddings, INDEX_DIR=output / "index", RUNS_DIR=output / "runs")
    return ["search", *where, *world.where, *gin(TOP_K=10)]


def test_an_imported_export_is_the_original(tmp_path, exported, world):
    succeed(*_import(world, exported / "embeddings", tmp_path / "e"))
    imported, whole = Embeddings(tmp_path / "e"), Embeddings(world.embeddings)
    np.testing.assert_array_equal(imported[:], whole[:])
    assert imported.fingerprints == whole.fingerprints
    succeed(*world.export(tmp_path / "out", "embeddings"), *gin(EMBEDDINGS_DIR=tmp_path / "e"))
    again, first = (
        pyarrow.parquet.read_table(out / "embeddings" / "queries" / "nq.test.parquet")
        for out in (tmp_path / "out", exported)
    )
    assert again.equals(first)


def _foreign(source: pathlib.Path, embeddings, ids: list[str], name="any") -> None:
    """Parquet of another model: two columns, a list of any length, rows in another order."""
    order = np.random.default_rng(0).permutation(len(embeddings))
    columns = {"id": [ids[row] for row in order], "embedding": [embeddings[row] for row in order]}
    (source / "queries").mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), source / f"{name}.parquet")


def test_embeddings_of_another_model_in_any_order_are_searched_without_it(tmp_path, world):
    doubles = TABLE[:PASSAGES].astype(np.float64)
    doubles /= np.linalg.norm(doubles, axis=1, keepdims=True)
    source = tmp_path / "f"
    _foreign(source, doubles.tolist(), [f"p{row}" for row in range(PASSAGES)])
    ids = [f"q{row}" for row in range(QUERIES)]
    _foreign(source, TABLE[PASSAGES:].tolist(), ids, "queries/nq.test")
    (source / "metadata.json").write_text('{"dtype": "float64", "made by": "another library"}')
    succeed(*_import(world, source, tmp_path / "e"))
    imported = Embeddings(tmp_path / "e")
    np.testing.assert_allclose(imported[:], doubles, atol=1e-7)
    assert imported.metadata.normalization == "l2"
    assert imported.fingerprints["collection"] == world.store.fingerprint
    succeed(*_search(world, tmp_path / "e", tmp_path))
    expected = np.argsort(-(TABLE[PASSAGES:] @ doubles.T), axis=1)
    run = run_of(tmp_path / "runs" / "nq.test.trec")
    assert list(run["q5"]) == [f"p{row}" for row in expected[5, :10]]


def test_of_equal_passages_under_two_ids_one_embedding_is_taken(tmp_path):
    passages = [Passage(f"p{row}", f"text {row}", "") for row in range(4)]
    store = write_collection(tmp_path / "data", "merged", passages, aliases={"twin": 1})
    axes = np.eye(4, DIM, dtype=np.float32)
    rows = {"p0": 0, "p1": 1, "twin": 1, "p2": 2, "p3": 3}
    _foreign(tmp_path / "f", axes[list(rows.values())].tolist(), list(rows))
    embedding_files.import_embeddings(tmp_path / "f", tmp_path / "e", store=store)
    np.testing.assert_array_equal(Embeddings(tmp_path / "e")[:], axes)


ROWS = TABLE[:PASSAGES].tolist()


@pytest.mark.parametrize(
    ("embeddings", "ids", "queries", "words"),
    [
        (ROWS[1:], {}, None, "id 'p39' is absent (1 in all)"),
        (ROWS, {3: "p4"}, None, "id 'p4' is there more than once"),
        (ROWS, {3: "x"}, None, "id 'x' is no passage of the collection"),
        ([*ROWS[:39], [1.0, 2.0]], {}, None, "embeddings of 2, 16 numbers"),
        ([*ROWS[:39], [float("nan")] * DIM], {}, None, "id 'p39' has NaN"),
        (ROWS, {}, (TABLE[:2, :8].tolist(), ["q0", "q1"]), "8 dimensions, and passages 16"),
        (ROWS, {}, (TABLE[:2].tolist(), ["q1", "x"]), "id 'x' is no query of this split"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path, capsys, world, embeddings, ids, queries, words
):
    names = [ids.get(row, f"p{row}") for row in range(len(embeddings))]
    _foreign(tmp_path / "f", embeddings, names)
    if queries is not None:
        _foreign(tmp_path / "f", *queries, "queries/nq.test")
    assert words in refused(capsys, *_import(world, tmp_path / "f", tmp_path / "e"))
    assert not (tmp_path / "e" / "metadata.json").exists()


def test_other_directories_are_refused(tmp_path, capsys, exported, world):
    (tmp_path / "empty").mkdir()
    message = refused(capsys, *_import(world, tmp_path / "empty", tmp_path / "e"))
    assert "no Parquet files here" in message
    message = refused(capsys, *_import(world, exported / "embeddings", world.embeddings))
    assert "embeddings is here already" in message


def test_codes_are_printed_with_the_recall_they_cost(tmp_path, capsys, world):
    """Recall against sorting by NumPy; the 4k best of 40 passages by bits, scored again."""
    whole = TABLE[PASSAGES:] @ TABLE[:PASSAGES].T
    bits = np.sign(TABLE[PASSAGES:]) @ np.sign(TABLE[:PASSAGES]).T
    best = np.argsort(-whole, axis=1)[:, :20]
    by_bits = np.argsort(-bits, axis=1, kind="stable")[:, :20]
    shared = [len(set(a) & set(b)) for a, b in zip(best.tolist(), by_bits.tolist(), strict=True)]
    for codes in ("int8", "binary"):
        succeed(*world.export(tmp_path / codes, "embeddings"), f"--gin.CODES={codes}")
        assert f"{codes} codes: recall@20" in capsys.readouterr().err
    facts = json.loads((tmp_path / "binary" / "embeddings" / "metadata.json").read_text())
    assert facts["recall"] == {"alone": pytest.approx(np.mean(shared) / 20), "rescored": 1.0}
    facts = json.loads((tmp_path / "int8" / "embeddings" / "metadata.json").read_text())
    assert facts["scale"] == pytest.approx(np.abs(TABLE[:PASSAGES]).max() / 127)
    assert facts["recall"]["alone"] > 0.95

    succeed(*_import(world, tmp_path / "int8" / "embeddings", tmp_path / "e"))
    decoded = Embeddings(tmp_path / "e")[:]
    np.testing.assert_allclose(decoded, TABLE[:PASSAGES], atol=0.51 * facts["scale"])
    succeed(*_import(world, tmp_path / "binary" / "embeddings", tmp_path / "b"))
    np.testing.assert_array_equal(Embeddings(tmp_path / "b")[:], np.sign(TABLE[:PASSAGES]))


@pytest.mark.parametrize(("codes", "normalization"), [("int8", "l2"), ("binary", "none")])
def test_codes_are_imported_with_the_normalization_that_they_have(
    tmp_path, world, codes, normalization
):
    table = TABLE[:PASSAGES] / np.linalg.norm(TABLE[:PASSAGES], axis=1, keepdims=True)
    whole = tmp_path / "whole"
    write_embeddings(whole, table, {"collection": world.store.fingerprint}, "l2")
    succeed(*world.export(tmp_path / "out", "embeddings"), *gin(EMBEDDINGS_DIR=whole, CODES=codes))
    succeed(*_import(world, tmp_path / "out" / "embeddings", tmp_path / "e"))
    imported = Embeddings(tmp_path / "e")
    assert np.abs(np.linalg.norm(imported[:], axis=1) - 1).max() > 1e-3
    assert imported.metadata.normalization == normalization
