"""Copies a directory, of a bucket or local, to this host; what is unchanged is not copied again.

usage: python launch/_fetch.py gs://BUCKET/tokens data
"""

from __future__ import annotations

import os
import pathlib
import sys

from etils import epath

from taser_jax.artifacts import storage_errors
from taser_jax.errors import EXIT_USER_ERROR, DataError, TaserError

METADATA = "metadata.json"
# Copied always: asking whether it has changed takes as long.
SMALL = 1 << 20


def fetch(source: str, target: str) -> int:
    """Copies what is missing or may have changed; returns how many files that was.

    A file is copied again if it is small, of another size or older than its source, and so is all
    below a directory whose `metadata.json` has changed: arrays made again are often as large.

    Raises:
        DataError: no such directory, or none that this host may read.
        StorageError: the disk is full or `target` cannot be written.
    """
    root = epath.Path(source)
    if not root.is_dir():
        raise DataError(
            "no directory that this host can read",
            where=source,
            fix="correct the address, or this host's access",
        )
    with storage_errors(target):
        return _fetch_directory(root, pathlib.Path(target), since=0)


def _fetch_directory(source: epath.Path, target: pathlib.Path, *, since: int) -> int:
    """Copies a directory; what was copied before `since` (nanoseconds) is out of date."""
    target.mkdir(parents=True, exist_ok=True)
    paths = sorted(source.iterdir())
    described = any(path.name == METADATA for path in paths)
    if described:
        since = _begin(source / METADATA, target / METADATA)
    copied = 0
    for path in paths:
        place = target / path.name
        if path.is_dir():
            copied += _fetch_directory(path, place, since=since)
        elif path.name != METADATA and not _is_current(path, place, since):
            # A copy that is cut off has another name, and is made again.
            path.copy(_partial(place), overwrite=True)
            os.replace(_partial(place), place)
            copied += 1
    if described and _partial(target / METADATA).exists():
        os.replace(_partial(target / METADATA), target / METADATA)
        copied += 1
    return copied


def _begin(source: epath.Path, place: pathlib.Path) -> int:
    """When copying what this metadata describes began, now or earlier; nanoseconds.

    The copy of the metadata tells by its time of change. It has its name only when all else is
    there: a directory without metadata is unfinished.
    """
    content = source.read_bytes()
    for begun in (place, _partial(place)):
        if begun.exists() and begun.read_bytes() == content:
            return begun.stat().st_mtime_ns
    place.unlink(missing_ok=True)
    _partial(place).write_bytes(content)
    return _partial(place).stat().st_mtime_ns


def _is_current(source: epath.Path, place: pathlib.Path, since: int) -> bool:
    if not place.exists():
        return False
    there, here = source.stat(), place.stat()
    # Times of buckets are whole seconds, cut off.
    changed = (there.mtime + 1) * 10**9
    return there.length == here.st_size >= SMALL and here.st_mtime_ns >= max(changed, since)


def _partial(place: pathlib.Path) -> pathlib.Path:
    return place.with_name(f"{place.name}.partial")


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        copied = fetch(*arguments)
    except TaserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{copied} files copied from {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
