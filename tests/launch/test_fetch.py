"""launch/_fetch.py, which copies data to a host."""

import os
import pathlib
import subprocess
import sys

import _fetch
import pytest
from launch_stubs import LAUNCH
from written_files import contents, write

pytestmark = pytest.mark.slow


def fetch(*arguments: object) -> int:
    return _fetch.main(*map(str, arguments))


def write_store(root: pathlib.Path, mark: str, *, time: int = 10**9) -> None:
    """Something like a token store: two arrays, a vocabulary and the metadata."""
    files = dict.fromkeys(("passages/ids.npy", "queries/qa/train/ids.npy"), mark * 2**20)
    files |= {"vocabulary/vocab.txt": f"{mark}\n", "metadata.json": f'{{"fingerprint": "{mark}"}}'}
    for name, text in files.items():
        os.utime(write(root / name, text), (time, time))


@pytest.fixture
def store(tmp_path) -> pathlib.Path:
    write_store(tmp_path / "tokens", "1")
    return tmp_path / "tokens"


def test_arrays_that_are_there_are_not_copied_again(tmp_path, store, capsys):
    for copied in (4, 0):
        assert fetch(store, tmp_path / "data") == 0
        assert capsys.readouterr().out.startswith(f"{copied} files copied")
    assert contents(tmp_path / "data") == contents(store)


def test_a_store_made_again_is_copied_again_and_copying_that_was_cut_off_resumes(tmp_path, store):
    """Files of the same sizes; what was copied stays."""
    data = tmp_path / "data"
    fetch(store, data)
    write_store(store, "2", time=10**9 + 1)
    # Metadata and passages are copied first; queries cannot be.
    obstacle = data / "queries" / "qa" / "train" / "ids.npy.partial"
    obstacle.mkdir()
    assert fetch(store, data) == 2
    obstacle.rmdir()
    copied = (data / "passages" / "ids.npy").stat().st_mtime_ns
    assert fetch(store, data) == 0
    assert (data / "passages" / "ids.npy").stat().st_mtime_ns == copied
    assert contents(data) == contents(store)


def test_a_full_disk_is_named(tmp_path, store, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json.partial").symlink_to("/dev/full")
    assert fetch(store, tmp_path / "data") == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"error: {tmp_path / 'data'}: could not write: No space left")
    assert told[2].startswith("  fix: free some space")
    assert len(told) == 3


def test_a_wrong_address_is_the_users_to_mend(tmp_path):
    command = [sys.executable, str(LAUNCH / "_fetch.py"), str(tmp_path / "no"), str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"error: {tmp_path / 'no'}: not a directory")
    assert "fix: correct the address" in completed.stderr
