"""`taser prepare` and `tokenize` through the command line, on files made by hand."""

import hashlib
import json

import pytest
from small_world import TASKS, gin, refused, succeed
from written_files import write_all

from taser_jax.assembly.data import training_queries
from taser_jax.commands.inputs import tasks_with
from taser_jax.commands.prepare import drawn_by_hash
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.store import TokenStore
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Query


def test_plain_tsv(tmp_path):
    (tmp_path / "p.tsv").write_text("7\tfirst text\tOne\n9\tsecond text\tTwo\n")
    (tmp_path / "q.tsv").write_text("q1\tsecond?\n")
    (tmp_path / "qrels.tsv").write_text("q1 0 9 1\n")
    (tmp_path / "q.gin").write_text(
        f"test/QuestionFiles.questions = '{tmp_path}/q.tsv'\n"
        f"test/QuestionFiles.qrels = '{tmp_path}/qrels.tsv'\n"
    )
    succeed(
        *("prepare", "--gin_file=runs/prepare.gin", f"--gin_file={tmp_path}/q.gin"),
        *gin(DATA_DIR=tmp_path / "data", COLLECTION="t", PASSAGES=tmp_path / "p.tsv"),
        "--gin.QUERIES={'lookup': {'test': @test/QuestionFiles()}}",
    )
    assert [p.title for p in PassageStore.open(tmp_path / "data", "t").iterate()] == ["One", "Two"]
    queries = list(QuerySet.open(tmp_path / "data", "t", "lookup", "test"))
    assert [(query.id, query.positives) for query in queries] == [("q1", (1,))]


def test_a_misspelled_task_of_pydocs_is_refused(tmp_path, capsys):
    message = refused(
        capsys, "prepare", "pydocs", *gin(DATA_DIR=tmp_path / "data", TASKS=["code", "sumary"])
    )
    assert "no task sumary" in message
    assert "name tasks of the collection: code, example" in message


def test_vocabulary_and_token_store(small_world):
    assert sorted(list_tasks(small_world.data_dir, "small")) == sorted(TASKS)
    vocabulary = load_vocabulary(small_world.root / "vocabulary")
    store = TokenStore.open(small_world.token_store)
    assert vocabulary.size == 1000
    assert store.metadata.vocabulary_fingerprint == vocabulary.fingerprint
    assert load_vocabulary(store.vocabulary_directory).fingerprint == vocabulary.fingerprint
    assert (store.metadata.query_length, store.metadata.passage_length) == (16, 32)
    passages = PassageStore.open(small_world.data_dir, "small")
    title, text = passages[5].title, passages[5].text
    title_ids, text_ids = vocabulary.encode([title, text])
    expected = [vocabulary.cls_id, *title_ids, vocabulary.sep_id, *text_ids][:31]
    tokens = store.passages.tokens([5])
    assert tokens.ids[0, :31].tolist()[: len(expected)] == expected
    assert json.loads((small_world.token_store / "mixture.json").read_text())["weights"] == {
        "summary": 1.0,
        "code": 1.0,
    }


def test_tasks_go_by_their_registered_names_too(small_world):
    store = TokenStore.open(small_world.token_store)
    by_store = training_queries(store, task_names=["code"])
    by_registry = training_queries(store, task_names=["small_code"])
    assert list(by_registry) == list(by_store) == ["code"]
    with pytest.raises(ConfigError, match="no task 'small_cod'"):
        training_queries(store, task_names=["small_cod"])
    names = ["small_summary", "small.code", "summary"]
    tasks = tasks_with(str(small_world.data_dir), "small", split="train", tasks=names)
    assert tasks == ["summary", "code", "summary"]
    with pytest.raises(ConfigError, match="no task 'other_code'"):
        tasks_with(str(small_world.data_dir), "small", split="train", tasks=["other_code"])


def test_another_vocabulary_in_the_directory_is_refused(small_world, tmp_path, capsys):
    arguments = gin(DATA_DIR=small_world.data_dir, COLLECTION="small", VOCAB_SIZE=500)
    arguments += gin(VOCABULARY=small_world.root / "vocabulary", TOKEN_STORE=tmp_path)
    message = refused(capsys, "tokenize", *arguments)
    assert "1000 entries is here" in message


@pytest.mark.parametrize("name", ["vocab.txt", "config.json", "spiece.model"])
def test_a_vocabulary_of_weights_is_never_replaced(tmp_path, capsys, name):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / name).write_text("precious")
    message = refused(
        capsys,
        *("tokenize", *gin(DATA_DIR=tmp_path, COLLECTION="docs", VOCABULARY=tmp_path / "bert")),
        *gin(VOCAB_SIZE=100, TOKEN_STORE=tmp_path / "tokens"),
    )
    assert f"here is {name}: a vocabulary of pretrained weights" in message
    assert "leave VOCAB_SIZE out to take this vocabulary" in message
    assert [path.read_text() for path in (tmp_path / "bert").iterdir()] == ["precious"]


def test_tokenize_names_what_is_not_registered(small_world, tmp_path, capsys):
    arguments = [
        "tokenize",
        *gin(DATA_DIR=small_world.data_dir, VOCABULARY=small_world.root / "vocabulary"),
        *gin(MIXTURE_OR_TASK_NAME="smal", TOKEN_STORE=tmp_path / "tokens"),
    ]
    assert "small" in refused(capsys, *arguments, *gin(MIXTURE_OR_TASK_MODULE="small_tasks"))
    message = refused(capsys, *arguments, *gin(MIXTURE_OR_TASK_MODULE="no_such_tasks"))
    assert "cannot import 'no_such_tasks'" in message


def test_without_validation_each_command_says_how_to_get_it(tmp_path, capsys):
    files = {"faq.passages.tsv": "".join(f"p{n}\ttext {n}\n" for n in range(40))}
    for split, numbers in (("train", range(30)), ("test", range(30, 40))):
        questions = "".join(f"q{n}\tquestion {n}\n" for n in numbers)
        judged = "".join(f"q{n} 0 p{n} 1\n" for n in numbers)
        files |= {f"faq.{split}.queries.tsv": questions, f"faq.{split}.qrels.tsv": judged}
    write_all(tmp_path, files)
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
