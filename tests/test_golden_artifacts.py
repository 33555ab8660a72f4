"""Artefacts of an earlier version, tests/golden/artifacts/, are read, continued and used."""

import csv
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from small_world import gin, refused, succeed
from tiny_command import metrics_by_step
from written_files import run_of

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.token_store.negatives import read_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.runs import read_trec_run
from taser_jax.retriever import Retriever

ARTIFACTS = pathlib.Path(__file__).parent / "golden" / "artifacts"
COLLECTION = gin(DATA_DIR="data", COLLECTION="places")
SIZES = {"train": 8, "validation": 8, "test": 4}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A copy of the artefacts, and the working directory, since their paths are relative to it."""
    copy = shutil.copytree(ARTIFACTS, tmp_path / "artifacts")
    monkeypatch.chdir(copy)
    return copy


def _rows(path: str) -> list[list[str]]:
    """A source file's columns."""
    with open(path, newline="") as file:
        return list(csv.reader(file, delimiter="\t"))


def _assert_same_run(path: str, golden: str) -> None:
    run, expected = run_of(path), run_of(golden)
    assert run.keys() == expected.keys()
    for query, scores in expected.items():
        assert list(run[query]) == list(scores)
        np.testing.assert_allclose(list(run[query].values()), list(scores.values()), atol=1e-6)


def test_verify_finds_nothing_damaged_and_names_what_had_no_record(folder, capsys):
    message = refused(capsys, "verify", *gin(DIRECTORY=folder))
    problems = [line.split(": ") for line in message.splitlines() if line.startswith("    ")]
    assert {problem for _, problem in problems} == {"no checksums.txt has a line of it"}
    assert [file.strip().removeprefix(f"{folder}/") for file, _ in problems] == [
        "model/settings.jsonl",
        "model/vocabulary/vocab.txt",
        "negatives/city.train.sample.tsv",
        "vocabulary/vocab.txt",
    ]


def test_no_file_has_an_absolute_path():
    """Artefacts move: they hold no absolute path."""
    for path in filter(pathlib.Path.is_file, ARTIFACTS.rglob("*")):
        assert not re.search(rb"/(home|root|tmp|work|Users)/", path.read_bytes()), path


def test_the_collection_has_its_texts():
    store = PassageStore.open("data", "places")
    stored = [[passage.id, passage.text, passage.title] for passage in store]
    assert stored == _rows("sources/passages.tsv")
    for split, size in SIZES.items():
        queries = list(QuerySet.open("data", "places", "city", split))
        assert [[query.id, query.text] for query in queries] == _rows(f"sources/city.{split}.tsv")
        gold = [store.ids[query.positives[0]] for query in queries]
        assert [query.id for query in queries] == [f"q-{id}" for id in gold]
        assert len(queries) == size


def test_the_token_store_has_its_texts():
    store = TokenStore.open("tokens")
    metadata = json.loads(pathlib.Path("tokens/metadata.json").read_text())
    assert store.metadata.fingerprint == metadata["fingerprint"]
    assert store.metadata.passages_fingerprint == metadata["passages_fingerprint"]
    assert store.metadata.collection_fingerprint == PassageStore.open("data", "places").fingerprint
    assert store.tasks == {"city": list(SIZES)}
    tokens = store.passages.tokens(np.arange(len(store)))
    np.testing.assert_array_equal(tokens.ids, np.load("tokens/passages/ids.npy"))
    for split in SIZES:
        rows = _rows(f"sources/city.{split}.tsv")
        assert [id for id, _ in rows] == list(store.queries("city", split).query_ids)


def test_negatives_are_the_rows_of_bm25s_run():
    store = PassageStore.open("data", "places")
    lines = run_of("runs/bm25-train/city.train.trec")
    negatives = read_negatives(
        "negatives", "city", "train", list(lines), collection_fingerprint=store.fingerprint
    )
    for (query, ranked), line in zip(lines.items(), negatives, strict=True):
        others = {passage: score for passage, score in ranked.items() if f"q-{passage}" != query}
        assert [store.ids[row] for row in line.rows] == list(others)[:3]
        np.testing.assert_allclose(line.scores, list(others.values())[:3])


