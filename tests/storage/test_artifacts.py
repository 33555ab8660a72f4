"""Artefacts: atomic writes, messages of failed ones, versions, fingerprints."""

import errno
import os
import pathlib
import sys
from collections.abc import Callable

import numpy as np
import pytest

from taser_jax.assembly.text_sources import Registered
from taser_jax.storage.artifacts import (
    check_version,
    fingerprint,
    fingerprint_json,
    read_json,
    replacing,
    split_path,
    storage_errors,
    write_json,
)
from taser_jax.storage.errors import DataError, StorageError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_storage_errors_say_what_to_do(number):
    expected = pytest.raises(StorageError, match="out/x: could not write")
    with expected as caught, storage_errors("out/x"):
        raise OSError(number, os.strerror(number))
    advice = "free some space" if number in (errno.ENOSPC, errno.EDQUOT) else "permissions"
    assert advice in (caught.value.fix or "")


def test_storage_errors_leaves_other_errors_alone():
    with pytest.raises(FileNotFoundError), storage_errors("x"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(ValueError, match="mine"), storage_errors("x"):
        raise ValueError("mine")
    with pytest.raises(StorageError, match="No space left"), storage_errors("x"):
        raise RuntimeError("write() failed: No space left on device")


def test_a_file_or_folder_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "below" / "value.json"
    write_json(path, {"é": 1})
    assert read_json(path) == {"é": 1}

    def killed() -> None:
        with replacing(path) as scratch:
            scratch.write_text("{")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert read_json(path) == {"é": 1}
    for content in ("old", "new"):
        with replacing(tmp_path / "folder") as scratch:
            scratch.mkdir()
            (scratch / content).touch()
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["new"]
    assert sorted(file.name for file in tmp_path.rglob("*")) == [
        *("below", "checksums.txt", "folder", "new", "value.json")
    ]


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "value.json"
    with pytest.raises(DataError, match=r"value\.json: no such file"):
        read_json(path)
    for text, message in (("{", "not JSON"), ("[1]", "expected an object"), ("\xff", "JSON")):
        path.write_bytes(text.encode("latin1"))
        with pytest.raises(DataError, match=message):
            read_json(path, fix="make it again")
    path.write_text('{"format_version": 2}')
    with pytest.raises(DataError, match=r"(?s)value\.json: format version 2.*version 1.*again"):
        check_version(read_json(path), 1, where=path, fix="make it again")


def test_fingerprints_are_of_content_and_order():
    array = np.arange(6, dtype=np.int32)
    parts = ["a", b"b", 3, array]
    assert fingerprint(parts) == fingerprint(list(parts))
    others = [["ab", 3, array], parts[::-1], ["a", b"b", 3, array.reshape(2, 3)]]
    others.append(["a", b"b", 3, array.astype(np.int64)])
    assert fingerprint(parts) not in map(fingerprint, others)
    assert fingerprint_json({"a": 1, "b": [2]}) == fingerprint_json({"b": [2], "a": 1})
    # Written on disk by earlier versions: must never change.
    assert fingerprint(["a", 1, array]) == "f5fcdb4553f03b8a"


def test_the_file_of_a_split_is_in_its_folder_whatever_the_task_is_called():
    assert split_path("runs", "nq", "test", ".trec") == pathlib.Path("runs/nq.test.trec")
    assert split_path("runs", "../a b", "test").name == "..%2Fa%20b.test"


def test_the_module_that_fills_a_place_is_imported_when_it_is_asked_for(tmp_path, monkeypatch):
    place: Registered[Callable[[int], int]] = Registered("twice_for_a_test")
    sys_path = tmp_path / "twice_for_a_test.py"
    sys_path.write_text("import sys\nsys.place.register(lambda number: 2 * number)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "place", place, raising=False)
    assert "twice_for_a_test" not in sys.modules
    assert place.get()(21) == 42
