"""What faults.py and host_faults.py share: the commands, what must stay the same, and notes."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

# After the two settings above: JAX reads one when it is imported, and the path finds the others.
import jax  # noqa: E402
from bert_checkpoints import write_with_vocabulary  # noqa: E402
from small_world import SmallWorld, gin  # noqa: E402
from written_files import beir  # noqa: E402

# Re-exported: they are found only where this module has been imported.
__all__ = ["SmallWorld", "beir", "gin", "write_with_vocabulary"]

# Artefacts without times in them; the table is compared without how long training took.
_COMPARED = (".trec", ".npy", ".csv", ".array_record-00000")
_NEGATIVES = "negatives/*.jsonl"
_ORPHANS = (".writer", ".taser-scratch", ".*.taser-*", "*.partial", "*-tmp*")


def pipeline(world: pathlib.Path, name: str) -> list[str]:
    """The pipeline whose faults are tried: one system, two rounds."""
    given = SmallWorld(world).compare(world / name, "--gin.pipeline_taser.hybrid_systems=[]")
    return [
        *(argument for argument in given if "taser/" not in argument),
        "--gin.pipeline_taser.systems={'DPR': @dpr/System()}",
        "--gin.CHECKPOINT_PERIOD=2",
    ]


def environment(root: pathlib.Path, *folders: pathlib.Path, **more: str) -> dict[str, str]:
    """Variables of a command of a trial.

    Args:
        root: holds what JAX has compiled.
        folders: searched for modules before the repository.
        more: further variables.
    """
    paths = (*folders, REPOSITORY, REPOSITORY / "tests")
    compiled = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | compiled | more


def bits(output: pathlib.Path) -> dict[str, str]:
    """File -> digest, of what must be the same."""
    files = [path for path in output.rglob("*") if path.name.endswith(_COMPARED)]
    files += output.rglob(_NEGATIVES)
    return {str(path.relative_to(output)): _digest(path) for path in sorted(files)}


def _digest(path: pathlib.Path) -> str:
    if path.name != "table.csv":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with open(path, newline="", encoding="utf-8") as file:
        return json.dumps([{**line, "training": ""} for line in csv.DictReader(file)])


def orphans(world: pathlib.Path) -> list[str]:
    """Locks, scratch files and unfinished checkpoints."""
    leftovers = {path for name in _ORPHANS for path in world.rglob(name)}
    return sorted(str(path.relative_to(world)) for path in leftovers)


class Notes:
    """Lines of a file, one for each trial; a later run goes on after them.

    Args:
        path: the file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def add(self, **line: object) -> None:
        """Writes and prints a line."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        print(*line.values(), flush=True)

    def has(self, **values: object) -> bool:
        """Whether a line has all of these values."""
        return any(values.items() <= line.items() for line in self.lines)


def shares(codes: Iterable[int | None]) -> str:
    """Exit codes with their counts."""
    exit_codes: Sequence[int] = [code for code in codes if code is not None]
    return ", ".join(f"{code}: {exit_codes.count(code)}" for code in sorted({*exit_codes})) or "-"


def machine(seconds: float) -> str:
    """What a table was measured with, and the seconds of the pipeline undisturbed."""
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    return f"{os.cpu_count()} cores, {versions}; {seconds:.1f} s undisturbed."