def test_the_model_encodes_the_same_embeddings():
    succeed("encode", *gin(MODEL_DIR="model", TOKEN_STORE="tokens", EMBEDDINGS_DIR="encoded"))
    names = [path.relative_to("embeddings") for path in pathlib.Path().glob("embeddings/**/*.npy")]
    assert len(names) == 1 + len(SIZES)
    for name in names:
        golden = np.load("embeddings" / name)
        np.testing.assert_allclose(np.load("encoded" / name), golden, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(golden, axis=1), 1, atol=1e-6)
    assert Embeddings("encoded").fingerprints == Embeddings("embeddings").fingerprints


@pytest.mark.parametrize("kind", ["exact", pytest.param("scann", marks=pytest.mark.needs("scann"))])
def test_an_index_finds_the_same_passages(kind):
    arguments = gin(EMBEDDINGS_DIR="embeddings", INDEX_DIR=kind, RUNS_DIR="searched", TOP_K=10)
    succeed("search", *COLLECTION, *arguments)
    _assert_same_run("searched/city.test.trec", "runs/taser-test/city.test.trec")


def test_a_retriever_finds_the_same_passages():
    retriever = Retriever.load("model", index_dir="exact", data_dir="data", collection="places")
    texts = dict(_rows("sources/city.test.tsv"))
    for query, ranked in run_of("runs/taser-test/city.test.trec").items():
        (hits,) = retriever.search([texts[query]], k=10)
        assert [hit.passage.id for hit in hits] == list(ranked)
        np.testing.assert_allclose([hit.score for hit in hits], list(ranked.values()), atol=1e-5)


def test_the_bm25_index_is_used_as_it_is():
    before = {path: path.stat().st_mtime_ns for path in pathlib.Path("bm25").glob("*.*")}
    succeed("bm25", *COLLECTION, *gin(BM25_INDEX_DIR="bm25", BM25_RUNS_DIR="searched", TOP_K=10))
    _assert_same_run("searched/city.test.trec", "runs/bm25-test/city.test.trec")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_runs_score_the_same_beside_earlier_results():
    """A row is added to the table; the other rows come from the results' files."""
    store = PassageStore.open("data", "places")
    run = read_trec_run("runs/taser-test/city.test.trec", store.row_of)
    gold = [[store.row_of(id.removeprefix("q-"))] for id in run.query_ids]
    first = np.mean(run.rows[:, :1] == gold)
    golden = _table()
    assert float(golden["TASER", "city"][0]) == pytest.approx(first)
    for system, runs_dir in (("BM25", "runs/bm25-test"), ("again", "runs/taser-test")):
        succeed(
            *("evaluate", *COLLECTION),
            *gin(SYSTEM=system, RUNS_DIR=runs_dir, EVAL_OUTPUT_DIR="results"),
            "--gin.EvaluationConfig.measures=['R@1', 'MRR@10']",
        )
    again = {("again", task): golden["TASER", task] for task in ("average", "city")}
    assert _table() == golden | again


def _table() -> dict[tuple[str, str], list[str]]:
    """(system, task) -> figures; columns that compare systems are left out."""
    with open("results/table.csv", newline="") as file:
        return {
            (line["system"], line["task"]): [line["R@1"], line["MRR@10"], line["queries"]]
            for line in csv.DictReader(file)
        }


def test_training_resumes_from_the_checkpoint():
    """Steps 4 to 6 have the losses that they had when they first ran."""
    golden = metrics_by_step(pathlib.Path("model"))
    assert list(golden) == [1, 2, 3, 4, 5, 6]
    # It was trained with the papers' batches.
    succeed(
        *("train", "--gin_file=sources/recipe.gin"),
        "--gin.BatchingConfig.false_negatives=keep",
        "--gin.BatchingConfig.positives=first",
    )
    resumed = metrics_by_step(pathlib.Path("model"))
    assert list(resumed) == list(golden)
    assert pathlib.Path("model/checkpoint_6").is_dir()
    names = {f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "tokens")}
    for step, metrics in golden.items():
        # Validated is every third step.
        for name in metrics.keys() & (names | {"validation/nll"}):
            assert resumed[step][name] == pytest.approx(metrics[name], rel=1e-4), (step, name)
