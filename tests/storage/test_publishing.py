"""What replaces what, in which order it reaches the disk, and what a kill leaves."""

import ctypes
import errno
import os
import pathlib
from unittest import mock

import pytest
from disks import killed_at_call

from taser_jax.storage import publishing
from taser_jax.storage.artifacts import replacing, write_json, write_text
from taser_jax.storage.errors import StorageError


def replace_folder(path: pathlib.Path, content: str) -> None:
    with replacing(path) as scratch:
        scratch.mkdir()
        (scratch / "content").write_text(content)


def test_a_folder_is_replaced_in_one_step(tmp_path, monkeypatch):
    """Nothing is removed or renamed while the old one is in place: there is only the exchange."""
    path = tmp_path / "folder"
    replace_folder(path, "old")
    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(os, name, lambda *_: pytest.fail("a second step"))
        replace_folder(path, "new")
    assert (path / "content").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("killed_at", [1, 2])
def test_without_exchange_a_kill_leaves_the_old_one(tmp_path, monkeypatch, killed_at):
    """As on NFS, and where the C library has no renameat2."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    path = tmp_path / "folder"
    replace_folder(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed_at_call(killed_at, os.rename))
        with pytest.raises(KeyboardInterrupt):
            replace_folder(path, "new")
    assert "old" in [file.read_text() for file in tmp_path.rglob("content")]
    replace_folder(path, "newest")
    assert [file.read_text() for file in tmp_path.rglob("content")] == ["newest"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_without_hard_links_gets_what_is_finished(tmp_path, monkeypatch, caplog, number):
    """As FAT and some FUSE file systems are."""
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with publishing.one_writer(tmp_path / "folder"):
        replace_folder(tmp_path / "folder", "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "content"]
    assert f"folder: the lock cannot be kept here ({os.strerror(number)})" in caplog.text


def test_a_link_stands_for_its_folder_and_is_replaced_as_a_file(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "precious").write_text("mine")
    link = tmp_path / "link"
    link.symlink_to("large disk")
    replace_folder(link, "new")
    assert (tmp_path / "large disk" / "content").read_text() == "new"
    assert link.is_symlink()
    (tmp_path / "a.txt").symlink_to("precious")
    write_text(tmp_path / "a.txt", "ours")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "a.txt").read_text() == "ours"


def test_a_file_does_not_replace_a_folder(tmp_path):
    (tmp_path / "table.md" / "kept").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"(?s)table\.md: could not write: Is a directory"):
        write_text(tmp_path / "table.md", "x")
    assert (tmp_path / "table.md" / "kept").is_dir()
    assert {path.name for path in tmp_path.iterdir()} <= {"table.md", "checksums.txt"}


def plain(path: str) -> str:
    """A name; that of a scratch file is random."""
    name = pathlib.Path(path).name
    return "scratch" if name.endswith(".partial") else name


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    """Syncs and renames as they happen, by the name of file or folder."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append(f"sync {plain(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def renamed(source: str, target: str) -> None:
        done.append(f"rename {plain(source)} {plain(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return done


def test_a_file_is_on_the_disk_before_its_name_and_that_before_the_next(tmp_path, steps):
    write_text(tmp_path / "a.txt", "x")
    assert steps == [
        step
        for name in ("checksums.txt", "a.txt", "checksums.txt")
        for step in ("sync scratch", f"rename scratch {name}", f"sync {tmp_path.name}")
    ]


def test_a_folder_is_on_the_disk_with_all_that_is_in_it(tmp_path, steps):
    replace_folder(tmp_path / "folder", "x")
    order = ["sync content", "sync scratch", "rename scratch folder", f"sync {tmp_path.name}"]
    assert steps == order


def test_no_disk_is_waited_for_unless_told(tmp_path, steps, monkeypatch, caplog):
    caplog.set_level("INFO")
    with publishing.syncing(False):
        write_json(tmp_path / "a.json", {})
    assert not [step for step in steps if step.startswith("sync")]
    assert not caplog.records
    clock = iter(range(1000))
    monkeypatch.setattr(publishing.time, "monotonic", lambda: float(next(clock)))
    with publishing.syncing(True):
        write_json(tmp_path / "a.json", {})
    assert "fsync of 6 files and folders took 6.0 s; --no_fsync leaves it out" in caplog.text
