"""Sizes and checksums of an artefact's files, in a `checksums.txt` beside them.

    8f3a1c07 5120128 passages/ids.npy

A line is the file's CRC-32 in hexadecimal, its bytes and its name, below the folder of
`checksums.txt`. While a file is being replaced it has two lines, the former one (`absent` for a
new file) and its own, and either is right: a kill leaves no file that seems damaged.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence

from etils import epath

from taser_jax.storage import publishing
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger
from taser_jax.storage.publishing import FilePath, is_remote

FILE = "checksums.txt"
Record = tuple[int, str]
"""A file's bytes and checksum."""
ABSENT: Record = 0, "absent"

# No file has a size of more digits.
_LINE = re.compile(r"(absent|[0-9a-f]{8}) (\d{1,19}) (.+)")
_BLOCK = 1 << 22
# Files from this size on are compared once per change: an empty file in the user's cache says so.
_LARGE = 1 << 26
# Logs, which grow, and are no part of any artefact.
_LOGS = re.compile(r"metrics\.jsonl|events\.out\.tfevents\..*|.*\.log")
# A folder with one of these is an artefact, or a part of one.
_MARKS = {"metadata.json", "plan.json", "model.json", "vocabulary.json", "manifest.ocdbt"}
# Damaged files that a message names.
_SHOWN = 20
# What this process has compared, and the folders it has warned of.
_compared: set[str] = set()
_warned: set[str] = set()


def crc(path: FilePath) -> str:
    """A file's CRC-32 in hexadecimal.

    Example:
        The standard's check value: "123456789" gives cbf43926.
    """
    value = 0
    with epath.Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def found(path: FilePath) -> Record:
    """A file as it is; `ABSENT` where there is none."""
    state = _state(path)
    return ABSENT if state is None else (state[0], crc(path))


def _state(path: FilePath) -> tuple[int, str] | None:
    """A file's bytes, and what differs after each change of it; None where there is none."""
    try:
        if is_remote(path):
            remote = epath.Path(path).stat()
            return remote.length, f"{remote.mtime}"
        local = os.stat(path)
    except OSError:
        return None
    times = f"{local.st_ino} {local.st_mtime_ns} {local.st_ctime_ns}"
    return (local.st_size, times) if stat.S_ISREG(local.st_mode) else None


@contextlib.contextmanager
def recording(path: FilePath, record: Record) -> Iterator[None]:
    """Records a file that the block replaces.

    Args:
        path: the file.
        record: of what it becomes.
    """
    target = epath.Path(path)
    folder, name = target.parent, target.name
    with _locked(folder):
        records = read(folder)
        # In a bucket an earlier write has left two lines, of which one is the object's.
        former = None if is_remote(folder) else records.get(name)
        _write(folder, {**records, name: [*(former or [found(target)]), record]})
        yield
        # An object in a bucket may be written about once a second: there both lines stay.
        if not is_remote(folder):
            _write(folder, {**records, name: [record]})


def seal(directory: FilePath) -> None:
    """Records all files below a directory, which reach the disk first, and its name after them."""
    root = epath.Path(directory)
    publishing.sync(root)
    _write(root, {os.path.relpath(path, root): [found(path)] for path in _walk(root)[1]})
    publishing.sync_one(root.parent)


def read(directory: FilePath) -> dict[str, list[Record]]:
    """File -> its record; where it is being replaced, the former ones before it."""
    records: dict[str, list[Record]] = {}
    # Malformed lines are ignored; `verify` names their file.
    for line in filter(None, map(_LINE.fullmatch, _lines(directory))):
        records.setdefault(line[3], []).append((int(line[2]), line[1]))
    return records


def _lines(directory: FilePath) -> list[str]:
    try:
        text = (epath.Path(directory) / FILE).read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    return text.removesuffix("\n").split("\n") if text else []


def _write(directory: epath.Path, records: Mapping[str, Sequence[Record]]) -> None:
    lines = [
        f"{checksum} {size} {name}\n" for name, all in records.items() for size, checksum in all
    ]
    target = directory / FILE
    scratch = target if is_remote(target) else publishing.scratch_for(target)
    scratch.write_text("".join(lines))
    if scratch != target:
        publishing.publish(scratch, target)


@contextlib.contextmanager
def _locked(directory: epath.Path) -> Iterator[None]:
    """One process at a time rewrites the record, where the disk has locks."""
    if is_remote(directory):
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_file(path: FilePath, *, fix: str) -> None:
    """Compares a file with the record beside it, and warns where that has no line of it.

    Raises:
        DataError: it was damaged after it had been written.
    """
    target = epath.Path(path)
    records = read(target.parent)
    if not records or not target.exists():
        return
    if target.name in records:
        _check(target.parent, target.name, records[target.name], fix=fix)
    else:
        _warn(target.parent, [target])


def check_directory(directory: FilePath, *, fix: str) -> None:
    """Checks all recorded files of a directory, and warns of those without a record.

    Raises:
        DataError: naming the first file that is missing or damaged.
    """
    root = epath.Path(directory)
    for name, recorded in read(root).items():
        _check(root, name, recorded, fix=fix)
    _warn(root, unrecorded(root))


