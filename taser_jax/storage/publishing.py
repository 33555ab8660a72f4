"""Scratch places, and the step that puts what is finished there in the place of the old.

Whatever the moment of a kill or of a power cut, the old content is there or the new, whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pathlib
import time
import uuid
from collections.abc import Iterator

from etils import epath

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
            # The writer keeps its lock, which is the file's.
            os.link(place / LOCK, new / LOCK)
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
