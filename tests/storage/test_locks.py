"""One writer at a time: who is refused, what is said, and what a killed writer leaves."""

import contextlib
import importlib
import inspect
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import pytest
from disks import read_only

from taser_jax.cli import main as cli
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
HOLDS_LOCK = re.compile(rf"being written by process {os.getpid()} on ")
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
# The functions that write, of commands that do not always.
WRITERS = {"memory": "add_memory", "prepare": "prepare_pydocs"}


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
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


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
        with pytest.raises(BusyError) as caught, one_writer(directory):
            raise AssertionError("two writers")
        message = str(caught.value)
        for said in (f"process {process.pid} on ", "`taser ", ", since 20", "run the same command"):
            assert said in message
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
    assert {path.name for path in directory.iterdir()} == {
        *(".draft.partial", "value", "checksums.txt")
    }
    assert (directory / ".draft.partial").read_text() == "mine"


def test_what_a_writer_below_is_writing_stays(tmp_path):
    with another_process(tmp_path / "out" / "model"), one_writer(tmp_path / "out"):
        assert len(scratch_files(tmp_path / "out" / "model")) == 1


def test_a_locked_directory_is_replaced_as_a_whole_under_its_lock(tmp_path):
    directory = tmp_path / "store"
    directory.mkdir()
    (directory / "old").write_text("old")
    with one_writer(directory), open(directory / "old") as reader:
        with replacing(directory) as scratch:
            scratch.mkdir()
            (scratch / "new").write_text("new")
        assert reader.read() == "old"
        assert HOLDS_LOCK.search(refusal(directory))
        assert {path.name for path in directory.iterdir()} == {"new", LOCK, SCRATCH}
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "new"]


def refusal(directory: pathlib.Path) -> str:
    """What a second process is told."""
    code = "import sys; from taser_jax.storage.publishing import one_writer\n"
    code += "with one_writer(sys.argv[1]): print('free')"
    told = subprocess.run(
        [sys.executable, "-c", code, str(directory)],
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
    )
    return told.stdout + told.stderr


def make_link(path: pathlib.Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


@pytest.mark.parametrize(
    "make", [make_link, pathlib.Path.mkdir, os.mkfifo], ids=["link", "folder", "fifo"]
)
def test_what_lies_in_the_locks_place_is_named_and_stays(tmp_path, make):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / LOCK)
    with pytest.raises(StorageError, match=r"(?s)\.writer: a link, .*remove it"):
        one_writer(tmp_path / "out").__enter__()
    assert (tmp_path / "precious").read_text() == "mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_and_takes_over_from_a_killed_one(tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    for folder in (tmp_path, *(up for up in tmp_path.parents if "pytest-of-" in str(up))):
        folder.chmod(0o755)

    def as_nobody() -> str:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.setgroups([])
            os.setegid(65534)
            os.seteuid(65534)
            try:
                with one_writer(directory):
                    told = (directory / LOCK).read_text()
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(write, told.encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read) as pipe:
            return pipe.read()

    with another_process(directory) as process:
        assert (directory / LOCK).stat().st_mode & 0o777 == 0o644
        assert as_nobody().startswith(f"BusyError: {directory}: being written by process ")
        assert str(process.pid) in (directory / LOCK).read_text()
    assert f'"pid": {os.getpid()}' not in (told := as_nobody())
    assert '"pid": ' in told
    assert not (directory / LOCK).exists()


@pytest.fixture
def quick(monkeypatch) -> None:
    """Locks in buckets that are renewed, and given up, within a second."""
    for name, seconds in (("_RENEWAL", 0.05), ("_PATIENCE", 1.5), ("_SETTLING", 0.1)):
        monkeypatch.setattr(publishing, name, seconds)


def test_the_second_writer_of_a_bucket_is_refused(bucket, quick, monkeypatch):
    address = "gs://bucket/model"
    with one_writer(address):
        with one_writer(address):
            pass
        # As another process would, which holds nothing.
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "_held", set())
            with pytest.raises(
                BusyError, match=f"{address}: being written by process {os.getpid()} "
            ):
                one_writer(address).__enter__()
    assert not list((bucket.folder / "bucket/model").iterdir())


def test_a_killed_writers_lock_in_a_bucket_ends(bucket, quick):
    left = bucket.folder / "bucket/model" / LOCK
    left.parent.mkdir(parents=True)
    left.write_text('{"pid": 1, "host": "gone", "command": "taser train", "since": "2026"}')
    with one_writer("gs://bucket/model"):
        assert json.loads(left.read_text())["pid"] == os.getpid()


def test_of_two_that_come_at_once_to_a_bucket_one_stays(bucket, quick, monkeypatch):
    """The other has looked before this one wrote, and writes after it."""
    path = bucket.folder / "bucket/model" / LOCK
    settle = time.sleep

    def other_writes(seconds: float) -> None:
        path.write_text('{"pid": 7, "host": "b", "command": "taser train", "since": "2026"}')
        settle(0)

    monkeypatch.setattr(time, "sleep", other_writes)
    with pytest.raises(BusyError, match="process 7 on b"):
        one_writer("gs://bucket/model").__enter__()
    assert '"pid": 7' in path.read_text()


def test_a_lock_that_its_holder_is_writing_is_not_gone(bucket, quick, monkeypatch):
    path = bucket.folder / "bucket/model" / LOCK
    path.parent.mkdir(parents=True)
    path.write_text('{"pid": 7, "host": "b", "command": "taser train", "since": "2026"}')
    renewed = path.read_text().replace("2026", "2027")
    overwritten = []

    def holder_writes(seconds: float) -> None:
        overwritten.append(path.read_text())
        path.write_text("" if len(overwritten) == 1 else renewed)

    monkeypatch.setattr(time, "sleep", holder_writes)
    with pytest.raises(BusyError, match=r"process 7 on b .*since 2027"):
        one_writer("gs://bucket/model").__enter__()
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
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f"{tmp_path}: no lock is possible here (Read-only file system)" in said[0]


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("taser_jax.storage.publishing._holder", full)
    with pytest.raises(StorageError, match="No space left"), one_writer(tmp_path / "out"):
        raise AssertionError("not locked")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_ARTEFACTS))
def test_every_command_that_writes_an_artefact_is_its_only_writer(name, held):
    directory, pid = held
    # Only what it writes is locked: nothing else is looked at before.
    with pytest.raises(BusyError, match=f"process {pid} on "):
        write_to(directory, name)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_ARTEFACTS))
def test_a_directory_that_cannot_be_made_is_named_before_anything_is_computed(
    name, tmp_path, monkeypatch
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


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NOT_ARTEFACTS))
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
    assert cli.run(["init", "FAQ", f"--gin.init.directory={tmp_path / 'file' / 'out'}"]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "file" / "out") in told
    assert "choose a directory you may write to" in told


def write_to(directory: pathlib.Path, name: str) -> None:
    """Calls a command's function with that directory, and without what else it needs."""
    command = COMMANDS[name]
    module = importlib.import_module(f"taser_jax.{command.module}")
    function = getattr(module, WRITERS.get(name, command.function))
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
