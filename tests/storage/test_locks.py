"""One writer at a time: who is refused, what is said, and what a killed writer leaves."""

import contextlib
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from unittest import mock

import pytest
from disks import read_only
from script_calls import REPOSITORY
from small_world import gin, refused

from taser_jax.cli.command_table import COMMANDS
from taser_jax.storage import publishing
from taser_jax.storage.artifacts import replacing
from taser_jax.storage.errors import BusyError, ConfigError, StorageError
from taser_jax.storage.publishing import LOCK, SCRATCH, one_writer, scratch_of

HOLDER = """
import sys
from taser_jax.storage.artifacts import replacing
from taser_jax.storage.publishing import one_writer
with one_writer(sys.argv[1]):
    scratch = replacing(sys.argv[1] + "/large.npy").__enter__()
    scratch.write_bytes(b"half")
    print("held", flush=True)
    sys.stdin.read()
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY)}
NOBODY = 65534
OWN_KINDS = {
    "tokenize": "token store",
    "mine": "negatives",
    "train": "model",
    "import": "model",
    "memory": "mixture of memories",
    "prepare": "collection",
}
# What they write has a directory of its own, or none that others read.
NOT_ARTEFACTS = {"init", "compile", "plan", "ask", "export", "verify", "serve", "push"}
EVERY_WRITER = pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_ARTEFACTS))
# The functions that write, of commands that do not always.
WRITERS = {"memory": "add_memory", "prepare": "prepare_pydocs"}


@contextlib.contextmanager
def another_process(directory: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes there until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Iterator[tuple[pathlib.Path, int]]:
    directory = tmp_path_factory.mktemp("held") / "inner"
    with another_process(directory) as process:
        yield directory, process.pid


def scratch_files(directory: pathlib.Path) -> list[pathlib.Path]:
    return list((directory / SCRATCH).iterdir())


def test_a_killed_writers_lock_and_scratch_files_go_and_a_users_stay(tmp_path):
    directory = tmp_path / "out"
    with another_process(directory) as process:
        message = rf"(?s)process {process.pid} on .*`taser .*, since 20.*run the same command"
        with pytest.raises(BusyError, match=message), one_writer(directory):
            raise AssertionError("two writers")
        assert len(scratch_files(directory)) == 1
        (directory / ".draft.partial").write_text("mine")
    assert (directory / LOCK).exists(), "a killed process cannot remove it"
    scratch_of(directory).mkdir()
    with one_writer(directory):
        assert not scratch_files(directory)
        assert not scratch_of(directory).exists()
        with one_writer(directory / "." / ""), replacing(directory / "value") as scratch:
            scratch.write_text("1")
            assert scratch_files(directory) == [pathlib.Path(scratch)]
        assert json.loads((directory / LOCK).read_text())["pid"] == os.getpid()
    left = {path.name for path in directory.iterdir()}
    assert left == {".draft.partial", "value", "checksums.txt"}
    assert (directory / ".draft.partial").read_text() == "mine"


def test_what_a_writer_below_is_writing_stays(tmp_path):
    with another_process(tmp_path / "out" / "model"), one_writer(tmp_path / "out"):
        assert len(scratch_files(tmp_path / "out" / "model")) == 1


def refuses_another(directory: str | pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes as a second process would, which holds nothing."""
    message = f"^{directory}: being written by process {os.getpid()} on "
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_held", set())
        with pytest.raises(BusyError, match=message):
            one_writer(directory).__enter__()


def test_a_locked_directory_is_replaced_as_a_whole_under_its_lock(tmp_path, monkeypatch):
    directory = tmp_path / "store"
    directory.mkdir()
    (directory / "old").write_text("old")
    with one_writer(directory), open(directory / "old") as reader:
        with replacing(directory) as scratch:
            scratch.mkdir()
            (scratch / "new").write_text("new")
        assert reader.read() == "old"
        refuses_another(directory, monkeypatch)
        assert {path.name for path in directory.iterdir()} == {"new", LOCK, SCRATCH}
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "new"]


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("../precious"), pathlib.Path.mkdir, os.mkfifo],
    ids=["link", "folder", "fifo"],
)
def test_what_lies_in_the_locks_place_is_named_and_stays(tmp_path, make):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / LOCK)
    with pytest.raises(StorageError, match=r"(?s)\.writer: a link, .*remove it"):
        one_writer(tmp_path / "out").__enter__()
    assert (tmp_path / "precious").read_text() == "mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_and_takes_over_from_a_killed_one(tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    for folder in (tmp_path, *(up for up in tmp_path.parents if "pytest-of-" in str(up))):
        folder.chmod(0o755)

    with another_process(directory) as process:
        assert (directory / LOCK).stat().st_mode & 0o777 == 0o644
        message = f"^{directory}: being written by process "
        with as_nobody(), pytest.raises(BusyError, match=message):
            one_writer(directory).__enter__()
        assert str(process.pid) in (directory / LOCK).read_text()
    with as_nobody(), one_writer(directory):
        assert json.loads((directory / LOCK).read_text())["pid"] == os.getpid()
    assert not (directory / LOCK).exists()


MODEL = "gs://bucket/model"
OTHERS = '{"pid": 7, "host": "b", "command": "taser train", "since": "2026"}'


