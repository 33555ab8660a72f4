"""What commands say on stderr: in a terminal, in a log file, beside bars."""

import contextlib
import io
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest
from jax._src import hardware_utils

from taser_jax.storage import errors, progress


# Streams are changed in the tests' bodies: pytest sets its own after the fixtures.
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def set_up(monkeypatch):
    """`progress.set_up`, undone afterwards."""
    for name in ("TF_CPP_MIN_LOG_LEVEL", "JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"):
        # Set first, so that what set_up sets is removed again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    loggers = [logging.getLogger(name) for name in ("", "absl", "taser", "noisy")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    yield progress.set_up
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_log_lines_stand_above_a_bar(set_up, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    set_up(verbose=False)
    with contextlib.redirect_stderr(Terminal()) as terminal, progress.bar("train", total=4) as bar:
        bar.update(2)
        logging.getLogger("taser").info("saved")
        bar.update(2)
    lines = [line.split("\r")[-1] for line in terminal.getvalue().splitlines()]
    assert "saved" in lines
    assert "train: 100%" in terminal.getvalue()


def test_a_log_file_has_lines_in_place_of_bars(monkeypatch):
    with contextlib.redirect_stderr(io.StringIO()) as log_file:
        list(progress.track(range(3), "short"))
        assert log_file.getvalue() == ""
        monkeypatch.setattr(progress, "_LINE_PERIOD", 0.0)
        list(progress.track(range(2), "encode", total=2, unit="token"))
        list(progress.track(iter(range(2)), "read"))
    lines = log_file.getvalue().splitlines()
    assert "\r" not in log_file.getvalue()
    assert lines[0].startswith("encode: 0 of 2, ? left, ")
    assert any(line.startswith("encode: 2 of 2, 00:00 left, ") for line in lines)
    assert lines[-1].startswith("read: 2, ")


def test_other_libraries_are_quiet_unless_asked(set_up, monkeypatch):
    monkeypatch.setattr(progress, "_has_accelerator", lambda: False)
    noisy = logging.getLogger("noisy")
    noisy.setLevel(logging.DEBUG)
    with contextlib.redirect_stderr(io.StringIO()) as log_file:
        set_up(verbose=False)
        noisy.debug("noise")
        noisy.warning("a warning")
        logging.getLogger("asyncio").error(
            "never retrieved: <Task of lib/orbax/checkpoint/save.py>"
        )
        logging.getLogger("taser").info("ours")
        assert log_file.getvalue() == "a warning\nours\n"
        set_up(verbose=True)
        noisy.debug("noise")
    assert log_file.getvalue().endswith("noise\n")
    assert (os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["JAX_PLATFORMS"]) == ("3", "cpu")


@pytest.mark.parametrize("verbose", [True, False])
def test_a_machine_with_an_accelerator_is_left_to_jax(set_up, monkeypatch, verbose):
    monkeypatch.setattr(progress, "_has_accelerator", lambda: True)
    set_up(verbose=verbose)
    assert "JAX_PLATFORMS" not in os.environ
    assert ("TF_CPP_MIN_LOG_LEVEL" in os.environ) != verbose


def test_every_gpu_that_jax_looks_for_is_left_to_it(set_up, monkeypatch):
    for device in (*hardware_utils._NVIDIA_GPU_DEVICES, "/dev/kfd"):
        monkeypatch.setattr(os.path, "exists", lambda path, device=device: path == device)
        set_up(verbose=False)
        assert "JAX_PLATFORMS" not in os.environ, device


def test_what_the_user_has_set_stays(set_up, monkeypatch):
    monkeypatch.setattr(progress, "_has_accelerator", lambda: False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    set_up(verbose=False)
    assert (os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["JAX_PLATFORMS"]) == ("0", "tpu,cpu")


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["plain", "unbuffered"])
def test_lines_arrive_as_they_are_written_and_a_closed_terminal_ends_nothing(unbuffered, tmp_path):
    program = (
        "import pathlib; from taser_jax.storage import progress; progress.outlive_terminal(); "
        "progress.say('first'); input(); [progress.say('x' * 100_000) for _ in range(9)]; "
        "print('more'); pathlib.Path('end').touch()"
    )
    environment = {name: value for name, value in os.environ.items() if "UNBUFFERED" not in name}
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment | unbuffered, **pipes
    )
    # Without an answer the program waits: what it has not yet written never comes.
    arrived, _, _ = select.select([process.stderr], [], [], 60)
    assert arrived
    assert process.stderr.readline() == b"first\n"
    # A terminal that is closed does both.
    process.send_signal(signal.SIGHUP)
    process.stdout.close()
    process.stderr.close()
    process.stdin.write(b"go on\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "end").exists()


def test_an_extra_is_installed_into_a_checkout_or_the_package(tmp_path, monkeypatch):
    checkout = pathlib.Path(__file__).resolve().parents[2]
    assert errors.how_to_install("onnx") == f"pip install --editable '{checkout}[onnx]'"
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "taser_jax" / "storage" / "errors.py"))
    assert errors.how_to_install("onnx") == "pip install 'taser_jax[onnx]'"
