"""Writes `artifacts/`, one small artefact of every kind, for tests/test_golden_artifacts.py.

    python tests/golden/make_artifacts.py        # replaces all but artifacts/sources/, its input

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
COLLECTION = ("--gin.DATA_DIR=data", "--gin.COLLECTION=places")


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
    os.chdir(ARTIFACTS)
    for folder in {*pathlib.Path().iterdir()} - {pathlib.Path("sources")}:
        shutil.rmtree(folder)
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
