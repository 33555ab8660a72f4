"""An installation without TensorFlow prepares, tokenises, trains, searches and answers."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import without_tensorflow
from small_world import SmallWorld, gin
from written_files import write_all

from taser_jax.data.token_store.store import TokenStore

pytestmark = pytest.mark.slow

TEXTS = ["the river", "a mountain", "one king", "his song"]
SIZES = gin("BertConfig", embed_dim=32, num_layers=1, num_heads=2, head_dim=16, mlp_dim=64)
SIZES += gin("BertConfig", dropout_rate=0.0, attention_dropout_rate=0.0)


def run(folder: pathlib.Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs commands, the first of which may fail, in one process that has no TensorFlow."""
    return subprocess.run(
        [sys.executable, without_tensorflow.__file__, json.dumps(commands)],
        cwd=folder,
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[str]:
    """Arguments of `taser prepare`: four passages, a query for each."""
    passages = "".join(f"p{i}\t{text}\t\n" for i, text in enumerate(TEXTS))
    files = {"passages.tsv": f"id\ttext\ttitle\n{passages}"}
    for split in ("train", "test"):
        queries = "".join(f"{split}{i}\twhere is {text}\n" for i, text in enumerate(TEXTS))
        qrels = "".join(f"{split}{i}\t0\tp{i}\t1\n" for i in range(len(TEXTS)))
        files |= {f"q.{split}.queries.tsv": queries, f"q.{split}.qrels.tsv": qrels}
    write_all(tmp_path, files)
    return [str(tmp_path), *gin(DATA_DIR=tmp_path / "data", COLLECTION="rivers")]


def test_from_files_to_an_answer(small_world: SmallWorld, files: list[str], tmp_path: pathlib.Path):
    data = gin(DATA_DIR=tmp_path / "data", COLLECTION="rivers")
    model = gin(MODEL_DIR=tmp_path / "model")
    store = gin(TOKEN_STORE=tmp_path / "tokens")
    embeddings = gin(EMBEDDINGS_DIR=tmp_path / "embeddings")
    index, runs = gin(INDEX_DIR=tmp_path / "index"), gin(RUNS_DIR=tmp_path / "runs")
    small = [
        *("tokenize", *gin(DATA_DIR=small_world.data_dir)),
        *gin(VOCABULARY=small_world.root / "vocabulary"),
        *gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 32}),
    ]
    (tmp_path / "own_code.py").write_text(
        "from taser_jax.tasks import add_retrieval_task\n"
        "add_retrieval_task('own', collection='c', query_preprocessors=[lambda data: data])\n"
    )
    done = run(
        tmp_path,
        ["prepare", *files],
        [
            *("tokenize", *gin(DATA_DIR=tmp_path / "data", VOCABULARY=tmp_path / "vocabulary")),
            *gin(VOCAB_SIZE=64, MIXTURE_OR_TASK_NAME="rivers"),
            *(*gin(TASK_FEATURE_LENGTHS={"query": 8, "passage": 8}), *store),
        ],
        [
            *("train", "--gin_file=models/bert_tiny.gin", "--gin_file=models/dpr.gin", *SIZES),
            *(*store, *model, *gin(TRAIN_STEPS=2, BATCH_SIZE=2, WARMUP_STEPS=1)),
            *gin("TrainingConfig", validation=None),
        ],
        ["encode", *model, *store, *embeddings],
        ["search", *data, *embeddings, *index, *runs, *gin(TOP_K=3)],
        ["bm25", *data, *gin(BM25_INDEX_DIR=tmp_path / "bm25", BM25_RUNS_DIR=tmp_path / "found")],
        ["evaluate", *data, *runs, *gin(EVAL_OUTPUT_DIR=tmp_path / "results", SYSTEM="DPR")],
        ["ask", *data, *model, *index, *gin(QUESTIONS="['where is the river']")],
        [
            *(*small, *gin(TOKEN_STORE=tmp_path / "again")),
            *gin(MIXTURE_OR_TASK_NAME="small", MIXTURE_OR_TASK_MODULE="small_tasks"),
        ],
        # The only one that is refused.
        [
            *(*small, *gin(TOKEN_STORE=tmp_path / "refused")),
            *gin(MIXTURE_OR_TASK_NAME="own", MIXTURE_OR_TASK_MODULE="own_code"),
        ],
    )
    assert "not installed (No module named 'seqio')\n  expected: both" in done.stderr
    assert "[tensorflow]'\ntaser tokenize" in done.stderr, done.stderr
    assert "? where is the river" in done.stdout
    here = TokenStore.open(small_world.token_store).metadata
    assert TokenStore.open(tmp_path / "again").metadata == here
    assert (tmp_path / "results" / "table.md").exists()
