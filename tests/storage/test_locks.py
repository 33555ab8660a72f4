"""One writer at a time: who is refused, what is said, and what a killed writer leaves."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
from disks import read_only

from taser_jax.cli import main as cli
from taser_jax.cli.command_table import COMMANDS
from taser_jax.storage.artifacts import replacing
from taser_jax.storage.errors import BusyError, StorageError
from taser_jax.storage.locks import LOCK, one_writer

HOLDER = """
import sys
from taser_jax.storage.artifacts import replacing
from taser_jax.storage.locks import one_writer
with one_writer(sys.argv[1]):
    scratch = replacing(sys.argv[1] + "/large.npy").__enter__()
    scratch.write_bytes(b"half")
    print("held", flush=True)
    sys.stdin.read()
"""
# What they write has a directory of its own, or none that others read.
NOT_ARTEFACTS = {
    "init",
    "compile",
    "plan",
    "ask",
    "export",
    "verify",
    "gin",
    "serve",
}


@contextlib.contextmanager
def another_process(directory: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes there until it is killed."""
    root = pathlib.Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pathlib.Path, int]]:
    directory = tmp_path_factory.mktemp("held") / "inner"
    with another_process(directory) as process:
        yield directory, process.pid


def test_a_killed_writers_lock_and_scratch_files_go(tmp_path: pathlib.Path):
    directory = tmp_path / "out"
    with another_process(directory) as process:
        with pytest.raises(BusyError) as caught, one_writer(directory):
            raise AssertionError("two writers")
        message = str(caught.value)
        for said in (f"process {process.pid} on ", "`taser ", ", since 20", "run the same command"):
            assert said in message
        assert len(list(directory.glob(".*.partial"))) == 1
    assert (directory / LOCK).exists(), "a killed process cannot remove it"
    with one_writer(directory):
        assert not list(directory.glob(".*.partial"))
        with one_writer(directory / "." / ""), replacing(directory / "value") as scratch:
            scratch.write_text("1")
        assert json.loads((directory / LOCK).read_text())["pid"] == os.getpid()
    assert [path.name for path in directory.iterdir()] == ["value"]


def test_what_a_writer_below_is_writing_stays(tmp_path: pathlib.Path):
    with another_process(tmp_path / "out" / "model"), one_writer(tmp_path / "out"):
        assert len(list((tmp_path / "out" / "model").glob(".*.partial"))) == 1


def test_a_writer_that_writes_nothing_leaves_nothing(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="early"), one_writer(tmp_path / "a" / "b"):
        raise ValueError("early")
    assert not list(tmp_path.iterdir())
    with one_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "x").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "x"]


def test_a_directory_that_cannot_be_written_is_read_without_a_lock(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    with one_writer("gs://bucket/model"):
        pass
    with read_only(tmp_path, monkeypatch), one_writer(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("taser_jax.storage.locks._holder", full)
    with pytest.raises(StorageError, match="No space left"), one_writer(tmp_path / "out"):
        raise AssertionError("not locked")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_ARTEFACTS))
def test_every_command_that_writes_an_artefact_is_its_only_writer(
    name: str, held: tuple[pathlib.Path, int]
):
    directory, pid = held
    # Only what it writes is locked: nothing else is looked at before.
    with pytest.raises(BusyError, match=f"process {pid} on "):
        write_to(directory, name)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_ARTEFACTS))
def test_a_directory_that_cannot_be_made_is_named_before_anything_is_computed(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    directory = tmp_path / "read_only" / "out"
    with (
        read_only(tmp_path, monkeypatch),
        pytest.raises(StorageError, match="Read-only file system") as caught,
    ):
        write_to(directory, name)
    assert str(directory) in str(caught.value)
    (tmp_path / "read_only").write_text("a file in its place")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        write_to(directory, name)
    assert str(directory) in str(caught.value)
    assert "choose a directory you may write to" in str(caught.value)


def test_a_project_in_a_directory_that_cannot_be_made(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    """One of those without a lock."""
    (tmp_path / "file").write_text("")
    assert cli.run(["init", "FAQ", f"--gin.init.directory={tmp_path / 'file' / 'out'}"]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "file" / "out") in told
    assert "choose a directory you may write to" in told


def write_to(directory: pathlib.Path, name: str) -> None:
    """Calls a command's function with that directory, and without what else it needs."""
    command = COMMANDS[name]
    # Listing memories writes nothing.
    function_name = "add_memory" if name == "memory" else command.function
    function = getattr(importlib.import_module(f"taser_jax.{command.module}"), function_name)
    arguments = dict.fromkeys(inspect.signature(function).parameters)
    given = {
        "output_dir": str(directory),
        "model_dir": str(directory),
        "memory_dir": str(directory),
        "index_dir": str(directory),
        "data_dir": str(directory.parent),
        "collection": directory.name,
        "setting": types.SimpleNamespace(output_dir=directory),
    }
    arguments |= {name: value for name, value in given.items() if name in arguments}
    function(**arguments)


def test_the_command_line_refuses_the_second(
    held: tuple[pathlib.Path, int], capsys: pytest.CaptureFixture[str]
):
    directory, pid = held
    arguments = ["vocab", f"--gin.VOCABULARY={directory}", "--gin.COLLECTION=c"]
    assert cli.run([*arguments, f"--gin.DATA_DIR={directory.parent}"]) == 2
    assert f"process {pid} on " in capsys.readouterr().err
