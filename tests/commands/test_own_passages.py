"""A task in BEIR's format whose queries are passages of the corpus, by the same ids (ArguAna)."""

import pathlib

import pytest
from small_world import gin, refused, succeed
from written_files import beir, run_of

CORPUS = {
    "pro1": "school uniforms save money for parents",
    "con1": "school uniforms cost money that parents lack",
    "pro2": "zoos save animals",
    "con2": "zoos lock animals away from home",
}
# Each argument is refuted by the other one of its pair.
QUERIES = {"pro1": "con1", "con2": "pro2"}
OWN = gin(OWN_PASSAGE_TASKS=["arguana"])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("arguments")
    judged = [f"{query} {passage} 1" for query, passage in QUERIES.items()]
    asked = {id: CORPUS[id] for id in QUERIES}
    folder = beir(root / "beir", corpus=CORPUS, queries=asked, test=judged)
    succeed("prepare", *_where(root), *gin(DIRECTORIES={"arguana": str(folder)}))
    return root


def _where(root: pathlib.Path) -> list[str]:
    return gin(DATA_DIR=root / "data", COLLECTION="arguments")


def _found(runs_dir: pathlib.Path) -> dict[str, list[str]]:
    return {query: list(scores) for query, scores in run_of(runs_dir / "arguana.test.trec").items()}


def test_bm25_never_finds_the_query_itself(root, tmp_path):
    bm25 = ["bm25", *_where(root), *gin(BM25_INDEX_DIR=tmp_path / "index", TOP_K=1)]
    succeed(*bm25, *gin(BM25_RUNS_DIR=tmp_path / "runs"), *OWN)
    # One result each, as asked for: the second best takes its place.
    assert _found(tmp_path / "runs") == {query: [passage] for query, passage in QUERIES.items()}
    succeed(*bm25, *gin(BM25_RUNS_DIR=tmp_path / "itself"))
    assert _found(tmp_path / "itself") == {query: [query] for query in QUERIES}


def test_neither_does_a_model(root, small_world, compared, tmp_path):
    model = gin(MODEL_DIR=compared / "taser-2" / "model")
    tokens = gin(TOKEN_STORE=tmp_path / "tokens")
    succeed(
        *("tokenize", *gin(DATA_DIR=root / "data", VOCABULARY=small_world.root / "vocabulary")),
        *gin(MIXTURE_OR_TASK_NAME="arguments", TASK_FEATURE_LENGTHS={"query": 16, "passage": 32}),
        *tokens,
    )
    embeddings, index = gin(EMBEDDINGS_DIR=tmp_path / "e"), gin(INDEX_DIR=tmp_path / "index")
    succeed("encode", *model, *tokens, *embeddings)
    search = ["search", *embeddings, *index, *_where(root)]
    succeed(*search, *gin(RUNS_DIR=tmp_path / "all", TOP_K=4))
    succeed(*search, *gin(RUNS_DIR=tmp_path / "runs", TOP_K=3), *OWN)
    every, without_own = _found(tmp_path / "all"), _found(tmp_path / "runs")
    assert every.keys() == without_own.keys() == QUERIES.keys()
    for query, passages in without_own.items():
        assert passages == [passage for passage in every[query] if passage != query]


def test_tasks_without_own_passages_are_refused(root, small_world, tmp_path, capsys):
    places = gin(BM25_RUNS_DIR=tmp_path / "runs", BM25_INDEX_DIR=tmp_path / "index")
    unknown = gin(OWN_PASSAGE_TASKS=["arguanna"])
    assert "no task arguanna" in refused(capsys, "bm25", *_where(root), *places, *unknown)
    others = gin(DATA_DIR=small_world.data_dir, COLLECTION="small", OWN_PASSAGE_TASKS=["code"])
    message = "no query of task 'code' has the id of a passage"
    assert message in refused(capsys, "bm25", *others, *places)
