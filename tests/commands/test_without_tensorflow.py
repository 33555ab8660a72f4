"""An installation without TensorFlow runs a project: from files to a table and answers."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import without_tensorflow
from small_world import SIX_STEPS, SmallWorld, figures, gin
from written_files import tsv

from taser_jax.data.token_store.store import TokenStore

pytestmark = pytest.mark.slow

TOPICS = ("river", "castle", "violin", "comet", "glacier", "beetle", "harbour", "orchard")
SPLITS = {"train": range(5), "validation": range(5, 6), "test": range(6, 8)}
# What a user would change in the project's file, here so that it takes seconds.
SMALLER = [
    *SIX_STEPS,
    *gin("ExpertConfig", shared_per_specialized=1),
    *gin("ValidationConfig", pool=None),
    *gin(VOCAB_SIZE=150, TASK_FEATURE_LENGTHS={"query": 16, "passage": 24}),
]


def run(folder: pathlib.Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs commands, the last of which may fail, in one process that has no TensorFlow."""
    return subprocess.run(
        [sys.executable, without_tensorflow.__file__, json.dumps(commands)],
        cwd=folder,
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
            # Its own faq_tasks.py comes before that of another test.
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def project(command: str, *arguments: str) -> list[str]:
    """A command with the project's file alone, and what only this run changes."""
    return [command, "--gin_file=faq.gin", "--gin_file=smaller.gin", *arguments]


def write_files(folder: pathlib.Path) -> None:
    """Two tasks over 64 passages: each question asks for the passage that has two words."""
    asked = {
        f"{task}.{split}": {
            f"{task}{a}{b}": (f"{words} {TOPICS[a]} with a {TOPICS[b]}", f"{a}-{b}")
            for a in range(8)
            for b in numbers
        }
        for task, words in (("where", "where is the"), ("what", "what of the"))
        for split, numbers in SPLITS.items()
    }
    passages = {
        f"{a}-{b}": f"The {first} lies beside a {second} and is old."
        for a, first in enumerate(TOPICS)
        for b, second in enumerate(TOPICS)
    }
    tsv(folder, passages, asked)


def test_from_files_to_a_table_with_one_gin_file(small_world: SmallWorld, tmp_path: pathlib.Path):
    write_files(tmp_path / "faq")
    lines = [flag.removeprefix("--gin.") for flag in SMALLER]
    (tmp_path / "smaller.gin").write_text("\n".join(lines))
    (tmp_path / "own_code.py").write_text(
        "from taser_jax.tasks import add_retrieval_task\n"
        "add_retrieval_task('own', collection='c', query_preprocessors=[lambda data: data])\n"
    )
    done = run(
        tmp_path,
        ["init", "FAQ", *gin("init", tasks=["where", "what"])],
        project("prepare"),
        project("tokenize", "--gin_import=faq_tasks"),
        *(project("bm25", *gin(SPLIT=split)) for split in SPLITS),
        project("mine", *gin(RUNS_DIR="faq/bm25/runs")),
        project("train", *gin(NEGATIVES_DIRS=["faq/negatives"])),
        project("encode"),
        *(project("search", *gin(SPLIT=split)) for split in ("validation", "test")),
        project("evaluate"),
        project("evaluate", *gin(RUNS_DIR="faq/bm25/runs", SYSTEM="BM25")),
        project("hybrid"),
        project("ask", *gin(QUESTIONS=["where is the comet"])),
        small_world.tokenize(tmp_path / "again"),
        # The only one that is refused.
        [
            *small_world.tokenize(tmp_path / "refused"),
            *gin(MIXTURE_OR_TASK_NAME="own", MIXTURE_OR_TASK_MODULE="own_code"),
        ],
    )
    assert "not installed (No module named 'seqio')\n  expected: both" in done.stderr, done.stderr
    assert "[tensorflow]'\ntaser tokenize" in done.stderr
    assert "? where is the comet" in done.stdout
    rows = {
        row["system"]: row for row in figures(tmp_path / "faq/results") if row["task"] == "what"
    }
    assert rows.keys() == {"TASER", "BM25"}
    assert float(rows["BM25"]["R@20"]) > 0.5
    assert len(list((tmp_path / "faq/hybrid").glob("*.trec"))) == 2
    here = TokenStore.open(small_world.token_store).metadata
    assert TokenStore.open(tmp_path / "again").metadata == here
