"""Unlike tasks in one collection: answers that are patterns, queries that are passages."""

import json
import pathlib

import pytest
from capitals import IDS, PASSAGES, mined
from small_world import gin, refused, succeed
from written_files import run_of

from taser_jax.commands.inputs import answer_matcher
from taser_jax.data.collections.store import PassageStore, write_collection, write_queries
from taser_jax.storage.records import Passage, Query

# Of "capital", a string with a regular expression's signs in it; of "trec", a pattern.
QUESTIONS = {
    "capital": ("which river is in Italy", "Tiber", "p5"),
    "trec": ("which river is in France", "Se[i]ne|Sena", "p1"),
}
REGEX = gin(REGEX_TASKS=["trec"])
# As of ArguAna: a query is a passage, by the same id, and another passage answers it.
OWN = gin(OWN_PASSAGE_TASKS=["own"])
ANSWERED_BY = {"p4": "p2", "p3": "p5"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> pathlib.Path:
    """Data and BM25 runs of all tasks, both splits alike."""
    root = tmp_path_factory.mktemp("sets")
    passages = [Passage(id, text, title) for id, (title, text) in PASSAGES.items()]
    write_collection(root / "data", "sets", passages)
    queries = {
        task: [Query("q", question, task, (IDS.index(gold),), answers=(answer,))]
        for task, (question, answer, gold) in QUESTIONS.items()
    }
    queries["own"] = [
        Query(id, PASSAGES[id][1], "own", (IDS.index(gold),)) for id, gold in ANSWERED_BY.items()
    ]
    for split in ("train", "test"):
        for task, asked in queries.items():
            write_queries(root / "data", "sets", task, split, asked)
        places = gin(BM25_RUNS_DIR=root / "runs", BM25_INDEX_DIR=root / "index", SPLIT=split)
        succeed("bm25", *_where(root), *places)
    return root


def _where(root: pathlib.Path) -> list[str]:
    return gin(DATA_DIR=root / "data", COLLECTION="sets")


def _found(runs_dir: pathlib.Path) -> dict[str, list[str]]:
    return {query: list(scores) for query, scores in run_of(runs_dir / "own.test.trec").items()}


def test_mining_drops_what_each_set_counts_as_an_answer(sets, tmp_path):
    mine = ["mine", *_where(sets), *gin(RUNS_DIR=sets / "runs")]
    mine += gin("MiningConfig", answer_containing="drop")
    succeed(*mine, *gin(NEGATIVES_DIR=tmp_path / "both"), *REGEX)
    succeed(*mine, *gin(NEGATIVES_DIR=tmp_path / "strings"))
    ([trec], [capital]) = (mined(tmp_path / "both", task) for task in ("trec", "capital"))
    # "Seine" is in p0 and p1 (gold), "Tiber" in p3 and p5 (gold).
    assert "p0" not in trec
    assert "p3" not in capital
    # As a string, no passage holds the pattern.
    assert mined(tmp_path / "strings", "trec") == [trec | {"p0"}]
    assert mined(tmp_path / "strings", "capital") == [capital]


def test_evaluation_judges_each_set_by_its_own_match_or_by_its_positives(sets, tmp_path, capsys):
    evaluate = ["evaluate", *_where(sets), *gin(RUNS_DIR=sets / "runs", SYSTEM="BM25")]
    evaluate += gin(EVAL_OUTPUT_DIR=tmp_path, TASKS=list(QUESTIONS))
    evaluate += gin("EvaluationConfig", judge="answers", measures=["R@5"])
    # As a string the pattern is in no passage, but its positive is found.
    by_positives = gin("EvaluationConfig", qrels_tasks=["trec"])
    for options, expected in ((REGEX, 1.0), ([], 0.0), (by_positives, 1.0)):
        succeed(*evaluate, *options)
        tasks = json.loads((tmp_path / "results" / "bm25.json").read_text())["tasks"]
        assert tasks["capital"]["metrics"]["R@5"] == 1.0
        assert tasks["trec"]["metrics"]["R@5"] == expected
        said, mean = capsys.readouterr().err, (1 + expected) / 2
        assert f"R@5 {mean:.4f} (macro: mean over 2 tasks)" in said
        assert f"R@5 {mean:.4f} (micro: all queries pooled" in said


def test_an_unknown_set_is_refused(sets, tmp_path, capsys):
    runs = gin(RUNS_DIR=sets / "runs", REGEX_TASKS=["trek"])
    outputs = gin(EVAL_OUTPUT_DIR=tmp_path, SYSTEM="x")
    assert "no task trek" in refused(capsys, "evaluate", *_where(sets), *runs, *outputs)
    message = refused(capsys, "mine", *_where(sets), *runs, *gin(NEGATIVES_DIR=tmp_path))
    assert "no task trek" in message
    assert "capital, own, trec" in message


def test_rows_of_a_pipeline_share_what_they_read(sets):
    first, again = (PassageStore.open(sets / "data", "sets") for _ in range(2))
    matcher = answer_matcher(first, "capital", ["trec"])
    # The store is opened anew for each row.
    assert answer_matcher(again, "capital", ["trec"]) is matcher
    assert answer_matcher(again, "trec", ["trec"]) is not matcher


def test_bm25_never_finds_the_query_itself(sets, tmp_path):
    bm25 = ["bm25", *_where(sets), *gin(BM25_INDEX_DIR=sets / "index", TOP_K=1)]
    succeed(*bm25, *gin(BM25_RUNS_DIR=tmp_path / "runs"), *OWN)
    # One result each, as asked for: the second best takes its place.
    assert _found(tmp_path / "runs") == {query: [passage] for query, passage in ANSWERED_BY.items()}
    assert [passages[0] for passages in _found(sets / "runs").values()] == list(ANSWERED_BY)


def test_neither_does_a_model(sets, small_world, compared, tmp_path):
    model = gin(MODEL_DIR=compared / "taser-2" / "model")
    tokens = gin(TOKEN_STORE=tmp_path / "tokens")
    succeed(
        *("tokenize", *gin(DATA_DIR=sets / "data", VOCABULARY=small_world.root / "vocabulary")),
        *gin(MIXTURE_OR_TASK_NAME="sets", TASK_FEATURE_LENGTHS={"query": 16, "passage": 32}),
        *tokens,
    )
    embeddings, index = gin(EMBEDDINGS_DIR=tmp_path / "e"), gin(INDEX_DIR=tmp_path / "index")
    succeed("encode", *model, *tokens, *embeddings)
    search = ["search", *embeddings, *index, *_where(sets)]
    succeed(*search, *gin(RUNS_DIR=tmp_path / "all", TOP_K=8))
    succeed(*search, *gin(RUNS_DIR=tmp_path / "runs", TOP_K=7), *OWN)
    every, without_own = _found(tmp_path / "all"), _found(tmp_path / "runs")
    assert every.keys() == without_own.keys() == ANSWERED_BY.keys()
    for query, passages in without_own.items():
        assert passages == [passage for passage in every[query] if passage != query]


def test_tasks_without_own_passages_are_refused(sets, tmp_path, capsys):
    bm25 = ["bm25", *_where(sets), *gin(BM25_RUNS_DIR=tmp_path, BM25_INDEX_DIR=sets / "index")]
    for task, message in (
        ("onw", "no task onw"),
        ("capital", "no query of task 'capital' has the id of a passage"),
    ):
        assert message in refused(capsys, *bm25, *gin(OWN_PASSAGE_TASKS=[task]))
