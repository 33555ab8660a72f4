"""Sizes and checksums of an artefact's files, in a `checksums.txt` beside them.

    8f3a1c07 5120128 passages/ids.npy

A line is the file's CRC-32 in hexadecimal, its bytes and its name, below the folder of
`checksums.txt`. Replacing a file adds a line, and a file passes if any of its lines describes it.
The line can therefore be written before the file: a kill between the two harms nothing.
Files without a line are not checked, such as those of earlier versions. A bucket checks its
objects' checksums itself: addresses with gs:// have no such file.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence

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
Records = dict[str, set[tuple[int, str]]]


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


def add(path: FilePath, content: FilePath) -> None:
    """Records what is about to become the file `path`.

    Args:
        path: the file; its line goes to the `checksums.txt` beside it.
        content: the finished file that will be renamed to it.
    """
    target = pathlib.Path(path)
    size, checksum = os.path.getsize(content), crc(content)
    if (size, checksum) in read(target.parent)[target.name]:
        return
    line = f"{checksum} {size} {target.name}\n"
    with open(target.parent / FILE, "ab") as file:
        # A line that a kill cut off ends here.
        file.write((line if _ends_a_line(target.parent / FILE) else f"\n{line}").encode())


def seal(directory: FilePath) -> None:
    """Records all files below a directory, in place of what was recorded before."""
    root = pathlib.Path(directory)
    lines = [
        f"{crc(path)} {path.stat().st_size} {path.relative_to(root).as_posix()}\n"
        for path in _files(root)
    ]
    scratch = root / f".{FILE}.partial"
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(root / FILE)


def read(directory: FilePath) -> Records:
    """File -> the sizes and checksums it may have; empty where nothing is recorded."""
    found: Records = collections.defaultdict(set)
    try:
        text = (pathlib.Path(directory) / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        # Malformed lines are ignored.
        if parts := _LINE.fullmatch(line):
            found[parts[3]].add((int(parts[2]), parts[1]))
    return found


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


def _check(root: pathlib.Path, records: Records, *, fix: str, reads_all: bool = False) -> None:
    total = 0
    for name, recorded in records.items():
        size = _size(root / name)
        if all(size != of for of, _ in recorded):
            raise _damaged(root / name, size, recorded, fix)
        total += size or 0
    if total > READ_ON_OPENING and not reads_all:
        return
    for name, recorded in records.items():
        path = root / name
        state = path.stat()
        key, seen = os.path.realpath(path), (state.st_size, state.st_mtime_ns)
        if _compared.get(key) != seen:
            if (state.st_size, crc(path)) not in recorded:
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
            if size is None or (size, crc(path)) not in recorded:
                yield path, _difference(size, recorded)
            else:
                yield path, None


def _damaged(
    path: pathlib.Path, size: int | None, recorded: set[tuple[int, str]], fix: str
) -> DataError:
    return DataError(
        f"damaged after it was written: {_difference(size, recorded)}",
        where=str(path),
        expected=f"what {path.parent.name}'s {FILE} has recorded",
        fix=f"{fix}; if you changed it yourself, delete its line there",
    )


def _difference(size: int | None, recorded: set[tuple[int, str]]) -> str:
    sizes: Sequence[int] = sorted({of for of, _ in recorded})
    if size is None:
        return "missing"
    if size not in sizes:
        return f"{size:,} bytes in place of {' or '.join(f'{of:,}' for of in sizes)}"
    return "other bytes of the same number"


def _size(path: pathlib.Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _ends_a_line(path: pathlib.Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """Files below a directory in order, but for hidden ones and records of checksums."""
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.name != FILE
    )
