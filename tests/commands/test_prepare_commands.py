"""`taser prepare` and `tokenize` through the command line; BM25_POSITIVES from answers alone."""

import hashlib
import json

import pytest
from small_world import gin, refused, succeed
from written_files import tsv, write_all

from taser_jax.commands.prepare import Bm25Positives, drawn_by_hash, find_positives
from taser_jax.data.collections.store import QuerySet, list_tasks, write_collection, write_queries
from taser_jax.data.prepare.collection import left_out_directory
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query


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


TEXTS = (
    "the capital of france is paris",
    "paris hosted the games of 1924",
    "the capital of spain is madrid",
    "bread and cheese",
    "born in 1815 she wrote the first program",
)


@pytest.fixture
def world(tmp_path):
    """Questions with answers, one of which no passage contains."""
    data_dir = str(tmp_path / "data")
    write_collection(data_dir, "c", [Passage(f"p{row}", text) for row, text in enumerate(TEXTS)])
    queries = [
        Query("a", "what is the capital of france", "qa", answers=("Paris",)),
        Query("b", "which bread is best", "qa", answers=("rye", "wheat")),
        Query("c", "who wrote the first program", "qa", answers=(r"born in 18\d\d",)),
    ]
    for split in ("train", "validation", "test"):
        write_queries(data_dir, "c", "qa", split, queries)
    return data_dir


def run(world, tmp_path, **options):
    settings = {"tasks": {"qa": "qa_bm25"}, "index_dir": str(tmp_path / "bm25")} | options
    find_positives(world, "c", Bm25Positives(**settings), depth=3)


def read(world, split, task="qa_bm25"):
    return {query.id: query for query in QuerySet.open(world, "c", task, split)}


def test_passages_with_an_answer_are_positives_and_the_others_hard_negatives(world, tmp_path):
    run(world, tmp_path)
    queries = read(world, "train")
    assert list(queries) == ["a"]
    # "france" and "paris" are in the first; "paris" in the second; then what shares "capital".
    assert queries["a"].positives == (0, 1)
    assert queries["a"].hard_negatives == (2,)
    assert queries["a"].task == "qa_bm25"
    lost = (left_out_directory(world, "c") / "qa_bm25.train.txt").read_text()
    assert lost.splitlines() == ["b: which bread is best", "c: who wrote the first program"]
    # Judged by their answers: all of them.
    judged = {id: query.positives for id, query in read(world, "test").items()}
    assert judged == dict.fromkeys("abc", ())
    assert list(read(world, "train", "qa")) == ["a", "b", "c"]


def test_patterns_match_as_patterns(world, tmp_path):
    run(world, tmp_path, regex_tasks=("qa",))
    queries = read(world, "train")
    assert list(queries) == ["a", "c"]
    assert queries["c"].positives == (4,)


def test_what_has_no_answers_or_no_name_is_refused(world, tmp_path):
    for tasks in ({"qa": "qa"}, {"unknown": "x"}):
        with pytest.raises(ConfigError, match="BM25_POSITIVES"):
            run(world, tmp_path, tasks=tasks)
    with pytest.raises(ConfigError, match="no directory for BM25's index"):
        run(world, tmp_path, index_dir=None)
    write_queries(world, "c", "bare", "train", [Query(id="a", text="b", task="bare")])
    with pytest.raises(ConfigError, match="no train question of 'bare' has answers"):
        run(world, tmp_path, tasks={"bare": "x"})


def test_they_are_found_when_files_are_prepared(tmp_path, capsys):
    lines = [f"{row}\t{text}\n" for row, text in enumerate(TEXTS)]
    files = {
        "passages.tsv": "id\ttext\n" + "".join(lines),
        "quiz.test.qa.csv": "capital of spain\t['Madrid']\n",
        "quiz.train.qa.csv": "capital of france\t['Paris']\n",
    }
    prepare = ["prepare", str(write_all(tmp_path / "quiz", files))]
    prepare += gin(DATA_DIR=tmp_path / "data", BM25_INDEX_DIR=tmp_path / "bm25")
    # Without them, a question that has only answers can't be trained on.
    assert "there are no queries" in refused(capsys, *prepare)
    succeed(*prepare, *gin(BM25_POSITIVES={"quiz": "quiz_bm25"}))
    positives = {
        task: [query.positives for query in QuerySet.open(tmp_path / "data", "quiz", task, "train")]
        for task in ("quiz", "quiz_bm25")
    }
    assert positives == {"quiz": [()], "quiz_bm25": [(0, 1)]}