def _warn(root: epath.Path, missing: Sequence[epath.Path]) -> None:
    """Says once which files of a directory cannot be checked."""
    if missing and os.fspath(root) not in _warned:
        _warned.add(os.fspath(root))
        logger.warning(
            "%s: %d files cannot be checked, since no %s has a line of them: %s",
            *(root, len(missing), FILE),
            ", ".join(os.path.relpath(path, root) for path in missing[:3]),
        )


def _check(folder: epath.Path, name: str, recorded: Sequence[Record], *, fix: str) -> None:
    path = folder / name
    state = _state(path)
    key = f"{os.path.realpath(path)} {state} {recorded}"
    if key in _compared or (state and state[0] >= _LARGE and _mark(key).exists()):
        return
    now = found(path)
    if now not in recorded:
        # A writer may have replaced it since its record was read.
        now, recorded = found(path), [*recorded, *read(folder).get(name, ())]
    if now not in recorded:
        raise DataError(
            f"damaged after it was written: {_difference(now, recorded[-1])}",
            where=str(path),
            expected=f"what {path.parent.name}'s {FILE} has recorded",
            fix=f"{fix}; if you changed it yourself, delete its line there",
        )
    _compared.add(key)
    if now[0] >= _LARGE:
        with contextlib.suppress(OSError):
            _mark(key).parent.mkdir(parents=True, exist_ok=True)
            _mark(key).touch()


def _mark(key: str) -> pathlib.Path:
    """A file in the user's cache: it is there once a large file has been compared."""
    return publishing.cache_folder("compared", hashlib.sha256(key.encode()).hexdigest())


def verify(*, directory: str) -> int:
    """Compares all files of the artefacts below a directory with the checksums recorded of them.

    Every artefact has a `checksums.txt` with the size and CRC-32 of its files: collections, token
    stores, negatives, embeddings, indexes, runs, models, checkpoints, stages and results. Other
    commands compare them whenever they open one, those of large files once per change.

    Args:
        directory: an artefact, or a folder of artefacts.

    Returns:
        Number of files compared.

    Raises:
        DataError: files that are missing, damaged or without a record; names them.
    """
    # etils takes a name that is too long for one that is absent.
    place = epath.Path(directory) if is_remote(directory) else pathlib.Path(directory)
    if not place.is_dir():
        raise ConfigError("no such directory", where=directory, fix="give a folder of artefacts")
    checked = list(_compared_files(epath.Path(directory)))
    if not checked:
        raise DataError(
            "no artefact here, so nothing could be compared",
            where=directory,
            fix="give a folder of artefacts",
        )
    bad = [f"{path}: {problem}" for path, problem in checked if problem is not None]
    if bad:
        more = [f"and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        count = f"{len(bad)} of {len(checked):,} files are not what {FILE} has recorded"
        raise DataError(
            "\n    ".join([count, *bad[:_SHOWN], *more]),
            where=directory,
            fix="delete what is damaged and run the command that makes it again; keep files of "
            "your own elsewhere",
        )
    logger.info("%s: %s files are what was written", directory, f"{len(checked):,}")
    return len(checked)


def _compared_files(root: epath.Path) -> Iterator[tuple[epath.Path, str | None]]:
    """Each file of the artefacts below a directory, and what is wrong with it; None if nothing."""
    folders, files = _walk(root)
    for folder in folders:
        if not all(map(_LINE.fullmatch, _lines(folder))):
            yield folder / FILE, "a line that is no record"
        for name, recorded in sorted(read(folder).items()):
            now = found(folder / name)
            yield folder / name, None if now in recorded else _difference(now, recorded[-1])
    artefacts = {path.parent for path in files if path.name in _MARKS} | set(folders)
    for path in _unrecorded(folders, files):
        if not artefacts.isdisjoint(path.parents):
            yield path, f"no {FILE} has a line of it"


def unrecorded(root: FilePath) -> list[epath.Path]:
    """Files below a directory of which no record there has a line; logs need none."""
    return _unrecorded(*_walk(epath.Path(root)))


def _unrecorded(folders: Sequence[epath.Path], files: Sequence[epath.Path]) -> list[epath.Path]:
    recorded = {folder / name for folder in folders for name in read(folder)}
    return [path for path in files if path not in recorded and not _LOGS.fullmatch(path.name)]


def _difference(now: Record, recorded: Record) -> str:
    if now == ABSENT:
        return "missing"
    if now[0] != recorded[0]:
        return f"{now[0]:,} bytes in place of {recorded[0]:,}"
    return "other bytes of the same number"


def _walk(root: epath.Path) -> tuple[list[epath.Path], list[epath.Path]]:
    """Below a directory, in order: the folders with a record, and all other files, none hidden.

    Linked folders are followed.
    """
    paths: list[epath.Path] = []
    seen: set[str] = set()
    for place, folders, names in (
        root.walk() if is_remote(root) else os.walk(root, followlinks=True)
    ):
        # A link may lead to a folder above it.
        if os.path.realpath(place) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        folders[:] = [name for name in folders if not _is_hidden(name)]
        paths += [epath.Path(place) / name for name in names if not _is_hidden(name)]
    paths.sort()
    records = [path.parent for path in paths if path.name == FILE]
    return records, [path for path in paths if path.name != FILE]


def _is_hidden(name: str) -> bool:
    """Whether it is no part of an artefact: unfinished, or JAX's compiled programs."""
    return name.startswith(".") or ".orbax-checkpoint-tmp" in name or name == "compilation_cache"