@pytest.fixture
def lock(bucket, monkeypatch) -> pathlib.Path:
    """The lock of a model in a bucket; it is renewed, and given up, within a second."""
    for name, seconds in (("_RENEWAL", 0.05), ("_PATIENCE", 1.5), ("_SETTLING", 0.1)):
        monkeypatch.setattr(publishing, name, seconds)
    (bucket.folder / "bucket/model").mkdir(parents=True)
    return bucket.folder / "bucket/model" / LOCK


def test_the_second_writer_of_a_bucket_is_refused(lock, monkeypatch):
    with one_writer(MODEL):
        with one_writer(MODEL):
            pass
        refuses_another(MODEL, monkeypatch)
    assert not list(lock.parent.iterdir())


def test_a_killed_writers_lock_in_a_bucket_ends(lock):
    lock.write_text(OTHERS)
    with one_writer(MODEL):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_of_two_that_come_at_once_to_a_bucket_one_stays(lock, monkeypatch):
    """The other has looked before this one wrote, and writes after it."""
    monkeypatch.setattr(time, "sleep", lambda seconds: lock.write_text(OTHERS))
    with pytest.raises(BusyError, match="process 7 on b"):
        one_writer(MODEL).__enter__()
    assert '"pid": 7' in lock.read_text()


def test_a_lock_that_its_holder_is_writing_is_not_gone(lock, monkeypatch):
    lock.write_text(OTHERS)
    overwritten = []

    def holder_writes(seconds: float) -> None:
        overwritten.append(lock.read_text())
        lock.write_text("" if len(overwritten) == 1 else OTHERS.replace("2026", "2027"))

    monkeypatch.setattr(time, "sleep", holder_writes)
    with pytest.raises(BusyError, match=r"process 7 on b .*since 2027"):
        one_writer(MODEL).__enter__()
    assert overwritten[1:] == [""]


def test_a_writer_that_writes_nothing_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="early"), one_writer(tmp_path / "a" / "b"):
        raise ValueError("early")
    assert not list(tmp_path.iterdir())
    with one_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "x").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "x"]


def test_a_directory_that_cannot_be_written_is_read_without_a_lock(tmp_path, monkeypatch, caplog):
    with read_only(tmp_path, monkeypatch), one_writer(tmp_path), one_writer(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
    [said] = caplog.messages
    assert f"{tmp_path}: no lock is possible here (Read-only file system)" in said


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(publishing, "_holder", mock.Mock(side_effect=full))
    with pytest.raises(StorageError, match="No space left"), one_writer(tmp_path / "out"):
        raise AssertionError("not locked")


@EVERY_WRITER
def test_every_command_that_writes_an_artefact_is_its_only_writer(name, held):
    directory, pid = held
    # Only what it writes is locked: nothing else is looked at before.
    with pytest.raises(BusyError, match=f"process {pid} on "):
        write_to(directory, name)


@EVERY_WRITER
def test_a_directory_that_cannot_be_made_is_named_before_any_work(name, tmp_path, monkeypatch):
    directory = tmp_path / "read_only" / "out"
    read_only_disk = pytest.raises(StorageError, match=f"{directory}.*Read-only file system")
    with read_only(tmp_path, monkeypatch), read_only_disk:
        write_to(directory, name)
    (tmp_path / "read_only").write_text("a file in its place")
    message = f"(?s){directory}.*Not a directory.*choose a directory you may write to"
    with pytest.raises(StorageError, match=message):
        write_to(directory, name)


@EVERY_WRITER
@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("metadata.json", '{"kind": "states"}', "states"),
        ("plan.json", '{"kind": "states"}', "states"),
        ("metadata.json", '{"passages_fingerprint": "f"}', "token store"),
        ("metadata.json", '{"files": {}}', "negatives"),
        ("model.json", "{}", "model"),
        ("vocabulary.json", "{}", "vocabulary"),
        ("memories.json", "{}", "mixture of memories"),
        ("passages", "", "collection"),
    ],
)
def test_no_command_overwrites_an_artefact_of_another_kind(name, file, content, kind, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / file).write_text(content)
    if kind == OWN_KINDS.get(name):
        return
    with pytest.raises(ConfigError, match=f"there: {kind} is here already"):
        write_to(tmp_path / "there", name)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", file]
    assert (tmp_path / "there" / file).read_text() == content


def test_a_project_in_a_directory_that_cannot_be_made(tmp_path, capsys):
    """One of those without a lock."""
    (tmp_path / "file").write_text("")
    told = refused(capsys, "init", "FAQ", *gin("init", directory=tmp_path / "file" / "out"))
    assert str(tmp_path / "file" / "out") in told
    assert "choose a directory you may write to" in told


def write_to(directory: pathlib.Path, name: str) -> None:
    """Calls a command's function with that directory, and without what else it needs."""
    command = COMMANDS[name]
    module = importlib.import_module(f"taser_jax.{command.module}")
    function = getattr(module, WRITERS.get(name, command.function))
    arguments = dict.fromkeys(inspect.signature(function).parameters)
    given = dict.fromkeys(["output_dir", "model_dir", "memory_dir", "index_dir"], str(directory))
    given |= {"data_dir": str(directory.parent), "collection": directory.name}
    given |= {"setting": types.SimpleNamespace(output_dir=directory)}
    function(**arguments | {name: given[name] for name in given.keys() & arguments})
