"""Writes `artifacts/`, one small artefact of every kind, for tests/test_golden_artifacts.py.

    python tests/golden/make_artifacts.py        # replaces artifacts/

A released version reads what an earlier one wrote. So these files are committed and written again
only when a format changes on purpose. All paths are relative to `artifacts/`, the folder in which
the commands run.
"""

import os
import pathlib
import shutil

os.environ["JAX_PLATFORMS"] = "cpu"

from taser_jax.cli import main as cli
from taser_jax.storage import checksums
from taser_jax.tasks import add_retrieval_task

ARTIFACTS = pathlib.Path(__file__).parent / "artifacts"
# Country, capital, river.
PLACES = (
    ("France", "Paris", "Seine"),
    ("Italy", "Rome", "Tiber"),
    ("Austria", "Vienna", "Danube"),
    ("Poland", "Warsaw", "Vistula"),
    ("Portugal", "Lisbon", "Tagus"),
    ("England", "London", "Thames"),
    ("Egypt", "Cairo", "Nile"),
    ("Ireland", "Dublin", "Liffey"),
    ("Czechia", "Prague", "Vltava"),
    ("Switzerland", "Bern", "Aare"),
    ("Lithuania", "Vilnius", "Neris"),
    ("Iraq", "Baghdad", "Tigris"),
)
# Places that a split asks about.
SPLITS = {"train": PLACES[:8], "validation": PLACES[4:], "test": PLACES[8:]}
RECIPE = """\
# A TASER of two blocks, 16 wide, trained on BM25's negatives.
include 'runs/train.gin'
include 'models/bert_tiny.gin'
include 'models/taser.gin'

MODEL_DIR = 'model'
TOKEN_STORE = 'tokens'
NEGATIVES_DIRS = ['negatives']
TRAIN_STEPS = 6
WARMUP_STEPS = 2
EVAL_PERIOD = 3
CHECKPOINT_PERIOD = 3
BATCH_SIZE = 8
LEARNING_RATE = 3e-3

BertConfig.embed_dim = 16
BertConfig.num_layers = 2
BertConfig.num_heads = 2
BertConfig.head_dim = 8
BertConfig.mlp_dim = 32
BertConfig.max_length = 24
ExpertConfig.blocks = [2]
DualEncoderConfig.pooling = 'mean'
DualEncoderConfig.normalization = 'l2'
ObjectiveConfig.temperature = 0.1
LoopConfig.log_period = 1
CheckpointConfig.keep_latest = 2
ValidationConfig.batch_size = 8
ValidationConfig.num_batches = 1
ValidationConfig.pool = None
"""
COLLECTION = ("--gin.DATA_DIR=data", "--gin.COLLECTION=places")


def write_sources() -> None:
    """The texts, and the recipe of training."""
    sources = pathlib.Path("sources")
    sources.mkdir()
    passages = [
        f"{country}\t{capital} is its capital city. The {river} flows through it.\t{country}\n"
        for country, capital, river in PLACES
    ]
    (sources / "passages.tsv").write_text("".join(passages))
    for split, places in SPLITS.items():
        queries = [
            f"q-{country}\twhich capital city of {country} lies on the {river}\n"
            for country, _, river in places
        ]
        judgements = [f"q-{country} 0 {country} 1\n" for country, _, _ in places]
        (sources / f"city.{split}.tsv").write_text("".join(queries))
        (sources / f"city.{split}.qrels").write_text("".join(judgements))
    (sources / "recipe.gin").write_text(RECIPE)


def run(*arguments: str) -> None:
    """Runs a command that must succeed."""
    if cli.run(list(arguments)):
        raise SystemExit(f"taser {' '.join(arguments)} failed")


def tidy() -> None:
    """Removes what holds the name of this machine or a path of it, and is not read."""
    for lock in pathlib.Path().rglob(".writer"):
        lock.unlink()
    shutil.rmtree("model/train")
    # Orbax names the folder that it has written.
    for mark in pathlib.Path("model").rglob("commit_success.txt"):
        mark.write_text(mark.read_text().replace(f"{pathlib.Path.cwd()}/", ""))
    for checkpoint in pathlib.Path("model").glob("checkpoint_*"):
        checksums.seal(checkpoint)


def main() -> None:
    """Runs the commands of a project, from its texts to its table."""
    shutil.rmtree(ARTIFACTS, ignore_errors=True)
    ARTIFACTS.mkdir()
    os.chdir(ARTIFACTS)
    write_sources()
    run("prepare", "sources", *COLLECTION)
    add_retrieval_task("places_city", collection="places", task="city")
    run(
        *("tokenize", "--gin.DATA_DIR=data", "--gin.VOCABULARY=vocabulary"),
        "--gin.VOCAB_SIZE=200",
        *("--gin.MIXTURE_OR_TASK_NAME=places_city", "--gin.TOKEN_STORE=tokens"),
        "--gin.TASK_FEATURE_LENGTHS={'query': 12, 'passage': 24}",
    )
    for split in ("train", "test"):
        run(
            *("bm25", *COLLECTION, f"--gin.SPLIT={split}", "--gin.BM25_INDEX_DIR=bm25"),
            *(f"--gin.BM25_RUNS_DIR=runs/bm25-{split}", "--gin.TOP_K=10"),
        )
    run(
        *("mine", *COLLECTION, "--gin.RUNS_DIR=runs/bm25-train", "--gin.NEGATIVES_DIR=negatives"),
        "--gin.MiningConfig.count=3",
    )
    run("train", "--gin_file=sources/recipe.gin")
    # As if training had been killed before its last checkpoint: metrics.jsonl says how it goes on.
    shutil.rmtree("model/checkpoint_6")
    run(
        *("encode", "--gin.MODEL_DIR=model", "--gin.TOKEN_STORE=tokens"),
        "--gin.EMBEDDINGS_DIR=embeddings",
    )
    for kind in ("exact", "scann"):
        run(
            *("search", *COLLECTION, "--gin.EMBEDDINGS_DIR=embeddings", f"--gin.INDEX_DIR={kind}"),
            *(f"--gin.RUNS_DIR=runs/{kind}", f"--gin.IndexConfig.kind={kind}", "--gin.TOP_K=10"),
        )
    shutil.move("runs/exact", "runs/taser-test")
    shutil.rmtree("runs/scann")
    for system, runs_dir in (("BM25", "runs/bm25-test"), ("TASER", "runs/taser-test")):
        run(
            *("evaluate", *COLLECTION, f"--gin.SYSTEM={system}", f"--gin.RUNS_DIR={runs_dir}"),
            *("--gin.EVAL_OUTPUT_DIR=results", "--gin.EvaluationConfig.measures=['R@1', 'MRR@10']"),
        )
    tidy()


if __name__ == "__main__":
    main()
