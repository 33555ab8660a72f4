"""Killed at any step, also in the middle of a save, the same command gives the same bits."""

import contextlib
import fcntl
import os
import pathlib
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny_command

from taser_jax.storage.errors import EXIT_PREEMPTED

pytestmark = pytest.mark.slow

STEPS = 60


@pytest.fixture(scope="module")
def command(tmp_path_factory, tiny_store_dir) -> tiny_command.TinyCommand:
    command = tiny_command.TinyCommand(tmp_path_factory.mktemp("command"), tiny_store_dir, STEPS)
    command.prepare()
    return command


@pytest.fixture(scope="module")
def uninterrupted(command) -> pathlib.Path:
    model_dir = command.folder / "uninterrupted"
    done = command.run(model_dir)
    assert done.returncode == 0, done.stderr
    return model_dir


def last_step_written(model_dir: pathlib.Path) -> int:
    path = model_dir / "metrics.jsonl"
    steps = re.findall(r'"step": (\d+)[,}]', path.read_text()) if path.exists() else []
    return int(steps[-1]) if steps else 0


def unfinished(model_dir: pathlib.Path) -> set[pathlib.Path]:
    return set(model_dir.glob("*.orbax-checkpoint-tmp"))


def has_reached(model_dir: pathlib.Path, step: int) -> bool:
    return last_step_written(model_dir) >= step


def is_saving(model_dir: pathlib.Path, before: set[pathlib.Path]) -> bool:
    return bool(unfinished(model_dir) - before)


def signal_when(
    process: subprocess.Popen[str], number: signal.Signals, holds: Callable[..., bool], *given: Any
) -> int:
    """Sends a signal the moment a condition holds; the exit code then."""
    while not holds(*given):
        assert process.poll() is None, f"ended before the signal: {process.stderr.read()}"
        time.sleep(0.0005)
    process.send_signal(number)
    process.communicate(timeout=300)
    return process.returncode


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


@pytest.mark.parametrize(
    ("steps", "saves"),
    [
        pytest.param((17,), 1, id="a step and a save"),
        # Step 3 is before the first checkpoint.
        pytest.param((3, 17), 2, id="steps and saves", marks=pytest.mark.release),
    ],
)
def test_killed_again_and_again_also_in_the_middle_of_a_save(command, uninterrupted, steps, saves):
    model_dir = command.folder / f"killed-{saves}"
    for step in steps:
        process = command.start(model_dir)
        assert signal_when(process, signal.SIGKILL, has_reached, model_dir, step) == -signal.SIGKILL
        assert not (model_dir / f"checkpoint_{STEPS}").exists()
    in_a_save = 0
    for _ in range(6):
        process = command.start(model_dir)
        # Left by the kill before, until the new process has cleaned up.
        before = unfinished(model_dir)
        signal_when(process, signal.SIGKILL, is_saving, model_dir, before)
        # Only a kill that left the save unfinished counts.
        in_a_save += is_saving(model_dir, before)
        if in_a_save == saves:
            break
    assert in_a_save == saves
    assert not (model_dir / f"checkpoint_{STEPS}").exists()
    done = command.run(model_dir)
    assert done.returncode == 0, done.stderr
    assert "resuming after step" in done.stderr
    assert not unfinished(model_dir)
    assert_same(model_dir, uninterrupted)


@pytest.mark.release
def test_sigterm_saves_and_exits_with_its_own_code(command, uninterrupted):
    model_dir = command.folder / "preempted"
    process = command.start(model_dir)
    assert signal_when(process, signal.SIGTERM, has_reached, model_dir, 23) == EXIT_PREEMPTED
    saved = model_dir.glob("checkpoint_*")
    newest = max(int(path.name.removeprefix("checkpoint_")) for path in saved)
    assert 23 <= newest < STEPS
    assert last_step_written(model_dir) == newest
    done = command.run(model_dir)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {newest} of {STEPS}" in done.stderr
    assert_same(model_dir, uninterrupted)


@pytest.mark.release
def test_a_closed_terminal_does_not_end_a_training(command, uninterrupted):
    """A process that leads the terminal's session gets SIGHUP, too, when it is closed."""
    model_dir = command.folder / "terminal"
    reading, writing = pty.openpty()

    def lead() -> None:
        fcntl.ioctl(writing, termios.TIOCSCTTY, 0)

    streams = {"stdin": writing, "stdout": writing, "stderr": writing}
    process = command.start(model_dir, **streams, start_new_session=True, preexec_fn=lead)
    os.close(writing)
    os.set_blocking(reading, False)
    while not has_reached(model_dir, 7):
        assert process.poll() is None
        with contextlib.suppress(BlockingIOError):
            # What nobody reads fills the terminal's buffer, and the training waits.
            os.read(reading, 2**16)
        time.sleep(0.0005)
    os.close(reading)
    assert process.wait(timeout=300) == 0
    assert_same(model_dir, uninterrupted)
