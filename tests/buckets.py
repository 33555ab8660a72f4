"""A bucket of Google Cloud Storage, as far as its paths go."""

from __future__ import annotations

import os
import pathlib

import pytest
from etils.epath import backend, gpath


class Bucket(type(backend.os_backend)):
    """A folder that behaves like a bucket: files appear whole, and cannot grow."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.written: list[str] = []

    def _local(self, path) -> str:
        address = str(path)
        assert address.startswith("gs://"), address
        return str(self.folder / address.removeprefix("gs://"))

    def open(self, path, mode):
        if mode.startswith("a"):
            raise NotImplementedError("objects cannot be appended to")
        if mode.startswith("w"):
            self.written.append(str(path))
        return super().open(self._local(path), mode)

    def exists(self, path):
        return super().exists(self._local(path))

    def isdir(self, path):
        return super().isdir(self._local(path))

    def listdir(self, path):
        return super().listdir(self._local(path))

    def makedirs(self, path, **options):
        super().makedirs(self._local(path), **options)

    def mkdir(self, path, **options):
        super().mkdir(self._local(path), **options)

    def stat(self, path):
        return super().stat(self._local(path))

    def walk(self, top, **options):
        for folder, folders, names in os.walk(self._local(top)):
            yield folder.replace(str(self.folder) + "/", "gs://"), folders, names

    def remove(self, path):
        super().remove(self._local(path))

    def rmtree(self, path):
        super().rmtree(self._local(path))

    def rename(self, path, dst):
        super().rename(self._local(path), self._local(dst))

    def replace(self, path, dst):
        super().replace(self._local(path), self._local(dst))


@pytest.fixture
def bucket(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket(tmp_path / "cloud")

    def choose(self):
        return made if self._uri_scheme == "gs" else backend.os_backend

    monkeypatch.setattr(gpath._GPath, "_backend", property(choose))
    return made
