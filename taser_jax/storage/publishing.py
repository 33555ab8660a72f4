"""One writer at a time, its scratch places, and the step that puts what is finished in place.

A lock in the directory that is being written names its holder. Whatever the moment of a kill or of
a power cut, the old content is there or the new, whole.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from taser_jax.storage.errors import BusyError, StorageError, storage_errors
from taser_jax.storage.progress import logger

FilePath = str | os.PathLike[str]
# A directory that a writer has locked has the lock, and its unfinished files, which the next writer
# removes.
LOCK = ".writer"
SCRATCH = ".taser-scratch"
_AT_WORKING_DIRECTORY, _RENAME_EXCHANGE = -100, 2
# Disks that exchange no names, or sync no directories, say so with one of these.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
# Seconds that are worth telling.
_LONG = 1.0

_is_synced = True
_files, _seconds = 0, 0.0
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
_held: set[str] = set()


@contextlib.contextmanager
def syncing(is_synced: bool) -> Iterator[None]:
    """Sets whether files reach the disk (fsync) before they replace others, and tells the cost."""
    global _is_synced, _files, _seconds
    former, _is_synced, _files, _seconds = _is_synced, is_synced, 0, 0.0
    try:
        yield
    finally:
        _is_synced = former
        if _seconds > _LONG:
            logger.info(
                "fsync of %s files and folders took %.1f s; --no_fsync leaves it out",
                *(f"{_files:,}", _seconds),
            )


def cache_folder(*names: str) -> pathlib.Path:
    """A place in this user's cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches, "taser_jax", *names)


def is_remote(path: FilePath) -> bool:
    """Whether the path has a scheme, such as gs://."""
    return "://" in os.fspath(path)


def sync(path: FilePath) -> None:
    """Waits until a local file, or a directory with all that is in it, is on the disk."""
    for place, _, names in os.walk(path):
        for name in names:
            sync_one(os.path.join(place, name))
        sync_one(place)
    if not os.path.isdir(path):
        sync_one(path)


def sync_one(path: FilePath) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    global _files, _seconds
    if not _is_synced or not os.path.exists(path):
        return
    began = time.monotonic()
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)
    _files, _seconds = _files + 1, _seconds + time.monotonic() - began


def make_folder(path: FilePath) -> list[pathlib.Path]:
    """Creates a local directory with its parents; returns those that it created, top first."""
    folder = pathlib.Path(path)
    made = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        # Some folders may be written and not read.
        with contextlib.suppress(PermissionError):
            sync_one(each.parent)
    return made


def scratch_for(target: epath.Path) -> epath.Path:
    """A free path on the target's disk: in the nearest locked directory above it, or beside it."""
    name = uuid.uuid4().hex[:8]
    if not is_remote(target):
        if is_folder(target / SCRATCH):
            return epath.Path(scratch_of(target))
        if is_folder(target):
            # Who may not write there, may not replace it.
            (target / SCRATCH).mkdir()
            (target / SCRATCH).rmdir()
        folder = pathlib.Path(os.path.realpath(target.parent))
        for above in (folder, *folder.parents):
            place = above / SCRATCH
            if is_folder(place) and place.stat().st_dev == folder.stat().st_dev:
                return epath.Path(place / name)
    return target.with_name(f".{name}.partial")


def scratch_of(directory: FilePath) -> pathlib.Path:
    """The place beside a locked directory where its writer builds what replaces it."""
    place = pathlib.Path(os.path.realpath(directory))
    return place.with_name(f".{place.name}{SCRATCH}")


def is_folder(path: FilePath) -> bool:
    """Whether a directory, and no link to one, is there."""
    return os.path.isdir(path) and not os.path.islink(path)


def publish(scratch: FilePath, target: FilePath) -> None:
    """Puts a finished file or directory in the place of another of its kind.

    Processes that have files of the old one open keep reading these.

    Args:
        scratch: what is finished; gone afterwards, or what the target was before.
        target: local or gs://; a link to a directory stands for that directory.
    """
    new, place = epath.Path(scratch), epath.Path(target)
    if is_remote(place):
        if place.is_dir():
            _set_aside(new, place)
        else:
            new.replace(place)
        return
    sync(new)
    if new.is_dir() and place.exists():
        place = epath.Path(os.path.realpath(place))
        if is_folder(place / SCRATCH):
            try:
                # The writer keeps its lock, which is the file's.
                os.link(place / LOCK, new / LOCK)
            except OSError as error:
                # link(2): EPERM on disks without hard links, such as FAT. What is done counts more.
                logger.warning("%s: the lock cannot be kept here (%s)", place, error.strerror)
            (new / SCRATCH).mkdir()
        if not _exchange(new, place):
            _set_aside(new, place)
    else:
        os.replace(new, place)
    sync_one(place.parent)
    _aside(place).rmtree(missing_ok=True)


def _exchange(new: epath.Path, place: epath.Path) -> bool:
    """Exchanges two names in one step; False where the system or the disk cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here = _AT_WORKING_DIRECTORY
    if rename and not rename(here, bytes(new), here, bytes(place), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if rename and number not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number), os.fspath(place))
    return False


def _set_aside(new: epath.Path, place: epath.Path) -> None:
    """Replaces in two steps; a kill between them leaves the old one beside its place."""
    _aside(place).rmtree(missing_ok=True)
    place.rename(_aside(place))
    new.rename(place)
    _aside(place).rmtree()


def _aside(place: epath.Path) -> epath.Path:
    return place.with_name(f".{place.name}.taser-old")


@contextlib.contextmanager
def one_writer(directory: FilePath) -> Iterator[None]:
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
    remote = is_remote(directory)
    name = os.fspath(directory).rstrip("/") if remote else os.path.realpath(directory)
    if name in _held:
        yield
        return
    with _leased(epath.Path(name)) if remote else _locked(pathlib.Path(name)):
        _held.add(name)
        try:
            yield
        finally:
            _held.remove(name)


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    # Refused before the command computes anything.
    with storage_errors(directory):
        made = make_folder(directory)
    handle = _take(directory)
    try:
        if handle is not None:
            _remove_scratch(directory)
            with contextlib.suppress(OSError):
                (directory / SCRATCH).mkdir()
        yield
    finally:
        if handle is not None:
            _remove_scratch(directory)
            with contextlib.suppress(OSError):
                (directory / LOCK).unlink()
            os.close(handle)
        for empty in reversed(made):
            with contextlib.suppress(OSError):
                empty.rmdir()


def _remove_scratch(directory: pathlib.Path) -> None:
    for scratch in (directory / SCRATCH, scratch_of(directory)):
        shutil.rmtree(scratch, ignore_errors=True)


def _take(directory: pathlib.Path) -> int | None:
    """The locked file; None where no lock is possible."""
    path = directory / LOCK
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


def _busy(directory: FilePath, text: str) -> BusyError:
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
    path, own, ended = directory / LOCK, uuid.uuid4().hex, threading.Event()
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
    """Waits until a lock is gone or its holder seems dead; refuses one that lives."""
    if (first := said()) is None:
        return
    logger.info("%s: locked; waiting up to %d s for a sign of life", directory, _PATIENCE)
    until = time.monotonic() + _PATIENCE
    # An empty lock is one that its holder is writing.
    while (now := said()) is not None and time.monotonic() < until:
        if now and now != first:
            raise _busy(directory, now)
        time.sleep(_SETTLING)
