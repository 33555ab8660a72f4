"""Killed at any step, also in the middle of a save, the same command gives the same bits."""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import tiny_command
import tiny_training
from small_world import gin

pytestmark = pytest.mark.slow

STEPS = 60
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def start(model_dir: pathlib.Path, token_store: pathlib.Path) -> subprocess.Popen[str]:
    """The real `taser train`; its Gin file and compiled programs lie beside the model."""
    folder = model_dir.parent
    (folder / "tiny.gin").write_text(tiny_training.GIN_FILE)
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "taser_jax.cli.main", "train"),
            f"--gin_file={folder / 'tiny.gin'}",
            *gin(MODEL_DIR=model_dir, TOKEN_STORE=token_store, TRAIN_STEPS=STEPS),
        ],
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def run(model_dir: pathlib.Path, token_store: pathlib.Path) -> str:
    """Runs it to its end; what it said."""
    process = start(model_dir, token_store)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return told


def last_step_written(model_dir: pathlib.Path) -> int:
    path = model_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def unfinished(model_dir: pathlib.Path) -> set[str]:
    names = os.listdir(model_dir) if model_dir.exists() else []
    return {name for name in names if name.endswith(".orbax-checkpoint-tmp")}


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Kills it the moment a condition holds."""
    while not condition():
        assert process.poll() is None, f"ended before it was killed: {process.stderr.read()}"
        time.sleep(0.0005)
    process.kill()
    process.communicate(timeout=300)


def assert_same(model_dir: pathlib.Path, uninterrupted: pathlib.Path) -> None:
    expected = tiny_command.final_state(uninterrupted, STEPS)
    state = tiny_command.final_state(model_dir, STEPS)
    assert state.keys() == expected.keys()
    assert any(name.startswith("params/") for name in state)
    assert any(name.startswith("opt_state/") for name in state)
    for name, value in expected.items():
        assert value.tobytes() == state[name].tobytes(), name
    metrics = tiny_command.metrics_by_step(model_dir)
    assert list(metrics) == list(range(1, STEPS + 1))
    assert metrics == tiny_command.metrics_by_step(uninterrupted)


def test_killed_again_and_again_also_in_the_middle_of_a_save(tmp_path, tiny_store_dir):
    uninterrupted, model_dir = tmp_path / "uninterrupted", tmp_path / "killed"
    run(uninterrupted, tiny_store_dir)
    # Step 3 is before the first checkpoint.
    kill_when(start(model_dir, tiny_store_dir), lambda: last_step_written(model_dir) >= 3)
    kill_when(start(model_dir, tiny_store_dir), lambda: last_step_written(model_dir) >= 17)
    for _ in range(6):
        process = start(model_dir, tiny_store_dir)
        # Left by the kill before, until the new process has cleaned up.
        before = unfinished(model_dir)
        kill_when(process, lambda before=before: bool(unfinished(model_dir) - before))
        # Only a kill that left the save unfinished counts.
        if unfinished(model_dir) - before:
            break
    assert unfinished(model_dir) - before
    assert not (model_dir / f"checkpoint_{STEPS}").exists()
    assert "resuming after step" in run(model_dir, tiny_store_dir)
    assert not unfinished(model_dir)
    assert_same(model_dir, uninterrupted)
