"""Artefacts: atomic writes, messages of failed ones, versions, fingerprints."""

import errno
import os
import pathlib

import numpy as np
import pytest

from taser_jax.storage import artifacts
from taser_jax.storage.errors import DataError, StorageError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_storage_errors_say_what_to_do(number):
    advice = "free some space" if number in (errno.ENOSPC, errno.EDQUOT) else "permissions"
    told = pytest.raises(StorageError, match=f"(?s)out/x: could not write.*fix: .*{advice}")
    with told, artifacts.storage_errors("out/x"):
        raise OSError(number, os.strerror(number))


def test_storage_errors_leaves_other_errors_alone():
    with pytest.raises(FileNotFoundError), artifacts.storage_errors("x"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(ValueError, match="mine"), artifacts.storage_errors("x"):
        raise ValueError("mine")
    with pytest.raises(StorageError, match="No space left"), artifacts.storage_errors("x"):
        raise RuntimeError("write() failed: No space left on device")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "below" / "value.json"
    artifacts.write_json(path, {"é": 1})
    assert artifacts.read_json(path) == {"é": 1}
    killed = pytest.raises(KeyboardInterrupt)
    with killed, artifacts.replacing(path) as scratch:
        scratch.write_text("{")
        raise KeyboardInterrupt
    assert artifacts.read_json(path) == {"é": 1}
    assert {file.name for file in path.parent.iterdir()} == {"checksums.txt", "value.json"}


def test_an_absent_file_and_a_later_version_are_named(tmp_path):
    path = tmp_path / "value.json"
    with pytest.raises(DataError, match=r"value\.json: no such file"):
        artifacts.read_json(path)
    path.write_text('{"format_version": 2}')
    with pytest.raises(DataError, match=r"(?s)value\.json: format version 2.*version 1.*again"):
        artifacts.check_version(artifacts.read_json(path), 1, where=path, fix="make it again")


def test_fingerprints_are_of_content_and_order():
    array = np.arange(6, dtype=np.int32)
    parts = ["a", b"b", 3, array]
    assert artifacts.fingerprint(parts) == artifacts.fingerprint(list(parts))
    others = [["ab", 3, array], parts[::-1], ["a", b"b", 3, array.reshape(2, 3)]]
    others.append(["a", b"b", 3, array.astype(np.int64)])
    assert artifacts.fingerprint(parts) not in map(artifacts.fingerprint, others)
    first, second = {"a": 1, "b": [2]}, {"b": [2], "a": 1}
    assert artifacts.fingerprint_json(first) == artifacts.fingerprint_json(second)
    # Written on disk by earlier versions: must never change.
    assert artifacts.fingerprint(["a", 1, array]) == "f5fcdb4553f03b8a"


def test_the_file_of_a_split_is_in_its_folder_whatever_the_task_is_called():
    assert artifacts.split_path("runs", "nq", "test", ".trec") == pathlib.Path("runs/nq.test.trec")
    assert artifacts.split_path("runs", "../a b", "test").name == "..%2Fa%20b.test"
