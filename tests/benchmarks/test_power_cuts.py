"""benchmarks/power_cuts.py: what it notes of a program, and what its replay leaves on the disk."""

import pathlib
import shutil
import sys

import pytest
from script_calls import load_script
from written_files import contents, write

# Replaces a file by another, whose content it syncs or not, and then syncs the folder.
PROGRAM = """
import os, pathlib, sys
folder, synced = pathlib.Path(sys.argv[1]), sys.argv[2] == "synced"
with open(folder / "new", "w") as file:
    file.write("new")
    file.flush()
    if synced:
        os.fsync(file.fileno())
os.replace(folder / "new", folder / "name")
handle = os.open(folder, os.O_RDONLY)
os.fsync(handle)
"""


power_cuts = load_script("power_cuts.py")


def content(disk: pathlib.Path) -> str:
    return (disk / "name").read_text() or "nothing"


@pytest.fixture
def before(tmp_path):
    return write(tmp_path / "before" / "name", "old").parent


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("how", "expected"), [("synced", {"old", "new"}), ("unsynced", {"old", "nothing"})]
)
def test_a_rename_without_fsync_is_noticed(before, tmp_path, how, expected):
    shutil.copytree(before, tmp_path / "folder")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "folder"), how]
    notes = power_cuts.recorded(command, tmp_path / "folder", tmp_path / "notes")
    kinds = [kind for kind, _, _ in notes]
    assert kinds == ["file", *(["sync"] if how == "synced" else []), "rename", "sync"]
    outcomes = power_cuts.outcomes(notes, tmp_path / "folder", before, content)
    outcomes = {name: set(words) for name, words in outcomes.items()}
    assert outcomes == {"synced names": expected, "all names": expected}


def test_names_that_were_not_synced_are_lost(before, tmp_path):
    """A name reaches the disk with its folder, and the folder with the one above it."""
    whole = write(tmp_path / "copy", "new")
    root = pathlib.Path("/world")
    notes = [
        ("folder", "/world/a", ""),
        ("file", "/world/a/name", ""),
        ("sync", "/world/a/name", str(whole)),
        ("sync", "/world/a", ""),
        ("exchange", "/world/a/name", "/world/name"),
        ("sync", "/world", ""),
        ("remove", "/world/a/name", ""),
        ("rename", "/world/a", "/world/b"),
    ]

    def files(count: int, *, all_names: bool) -> dict[str, bytes]:
        target = tmp_path / f"{count}{all_names}"
        power_cuts.Disk(root, before).play(notes[:count]).write(target, all_names=all_names)
        return contents(target)

    assert files(2, all_names=True) == {"name": b"old", "a/name": b""}
    assert files(4, all_names=False) == {"name": b"old"}
    assert files(5, all_names=True) == {"name": b"new", "a/name": b"old"}
    assert files(5, all_names=False) == {"name": b"old"}
    assert files(6, all_names=False) == {"name": b"new", "a/name": b"new"}
    assert files(8, all_names=True) == {"name": b"new"}
