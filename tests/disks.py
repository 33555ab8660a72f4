"""Disks that change bytes, or do not take what is written."""

import builtins
import contextlib
import errno
import io
import itertools
import os
import pathlib
import resource
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

_CHANGES = ("mkdir", "rename", "replace", "remove", "unlink", "rmdir")


def flip(path: pathlib.Path, position: int = -1) -> None:
    """Changes one byte, and neither size nor, as bad disks do, the time of change."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def killed_at_call(number: int, function: Callable[..., Any]) -> mock.Mock:
    """The function, which a kill ends at its call of this number."""
    before, after = itertools.repeat(mock.DEFAULT, number - 1), itertools.repeat(mock.DEFAULT)
    calls = itertools.chain(before, [KeyboardInterrupt], after)
    return mock.Mock(wraps=function, side_effect=calls)


@contextlib.contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond so many bytes: EFBIG, in the middle of a write."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@contextlib.contextmanager
def read_only(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python changes nothing below a folder: EROFS. Permissions would not stop root."""

    def check(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and pathlib.Path(path).is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            # As the kernel has it, what is there already, or is not there, comes first.
            if call is not real_mkdir or not os.path.exists(path):
                check(path)
            return call(path, *args, **kwargs)

        return change

    def refused_os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            check(path)
        return real_os_open(path, flags, *args, **kwargs)

    def refused_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            check(path)
        return real_open(path, mode, *args, **kwargs)

    real_open, real_os_open, real_mkdir = builtins.open, os.open, os.mkdir
    with monkeypatch.context() as patch:
        for name in _CHANGES:
            patch.setattr(os, name, refused(getattr(os, name)))
        patch.setattr(os, "open", refused_os_open)
        patch.setattr(builtins, "open", refused_open)
        patch.setattr(io, "open", refused_open)
        yield
