"""Stand-ins for gcloud and xpk, and a git checkout that holds what must not be sent."""

import os
import pathlib
import shutil
import subprocess

import pytest
from launch_stubs import LAUNCH, Stubs
from written_files import write

IN_GIT = (
    *("setup.py", "pyproject.toml", "gin_configs/runs/taser_base.gin"),
    *("taser_jax/data/token_store/store.py", ".ci/run"),
)
ELSEWHERE = (
    *("taser_jax/__pycache__/cli.pyc", "taser_jax.egg-info/PKG-INFO", "gin_configs/mine.gin"),
    *(".venv/bin/python", "venv311/pyvenv.cfg", ".mypy_cache/3.11/x"),
    *(".env", "service-account.json", "results/run.tsv", "taser_jax/.env"),
    *("runs/local/model/weights", "data/passages/ids.npy", "workspace/x", "build/x", "a.log"),
)


@pytest.fixture
def stubs(tmp_path, monkeypatch, capfd) -> Stubs:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Stubs(tmp_path, capfd)


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A small checkout with an environment, keys, data and runs; a file of git is deleted."""
    root = tmp_path / "my checkout"
    shutil.copytree(LAUNCH, root / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*IN_GIT, "taser_jax/deleted.py", *ELSEWHERE):
        write(root / name, name)
    for words in (["init", "--quiet"], ["add", "launch", *IN_GIT, "taser_jax/deleted.py"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    (root / "taser_jax" / "deleted.py").unlink()
    return root


@pytest.fixture
def sent(checkout) -> set[str]:
    """The files of `checkout` that are to be sent."""
    launch = {f"launch/{path.name}" for path in LAUNCH.iterdir() if path.is_file()}
    return launch | set(IN_GIT)
