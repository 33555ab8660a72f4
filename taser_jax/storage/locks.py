"""One writer at a time: a lock in the directory that is being written, which names its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from typing import IO

from taser_jax.storage.artifacts import PARTIAL, FilePath, is_remote, storage_errors
from taser_jax.storage.errors import BusyError
from taser_jax.storage.progress import logger

LOCK = ".writer"
# On a read-only disk or one without locks the command goes on: it may have nothing to write, and a
# write that fails says so itself.
_UNLOCKABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOLCK, errno.ENOTSUP)
_COMMAND_LENGTH = 300
_held: dict[str, int] = {}


@contextlib.contextmanager
def one_writer(directory: FilePath) -> Iterator[None]:
    """Makes this process the only writer of a directory; it may take the lock several times.

    The lock is the kernel's (`flock`) on the file `.writer`, so a process that is killed loses
    it at once. Whoever takes it removes the scratch files that a killed writer left.

    In a bucket (gs://) there is no lock: every object is replaced whole, and the last writer wins.
    Of two trainings in one MODEL_DIR, a step's checkpoint is that of the later one.

    Args:
        directory: created where absent, and removed at the end if it is then empty.

    Raises:
        BusyError: another process writes there; says which, where and since when.
        StorageError: the disk is full, or the directory is absent and cannot be made.
    """
    if is_remote(directory):
        yield
        return
    name = os.path.realpath(directory)
    if name in _held:
        _held[name] += 1
        try:
            yield
        finally:
            _held[name] -= 1
        return
    made = _make(pathlib.Path(name))
    file = _take(pathlib.Path(name))
    if file is not None:
        _held[name] = 1
    try:
        if file is not None:
            remove_scratch(name)
        yield
    finally:
        if file is not None:
            del _held[name]
            (pathlib.Path(name) / LOCK).unlink(missing_ok=True)
            file.close()
        for empty in reversed(made):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _make(directory: pathlib.Path) -> list[pathlib.Path]:
    """Creates a directory with its parents; returns those that it created, top first."""
    made = [one for one in (directory, *directory.parents) if not one.exists()][::-1]
    # Refused before the command computes anything.
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return made


def _take(directory: pathlib.Path) -> IO[bytes] | None:
    """The locked file, open; None where no lock is possible."""
    path = directory / LOCK
    while True:
        file = None
        try:
            with storage_errors(path):
                # Unbuffered; on a full disk the holder may be cut off, which the writes report.
                file = open(path, "a+b", buffering=0)  # noqa: SIM115
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have removed it between the two calls.
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    file.truncate(0)
                    file.write(json.dumps(_holder()).encode())
                    return file
        except BlockingIOError as error:
            assert file is not None
            file.seek(0)
            raise _busy(directory, file.read().decode()) from error
        except Exception as error:
            if file is not None:
                file.close()
            if _number(error) not in _UNLOCKABLE:
                raise
            logger.debug("%s: written without a lock: %s", directory, error)
            return None
        file.close()


def _number(error: Exception) -> int | None:
    return getattr(error.__cause__ or error, "errno", None)


def _holder() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(["taser", *sys.argv[1:]])[:_COMMAND_LENGTH],
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _busy(directory: pathlib.Path, text: str) -> BusyError:
    try:
        holder = json.loads(text)
        who = "process {pid} on {host} (`{command}`), since {since}".format(**holder)
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return BusyError(
        f"being written by {who}",
        where=str(directory),
        fix="wait until it has ended or end it, then run the same command again; or choose another "
        "directory",
    )


def remove_scratch(directory: FilePath) -> None:
    """Removes the scratch files of killed writers; not below a directory with a lock of its own."""
    for place, folders, files in os.walk(directory):
        if place != os.fspath(directory) and LOCK in files:
            folders.clear()
            continue
        for name in [name for name in folders if _is_scratch(name)]:
            folders.remove(name)
            shutil.rmtree(os.path.join(place, name), ignore_errors=True)
        for name in filter(_is_scratch, files):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(place, name))


def _is_scratch(name: str) -> bool:
    return name.startswith(".") and name.endswith(PARTIAL)
