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
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from etils import epath

from taser_jax.storage import publishing
from taser_jax.storage.errors import BusyError, StorageError, storage_errors
from taser_jax.storage.progress import logger

# On a read-only disk or one without locks the command goes on: it may have nothing to write, and a
# write that fails says so itself.
_UNLOCKABLE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
    *(errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.ENOSYS),
)
# O_NONBLOCK: a FIFO in the lock's place would be waited for.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_COMMAND_LENGTH = 300
# Seconds: a holder in a bucket renews its lock so often; one that has not for so long is dead; and
# of two that came at once, both see the later one's after so long.
_RENEWAL, _PATIENCE, _SETTLING = 15.0, 50.0, 1.0
_held: dict[str, int] = {}


@contextlib.contextmanager
def one_writer(directory: publishing.FilePath) -> Iterator[None]:
    """Makes this process the only writer of a directory; it may take the lock several times.

    The lock is the kernel's (`flock`) on the file `.writer`, so a process that is killed loses
    it at once. Whoever takes it removes the scratch files that a killed writer left.

    In a bucket (gs://) it is an object `.writer` that its holder renews: a killed one's is free
    after 50 seconds without renewal.

    Args:
        directory: created where absent, and removed at the end if it is then empty.

    Raises:
        BusyError: another process writes there; says which, where and since when.
        StorageError: the disk is full, or the directory is absent and cannot be made.
    """
    remote = publishing.is_remote(directory)
    name = os.fspath(directory).rstrip("/") if remote else os.path.realpath(directory)
    if name in _held:
        _held[name] += 1
        try:
            yield
        finally:
            _held[name] -= 1
        return
    with _leased(epath.Path(name)) if remote else _locked(pathlib.Path(name)):
        _held[name] = 1
        try:
            yield
        finally:
            del _held[name]


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    # Refused before the command computes anything.
    with storage_errors(directory):
        made = publishing.make_folder(directory)
    handle = _take(directory)
    try:
        if handle is not None:
            _remove_scratch(directory)
            with contextlib.suppress(OSError):
                (directory / publishing.SCRATCH).mkdir()
        yield
    finally:
        if handle is not None:
            _remove_scratch(directory)
            with contextlib.suppress(OSError):
                (directory / publishing.LOCK).unlink()
            os.close(handle)
        for empty in reversed(made):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _remove_scratch(directory: pathlib.Path) -> None:
    for scratch in (directory / publishing.SCRATCH, publishing.scratch_of(directory)):
        shutil.rmtree(scratch, ignore_errors=True)


def _take(directory: pathlib.Path) -> int | None:
    """The locked file; None where no lock is possible."""
    path = directory / publishing.LOCK
    while True:
        handle = None
        try:
            with storage_errors(path):
                handle, is_mine = _open(path)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have removed it between the two calls.
                if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                    if is_mine:
                        os.truncate(handle, 0)
                        os.pwrite(handle, json.dumps(_holder()).encode(), 0)
                        return handle
                    # What a killed process of another user left.
                    path.unlink()
        except BlockingIOError as error:
            assert handle is not None
            said = os.pread(handle, 1 << 16, 0).decode(errors="replace")
            os.close(handle)
            raise _busy(directory, said) from error
        except Exception as error:
            if handle is not None:
                os.close(handle)
            if _number(error) not in _UNLOCKABLE:
                raise
            logger.warning(
                "%s: no lock is possible here (%s): make sure that nothing else writes it",
                *(directory, os.strerror(_number(error) or 0)),
            )
            return None
        os.close(handle)


def _open(path: pathlib.Path) -> tuple[int, bool]:
    """The lock's file, open, and whether it can be written; locking needs no such permission."""
    try:
        handle, is_mine = os.open(path, _FLAGS | os.O_RDWR | os.O_CREAT, 0o666), True
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _in_the_way(path) from error
        if not isinstance(error, PermissionError) or not path.exists():
            raise
        handle, is_mine = os.open(path, _FLAGS | os.O_RDONLY), False
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _in_the_way(path)
    return handle, is_mine


def _in_the_way(path: pathlib.Path) -> StorageError:
    return StorageError(
        "a link, a folder or a device, which this package did not make",
        where=str(path),
        expected="the file of the lock, or nothing",
        fix="remove it, or choose another directory",
    )


def _number(error: Exception) -> int | None:
    return getattr(error.__cause__ or error, "errno", None)


def _holder() -> dict[str, str | int]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(["taser", *sys.argv[1:]])[:_COMMAND_LENGTH],
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _busy(directory: publishing.FilePath, text: str) -> BusyError:
    try:
        holder = json.loads(text)
        who = "process {pid} on {host} (`{command}`), since {since}".format(**holder)
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return BusyError(
        f"being written by {who}",
        where=os.fspath(directory),
        fix="wait until it has ended or end it, then run the same command again; or choose another "
        "directory",
    )


@contextlib.contextmanager
def _leased(directory: epath.Path) -> Iterator[None]:
    """A lock in a bucket, whose holder shows by rewriting it that it lives."""
    path, own, ended = directory / publishing.LOCK, uuid.uuid4().hex, threading.Event()
    holder = {**_holder(), "id": own}

    def said() -> str | None:
        try:
            return path.read_text()
        except FileNotFoundError:
            return None

    def renew() -> None:
        path.write_text(json.dumps({**holder, "renewed": time.time()}))

    def is_mine() -> bool:
        return own in (said() or "")

    def keep() -> None:
        while not ended.wait(_RENEWAL):
            try:
                if not is_mine():
                    logger.error("%s: another process has taken the lock: end one of them", path)
                    return
                renew()
            except Exception as error:
                logger.warning("%s: the lock could not be renewed: %s", path, error)

    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _await_silence(directory, said)
        renew()
        time.sleep(_SETTLING)
        if not is_mine():
            raise _busy(directory, said() or "")
    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        with contextlib.suppress(OSError):
            if is_mine():
                path.unlink()


def _await_silence(directory: epath.Path, said: Callable[[], str | None]) -> None:
    """Waits until a lock is gone or its holder seems dead.

    Raises:
        BusyError: the holder has renewed it meanwhile.
    """
    if (first := said()) is None:
        return
    logger.info("%s: locked; waiting up to %d s for a sign of life", directory, _PATIENCE)
    until = time.monotonic() + _PATIENCE
    # An empty lock is one that its holder is writing.
    while (now := said()) is not None and time.monotonic() < until:
        if now and now != first:
            raise _busy(directory, now)
        time.sleep(_SETTLING)
