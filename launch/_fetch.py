"""Copies a directory, local or in a bucket, to this host; skips files that have not changed.

usage: python launch/_fetch.py gs://BUCKET/tokens data
"""

from __future__ import annotations

import os
import pathlib
import sys

from etils import epath

from taser_jax.storage.artifacts import storage_errors
from taser_jax.storage.errors import EXIT_USER_ERROR, DataError, TaserError

METADATA = "metadata.json"
# Always copied: checking for changes takes as long.
SMALL = 1 << 20


def fetch(source: str, target: str) -> int:
    """Copies missing and possibly changed files; returns their number.

    A file is copied again if it is small, has another size or is older than its source. If a
    directory's `metadata.json` has changed, everything in it is copied, since arrays made again
    often have the same size.

    Raises:
        DataError: the directory does not exist, or this host may not read it.
        StorageError: the disk is full or `target` cannot be written.
    """
    root = epath.Path(source)
    if not root.is_dir():
        raise DataError(
            "not a directory that this host can read",
            where=source,
            fix="correct the address, or give this host access",
        )
    with storage_errors(target):
        return _fetch_directory(root, pathlib.Path(target), since=0)


def _fetch_directory(source: epath.Path, target: pathlib.Path, *, since: int) -> int:
    """Copies a directory; files copied before `since` (nanoseconds) are out of date."""
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
            # Under another name until complete: an interrupted copy is made again.
            path.copy(_partial(place), overwrite=True)
            os.replace(_partial(place), place)
            copied += 1
    if described and _partial(target / METADATA).exists():
        os.replace(_partial(target / METADATA), target / METADATA)
        copied += 1
    return copied


def _begin(source: epath.Path, place: pathlib.Path) -> int:
    """The time at which copying the directory of this metadata began, in nanoseconds.

    That is the modification time of the metadata's copy, from this run or an earlier one. The copy
    gets its name last: a directory without metadata is unfinished.
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
    # Buckets truncate times to whole seconds.
    changed = (there.mtime + 1) * 10**9
    return there.length == here.st_size >= SMALL and here.st_mtime_ns >= max(changed, since)


def _partial(place: pathlib.Path) -> pathlib.Path:
    return place.with_name(f"{place.name}.partial")


def main(arguments: list[str]) -> int:
    """Copies as the command line says; returns the exit status."""
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
