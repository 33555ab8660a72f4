"""`taser prepare` and `tokenize` through the command line, on files made by hand."""

import hashlib
import json

import pytest
from small_world import gin, refused, succeed
from written_files import tsv

from taser_jax.commands.prepare import drawn_by_hash
from taser_jax.data.collections.store import list_tasks
from taser_jax.storage.records import Query


def test_a_misspelled_task_of_pydocs_is_refused(tmp_path, capsys):
    given = gin(DATA_DIR=tmp_path / "data", TASKS=["code", "sumary"])
    message = refused(capsys, "prepare", "pydocs", *given)
    assert "no task sumary" in message
    assert "name some of code, example" in message


def test_a_token_store_has_the_weights_of_its_mixture(small_world):
    weights = json.loads((small_world.token_store / "mixture.json").read_text())["weights"]
    assert weights == {"summary": 1.0, "code": 1.0}


def test_another_vocabulary_in_the_directory_is_refused(small_world, tmp_path, capsys):
    arguments = [*small_world.tokenize(tmp_path), *gin(VOCAB_SIZE=500)]
    assert "1000 entries is here" in refused(capsys, *arguments)


@pytest.mark.parametrize("name", ["vocab.txt", "config.json", "spiece.model"])
def test_a_vocabulary_of_weights_is_never_replaced(tmp_path, capsys, name):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / name).write_text("precious")
    where = gin(DATA_DIR=tmp_path, VOCABULARY=tmp_path / "bert", TOKEN_STORE=tmp_path / "tokens")
    message = refused(capsys, "tokenize", *where, *gin(COLLECTION="docs", VOCAB_SIZE=100))
    assert f"here is {name}: a vocabulary of pretrained weights" in message
    assert "leave VOCAB_SIZE out to take this vocabulary" in message
    assert [path.read_text() for path in (tmp_path / "bert").iterdir()] == ["precious"]


def test_tokenize_names_a_module_that_is_not_there(small_world, tmp_path, capsys):
    module = gin(MIXTURE_OR_TASK_MODULE="no_such_tasks")
    message = refused(capsys, *small_world.tokenize(tmp_path / "tokens"), *module)
    assert "cannot import 'no_such_tasks'" in message


def test_without_validation_each_command_says_how_to_get_it(tmp_path, capsys):
    questions = {f"q{n}": (f"question {n}", f"p{n}") for n in range(40)}
    splits = {"train": list(questions)[:30], "test": list(questions)[30:]}
    asked = {f"faq.{split}": {id: questions[id] for id in ids} for split, ids in splits.items()}
    tsv(tmp_path, {f"p{n}": f"text {n}" for n in range(40)}, asked)
    prepare = ["prepare", str(tmp_path), *gin(DATA_DIR=tmp_path / "data", COLLECTION="t")]
    succeed(*prepare)
    assert "no validation split of task faq; VALIDATION_SHARE=0.1" in capsys.readouterr().err
    places = gin(RUNS_DIR=tmp_path, BM25_RUNS_DIR=tmp_path, HYBRID_RUNS_DIR=tmp_path)
    message = refused(capsys, "hybrid", *places, *prepare[2:])
    assert "hybrid.alpha" in message
    assert "VALIDATION_SHARE" in message
    succeed(*prepare, *gin(VALIDATION_SHARE=0.2))
    assert "no validation split" not in capsys.readouterr().err
    assert list_tasks(tmp_path / "data", "t")["faq"] == ["train", "validation", "test"]


def test_training_queries_are_drawn_by_the_hash_of_their_ids():
    queries = [Query(id=f"q{n}", text="t", task="t", positives=(0,)) for n in range(20)]
    hashes = {query.id: hashlib.sha256(query.id.encode()).hexdigest() for query in queries}
    lowest = sorted(hashes, key=hashes.__getitem__)[:5]
    drawn = [query.id for query in drawn_by_hash(queries, 5)]
    assert drawn == [query.id for query in queries if query.id in lowest]
    assert {query.id for query in drawn_by_hash(queries[::-1], 5)} == set(drawn)
    assert set(drawn) < {query.id for query in drawn_by_hash(queries, 6)}
    assert drawn_by_hash(queries, 30) == queries
