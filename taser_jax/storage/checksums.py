"""Sizes and checksums of an artefact's files, in a `checksums.txt` beside them.

    8f3a1c07 5120128 passages/ids.npy

A line is the file's CRC-32 in hexadecimal, its bytes and its name, below the folder of
`checksums.txt`. Files without a line are not checked. A bucket checks its objects' checksums
itself: addresses with gs:// have no such file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping

from taser_jax.storage.errors import DataError

FILE = "checksums.txt"
# Opening an artefact reads all of its bytes up to this size, once per process and change: less than
# the imports of a command take. Sizes are always compared, and `taser verify` reads everything.
READ_ON_OPENING = 1 << 30
_LINE = re.compile(r"([0-9a-f]{8}) (\d+) (.+)")
_BLOCK = 1 << 22
# Size and time of change of the files whose bytes this process has compared.
_compared: dict[str, tuple[int, int]] = {}

FilePath = str | os.PathLike[str]
Record = tuple[int, str]
"""A file's bytes and checksum."""


def crc(path: FilePath) -> str:
    """A file's CRC-32 in hexadecimal.

    Example:
        The standard's check value: "123456789" gives cbf43926.
    """
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def replace(path: FilePath, content: FilePath) -> None:
    """Renames a finished file to `path` and records it in the `checksums.txt` beside it.

    The line of what it replaces goes first and its own is written last: a file that a kill leaves
    between the two has no line.

    Args:
        path: what it becomes.
        content: the finished file.
    """
    target = pathlib.Path(path)
    record = os.path.getsize(content), crc(content)
    with _locked(target.parent):
        records = read(target.parent)
        if records.pop(target.name, None):
            _write(target.parent, records)
        os.replace(content, target)
        _write(target.parent, {**records, target.name: record})


def seal(directory: FilePath) -> None:
    """Records all files below a directory, in place of what was recorded before."""
    root = pathlib.Path(directory)
    files = {path.relative_to(root).as_posix(): path for path in _files(root)}
    _write(root, {name: (path.stat().st_size, crc(path)) for name, path in files.items()})


def read(directory: FilePath) -> dict[str, Record]:
    """File -> its size and checksum; empty where nothing is recorded."""
    try:
        text = (pathlib.Path(directory) / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    # Malformed lines are ignored.
    lines = filter(None, map(_LINE.fullmatch, text.splitlines()))
    return {line[3]: (int(line[2]), line[1]) for line in lines}


def _write(directory: pathlib.Path, records: Mapping[str, Record]) -> None:
    scratch = directory / f".{FILE}.{uuid.uuid4().hex[:8]}.partial"
    lines = [f"{checksum} {size} {name}\n" for name, (size, checksum) in records.items()]
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(directory / FILE)


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """One process at a time rewrites the record, where the disk has locks."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_file(path: FilePath, *, fix: str) -> None:
    """Compares a file with the record beside it: its size and, unless it is large, its bytes.

    Raises:
        DataError: it was damaged after it had been written.
    """
    target = pathlib.Path(path)
    recorded = read(target.parent).get(target.name)
    if recorded and target.exists():
        _check(target.parent, {target.name: recorded}, fix=fix)


def check_directory(directory: FilePath, *, fix: str, reads_all: bool = False) -> None:
    """Checks all recorded files of a directory; `reads_all` also compares the bytes of a large one.

    Raises:
        DataError: naming the first file that is missing or damaged.
    """
    _check(pathlib.Path(directory), read(directory), fix=fix, reads_all=reads_all)


def _check(
    root: pathlib.Path, records: Mapping[str, Record], *, fix: str, reads_all: bool = False
) -> None:
    total = 0
    for name, recorded in records.items():
        size = _size(root / name)
        if size != recorded[0]:
            raise _damaged(root / name, size, recorded, fix)
        total += size or 0
    if total > READ_ON_OPENING and not reads_all:
        return
    for name, recorded in records.items():
        path = root / name
        state = path.stat()
        key, seen = os.path.realpath(path), (state.st_size, state.st_mtime_ns)
        if _compared.get(key) != seen:
            if (state.st_size, crc(path)) != recorded:
                raise _damaged(path, state.st_size, recorded, fix)
            _compared[key] = seen


def verify(root: FilePath) -> Iterator[tuple[pathlib.Path, str | None]]:
    """Reads every recorded file below a directory.

    Yields:
        Each file, and what is wrong with it; None if it is whole.
    """
    for folder in sorted(pathlib.Path(root).rglob(FILE)):
        for name, recorded in sorted(read(folder.parent).items()):
            path = folder.parent / name
            size = _size(path)
            if size is None or (size, crc(path)) != recorded:
                yield path, _difference(size, recorded)
            else:
                yield path, None


def _damaged(path: pathlib.Path, size: int | None, recorded: Record, fix: str) -> DataError:
    return DataError(
        f"damaged after it was written: {_difference(size, recorded)}",
        where=str(path),
        expected=f"what {path.parent.name}'s {FILE} has recorded",
        fix=f"{fix}; if you changed it yourself, delete its line there",
    )


def _difference(size: int | None, recorded: Record) -> str:
    if size is None:
        return "missing"
    if size != recorded[0]:
        return f"{size:,} bytes in place of {recorded[0]:,}"
    return "other bytes of the same number"


def _size(path: pathlib.Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """Files below a directory in order, but for hidden ones and records of checksums."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.name != FILE
    )
