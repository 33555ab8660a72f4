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

    A file is copied again if it is small, or has another size or time than its source. If a
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
        return _fetch_directory(root, pathlib.Path(target))


def _fetch_directory(source: epath.Path, target: pathlib.Path) -> int:
    target.mkdir(parents=True, exist_ok=True)
    described, description = source / METADATA, target / METADATA
    is_described = description.exists() and described.exists()
    if is_described and description.read_bytes() != described.read_bytes():
        _forget(source, target)
    copied = 0
    # Metadata come last: a directory without them is unfinished.
    for path in sorted(source.iterdir(), key=lambda path: (path.name == METADATA, path.name)):
        place = target / path.name
        if path.is_dir():
            copied += _fetch_directory(path, place)
        elif not _is_current(path, place):
            # Under another name until complete: an interrupted copy is made again.
            partial, time = place.with_name(f"{place.name}.partial"), path.stat().mtime
            path.copy(partial, overwrite=True)
            os.utime(partial, (time, time))
            os.replace(partial, place)
            copied += 1
    return copied


def _forget(source: epath.Path, target: pathlib.Path) -> None:
    """Deletes the copies of a directory's files, its metadata included."""
    for path in source.iterdir():
        if path.is_dir():
            _forget(path, target / path.name)
        else:
            (target / path.name).unlink(missing_ok=True)


def _is_current(source: epath.Path, place: pathlib.Path) -> bool:
    if not place.exists() or place.name == METADATA:
        return place.exists()
    there, here = source.stat(), place.stat()
    # Buckets truncate times to whole seconds.
    is_same = (there.length, int(there.mtime)) == (here.st_size, int(here.st_mtime))
    return is_same and here.st_size >= SMALL


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
