"""BM25_POSITIVES of `taser prepare`: positives and hard negatives from answers alone."""

import pytest
from small_world import gin, refused, succeed
from written_files import write_all

from taser_jax.commands.prepare import Bm25Positives, find_positives
from taser_jax.data.collections.store import QuerySet, write_collection, write_queries
from taser_jax.data.prepare.collection import left_out_directory
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query

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
