"""A bucket of Google Cloud Storage, as far as its paths go."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from etils.epath import backend, gpath


def _on_disk(name: str) -> Callable[..., Any]:
    """A function of the backend of local paths, for paths of the bucket."""
    function = getattr(backend.os_backend, name)

    def call(bucket: Bucket, *paths: Any, **options: Any) -> Any:
        return function(*map(bucket.local, paths), **options)

    return call


class Bucket(type(backend.os_backend)):
    """A folder that behaves like a bucket: files appear whole, and cannot grow."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def local(self, path: Any) -> str:
        """The file of an address."""
        address = str(path)
        assert address.startswith("gs://"), address
        return str(self.folder / address.removeprefix("gs://"))

    def open(self, path, mode):
        if mode.startswith("a"):
            raise NotImplementedError("objects cannot be appended to")
        return super().open(self.local(path), mode)

    def walk(self, top, **options):
        for folder, folders, names in os.walk(self.local(top)):
            yield folder.replace(str(self.folder) + "/", "gs://"), folders, names

    exists = _on_disk("exists")
    isdir = _on_disk("isdir")
    listdir = _on_disk("listdir")
    makedirs = _on_disk("makedirs")
    mkdir = _on_disk("mkdir")
    stat = _on_disk("stat")
    remove = _on_disk("remove")
    rmtree = _on_disk("rmtree")
    rename = _on_disk("rename")
    replace = _on_disk("replace")


@pytest.fixture
def bucket(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket(tmp_path / "cloud")

    def choose(self):
        return made if self._uri_scheme == "gs" else backend.os_backend

    monkeypatch.setattr(gpath._GPath, "_backend", property(choose))
    return made
