"""Stand-ins for gcloud and xpk, and a checkout that holds what must not be sent."""

from __future__ import annotations

import pathlib
import shutil

import pytest
from launch_stubs import LAUNCH, Stubs


@pytest.fixture
def stubs(tmp_path) -> Stubs:
    return Stubs(tmp_path)


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    """A small checkout with an environment, history, data and runs."""
    root = tmp_path / "my checkout"
    shutil.copytree(LAUNCH, root / "launch")
    for name in (
        *("setup.py", "pyproject.toml", "gin_configs/runs/taser_base.gin"),
        *("taser_jax/data/token_store/store.py", "taser_jax/__pycache__/cli.pyc"),
        *("taser_jax.egg-info/PKG-INFO", ".git/HEAD"),
        *(".venv/bin/python", "venv311/pyvenv.cfg", ".mypy_cache/3.11/x", ".ci/run"),
        *("runs/local/model/weights", "data/passages/ids.npy", "workspace/x", "build/x", "a.log"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


@pytest.fixture
def sent(checkout) -> set[str]:
    """The files of `checkout` that are to be sent."""
    launch = {f"launch/{path.name}" for path in LAUNCH.iterdir() if path.is_file()}
    return launch | {
        *("setup.py", "pyproject.toml", "gin_configs/runs/taser_base.gin"),
        *("taser_jax/data/token_store/store.py", ".ci/run"),
    }
