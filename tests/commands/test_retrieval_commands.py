"""encode, search and ask through the command line, on a model of the small comparison."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from small_world import SmallWorld, gin, refused, succeed

from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.search import index as build
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Role
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings, encoded_splits
from taser_jax.retrieval.index import IndexConfig, IndexKind


@pytest.fixture(scope="module")
def model_dir(compared) -> pathlib.Path:
    return compared / "taser-2" / "model"


@pytest.fixture(scope="module")
def embeddings(small_world, model_dir, tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("encoded") / "embeddings"
    succeed("encode", *_encode(small_world, model_dir, directory))
    return directory


@pytest.mark.needs("scann")
def test_scann_measures_its_recall_on_queries(small_world, model_dir, embeddings, tmp_path, capsys):
    scann = gin("IndexConfig", kind="scann")
    search = _search(small_world, embeddings, tmp_path / "scann", tmp_path / "runs")
    succeed("search", *search, *scann)
    assert "against exact search" in capsys.readouterr().err
    metadata = json.loads((tmp_path / "scann" / "metadata.json").read_text())
    assert metadata["measured_on"] == "queries"
    assert metadata["effort"]["recall"] == pytest.approx(1.0)

    shutil.copytree(embeddings, tmp_path / "e", ignore=shutil.ignore_patterns("queries"))
    without = str(tmp_path / "without")
    config = IndexConfig(kind=IndexKind.SCANN)
    build(embeddings_dir=str(tmp_path / "e"), index_dir=without, config=config)
    metadata = json.loads((tmp_path / "without" / "metadata.json").read_text())
    assert metadata["measured_on"] == "passages"


def test_ask_prints_the_passages_it_returns(small_world, compared, capsys):
    succeed("ask", *_ask(small_world, compared, "['parse a json document', 'median of a list']"))
    printed = capsys.readouterr().out
    assert "? parse a json document" in printed
    assert "? median of a list" in printed
    assert printed.count("\n  1. ") == printed.count("\n  3. ") == 2


@pytest.mark.parametrize(
    ("questions", "fix"),
    [
        ("[]", "taser ask how do I"),
        ("['  ']", "taser ask how do I"),
        ("how do I parse json", "['how do I parse json']"),
    ],
)
def test_ask_wants_a_list_of_questions(small_world, compared, capsys, questions, fix):
    message = refused(capsys, "ask", *_ask(small_world, compared, questions))
    assert "QUESTIONS" in message
    assert fix in message


def test_a_tag_of_two_words_is_refused(small_world, compared, tmp_path, capsys):
    """It would be two columns of a run file, which nothing could read."""
    root = compared / "taser-2"
    arguments = _search(small_world, root / "embeddings", root / "index", tmp_path / "runs")
    message = refused(capsys, "search", *arguments, "--gin.search.tag='my run'")
    assert "search.tag: the tag is 'my run'" in message


def test_a_directory_without_a_model_is_refused(small_world, tmp_path, capsys):
    message = refused(capsys, "encode", *_encode(small_world, tmp_path, tmp_path / "e"))
    assert f"{tmp_path / 'model.json'}: no model here" in message


def test_tokens_of_another_collection_or_vocabulary_are_refused(
    small_world, compared, tmp_path, capsys
):
    made = compared / "taser-2"
    changed = shutil.copytree(small_world.token_store, tmp_path / "tokens")
    _edit(changed / "metadata.json", vocabulary_fingerprint="strange")
    arguments = _encode(small_world, made / "model", made / "embeddings", TOKEN_STORE=changed)
    assert ": made from vocabulary strange" in refused(capsys, "encode", *arguments)
    for place in ("embeddings/queries/code.test", "embeddings"):
        copied = shutil.copytree(made, tmp_path / place.replace("/", "_"))
        metadata = copied / place / "metadata.json"
        fingerprints = json.loads(metadata.read_text())["fingerprints"]
        _edit(metadata, fingerprints={**fingerprints, "collection": "another"})
        searched = _search(small_world, copied / "embeddings", copied / "index", tmp_path / "runs")
        assert f"{place}: made from collection another" in refused(capsys, "search", *searched)
    assert not (tmp_path / "runs").exists()


def test_queries_of_every_task_and_split_are_encoded_unless_restricted(
    small_world, model_dir, embeddings, tmp_path, capsys
):
    """Equal to the model's own output, batch of one split by batch, as search used to encode."""
    store, model = TokenStore.open(small_world.token_store), load_model(model_dir)
    every = sorted((entry.task, entry.split) for entry in store.metadata.queries)
    assert encoded_splits(embeddings) == every
    for task, split in every:
        queries = store.queries(task, split)
        encoded = QueryEmbeddings.of_split(embeddings, task, split)
        whole = model.encode_fn(Role.QUERY, task=task)(queries.tokens(np.arange(len(queries))))
        np.testing.assert_allclose(encoded[:], whole, atol=1e-5)
        assert encoded.query_ids == queries.query_ids
        assert encoded.fingerprints["queries"] == queries.fingerprint
        shared = {key: value for key, value in encoded.fingerprints.items() if key != "queries"}
        assert shared == Embeddings(embeddings).fingerprints

    shutil.copytree(embeddings, tmp_path / "e", ignore=shutil.ignore_patterns("queries"))
    some = ["encode", *_encode(small_world, model_dir, tmp_path / "e")]
    succeed(*some, *gin(TASKS=["code"]), *gin("encode", query_splits=["test", "train"]))
    assert encoded_splits(tmp_path / "e") == [("code", "test"), ("code", "train")]
    assert "some of code, summary" in refused(capsys, *some, *gin(TASKS=["cod"]))
    assert "some of test, train" in refused(capsys, *some, *gin("encode", query_splits=["tst"]))


def _edit(path: pathlib.Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    (path.parent / "checksums.txt").unlink(missing_ok=True)


def _encode(
    world: SmallWorld, model_dir: pathlib.Path, output: pathlib.Path, **more: object
) -> list[str]:
    where = {"MODEL_DIR": model_dir, "TOKEN_STORE": world.token_store, "EMBEDDINGS_DIR": output}
    return gin(**where | more)


def _search(
    world: SmallWorld, embeddings: pathlib.Path, index_dir: pathlib.Path, runs_dir: pathlib.Path
) -> list[str]:
    return [
        *gin(EMBEDDINGS_DIR=embeddings, DATA_DIR=world.data_dir, COLLECTION="small"),
        *gin(INDEX_DIR=index_dir, RUNS_DIR=runs_dir, TOP_K=10),
    ]


def _ask(world: SmallWorld, compared: pathlib.Path, questions: str) -> list[str]:
    return [
        *gin(MODEL_DIR=compared / "taser-2/model", INDEX_DIR=compared / "taser-2/index"),
        *gin(QUESTIONS=questions, DATA_DIR=world.data_dir, COLLECTION="small"),
        *gin("ask", query_length=16),
    ]
