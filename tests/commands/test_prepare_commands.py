"""`taser prepare` and `tokenize` through the command line; BM25_POSITIVES from answers alone."""

import hashlib
import json
import pathlib

import pytest
from small_world import gin, refused, succeed
from written_files import write, write_all

from taser_jax.commands.prepare import drawn_by_hash
from taser_jax.data.collections.store import QuerySet
from taser_jax.data.prepare.collection import left_out_directory
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
    write(tmp_path / "bert" / name, "precious")
    where = gin(DATA_DIR=tmp_path, VOCABULARY=tmp_path / "bert", TOKEN_STORE=tmp_path / "tokens")
    message = refused(capsys, "tokenize", *where, *gin(COLLECTION="docs", VOCAB_SIZE=100))
    assert f"here is {name}: a vocabulary of pretrained weights" in message
    assert "leave VOCAB_SIZE out to take this vocabulary" in message
    assert [path.read_text() for path in (tmp_path / "bert").iterdir()] == ["precious"]


def test_tokenize_names_a_module_that_is_not_there(small_world, tmp_path, capsys):
    module = gin(MIXTURE_OR_TASK_MODULE="no_such_tasks")
    message = refused(capsys, *small_world.tokenize(tmp_path / "tokens"), *module)
    assert "cannot import 'no_such_tasks'" in message


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


QUESTIONS = """\
what is the capital of france\t['Paris']
which bread is best\t['rye', 'wheat']
who wrote the first program\t['born in 18\\d\\d']
"""
FOUND = gin(BM25_POSITIVES={"quiz": "quiz_bm25"})


@pytest.fixture
def prepare(tmp_path) -> list[str]:
    """Arguments that prepare questions with answers, one of which no passage contains."""
    passages = "".join(f"{row}\t{text}\n" for row, text in enumerate(TEXTS))
    files = {f"quiz.{split}.qa.csv": QUESTIONS for split in ("train", "dev", "test")}
    folder = write_all(tmp_path / "quiz", {**files, "passages.tsv": f"id\ttext\n{passages}"})
    return ["prepare", str(folder), *gin(DATA_DIR=tmp_path, BM25_INDEX_DIR=tmp_path / "bm25")]


def read(data_dir, split, task="quiz_bm25"):
    return {query.id: query for query in QuerySet.open(data_dir, "quiz", task, split)}


def test_passages_with_an_answer_are_positives_and_the_others_hard_negatives(prepare, tmp_path):
    succeed(*prepare, *FOUND)
    [query] = read(tmp_path, "train").values()
    assert (query.id, query.task) == ("train-0", "quiz_bm25")
    # "france" and "paris" are in the first; "paris" in the second; then what shares "capital".
    assert (query.positives, query.hard_negatives) == ((0, 1), (2,))
    lost = (left_out_directory(tmp_path, "quiz") / "quiz_bm25.train.txt").read_text()
    expected = ["train-1: which bread is best", "train-2: who wrote the first program"]
    assert lost.splitlines() == expected
    # Judged by their answers: all of them.
    for split, task in (("test", "quiz_bm25"), ("train", "quiz")):
        found = {id: query.positives for id, query in read(tmp_path, split, task).items()}
        assert found == {f"{split}-{number}": () for number in range(3)}


def test_patterns_match_as_patterns(prepare, tmp_path):
    succeed(*prepare, *FOUND, *gin(REGEX_TASKS=["quiz"]))
    found = {id: query.positives for id, query in read(tmp_path, "train").items()}
    assert found == {"train-0": (0, 1), "train-2": (4,)}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # A question that has only answers can't be trained on.
        ([], "there are no queries"),
        (gin(BM25_POSITIVES={"quiz": "quiz"}), "BM25_POSITIVES: tasks {'quiz': 'quiz'}"),
        (gin(BM25_POSITIVES={"quiz": "x", "no": "y"}), "BM25_POSITIVES: no task no"),
        (gin(BM25_POSITIVES={"quiz": "x", "bare": "y"}), "no train question of 'bare' has answers"),
        ([*FOUND, *gin(BM25_INDEX_DIR=None)], "no directory for BM25's index"),
    ],
)
def test_what_has_no_answers_or_no_name_is_refused(prepare, capsys, settings, words):
    bare = {"bare.train.queries.tsv": "a\tb\n", "bare.train.qrels.tsv": "a\t0\t1\t1\n"}
    write_all(pathlib.Path(prepare[1]), bare)
    assert words in refused(capsys, *prepare, *settings)
