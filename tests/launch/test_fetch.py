"""launch/_fetch.py, which copies data to a host."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from launch_stubs import LAUNCH

pytestmark = pytest.mark.slow

LARGE = 1 << 20
# Sources are older than their copies.
LONG_AGO = (10**9, 10**9)


_SPEC = importlib.util.spec_from_file_location("launch_fetch", LAUNCH / "_fetch.py")
_FETCH = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FETCH)


def fetch(*arguments: object) -> int:
    return _FETCH.main([str(argument) for argument in arguments])


def write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, LONG_AGO)


@pytest.fixture
def store(tmp_path) -> pathlib.Path:
    """Something like a token store: two arrays, a vocabulary and the metadata."""
    root = tmp_path / "tokens"
    for name in ("passages/ids.npy", "queries/qa/train/ids.npy"):
        write(root / name, b"1" * LARGE)
    write(root / "vocabulary" / "vocab.txt", b"a\n")
    write(root / "metadata.json", b'{"fingerprint": "1"}')
    return root


def content(root: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_arrays_that_are_there_are_not_copied_again(tmp_path, store, capsys):
    for copied in (4, 1):
        assert fetch(store, tmp_path / "data") == 0
        assert capsys.readouterr().out.startswith(f"{copied} files copied")
    assert content(tmp_path / "data") == content(store)


def make_again(store: pathlib.Path) -> None:
    """Another store, of files of the same sizes."""
    for name in ("passages/ids.npy", "queries/qa/train/ids.npy"):
        write(store / name, b"2" * LARGE)
    write(store / "vocabulary" / "vocab.txt", b"b\n")
    write(store / "metadata.json", b'{"fingerprint": "2"}')


def test_a_file_newer_than_its_copy_is_copied_again(tmp_path, store):
    """Metadata of mined negatives say what they were mined from, not what was found."""
    fetch(store, tmp_path / "data")
    (store / "passages" / "ids.npy").write_bytes(b"2" * LARGE)
    fetch(store, tmp_path / "data")
    assert content(tmp_path / "data") == content(store)


def test_copying_that_was_cut_off_resumes(tmp_path, store):
    """What it copied stays; what is of the earlier store does not pass for copied."""
    data = tmp_path / "data"
    fetch(store, data)
    make_again(store)
    # Passages are copied first; queries cannot be.
    obstacle = data / "queries" / "qa" / "train" / "ids.npy.partial"
    obstacle.mkdir()
    assert fetch(store, data) == 2
    assert not (data / "metadata.json").exists()
    obstacle.rmdir()
    copied = (data / "passages" / "ids.npy").stat().st_mtime_ns
    assert fetch(store, data) == 0
    assert (data / "passages" / "ids.npy").stat().st_mtime_ns == copied
    assert content(data) == content(store)


def test_a_wrong_address_is_the_users_to_mend(tmp_path, capsys):
    command = [sys.executable, str(LAUNCH / "_fetch.py"), str(tmp_path / "no"), str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"error: {tmp_path / 'no'}: not a directory")
    assert "fix: correct the address" in completed.stderr
    assert fetch(tmp_path) == 2
    assert "usage: python launch/_fetch.py" in capsys.readouterr().err
