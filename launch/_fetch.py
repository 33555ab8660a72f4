"""Copies a directory, local or in a bucket, to this host; skips files that have not changed.

usage: python launch/_fetch.py gs://BUCKET/tokens data
"""

from __future__ import annotations

import os
import sys

from etils import epath

from taser_jax.storage.errors import EXIT_USER_ERROR, ConfigError, TaserError, storage_errors


def fetch(source: epath.Path, target: epath.Path) -> int:
    """Copies files that are missing or have another size or time than their source; counts them."""
    target.mkdir(parents=True, exist_ok=True)
    copied = 0
    for path in sorted(source.iterdir()):
        place = target / path.name
        if path.is_dir():
            copied += fetch(path, place)
        elif not (place.exists() and _version(path) == _version(place)):
            # Under another name until complete: an interrupted copy is made again.
            partial, time = place.with_name(f"{place.name}.partial"), path.stat().mtime
            path.copy(partial, overwrite=True)
            os.utime(partial, (time, time))
            os.replace(partial, place)
            copied += 1
    return copied


def _version(path: epath.Path) -> tuple[int, int]:
    """Size and time; buckets truncate times to whole seconds."""
    found = path.stat()
    return found.length, int(found.mtime)


def main(source: str, target: str) -> int:
    """Copies as the command line says; returns the exit status."""
    try:
        with storage_errors(target):
            if not epath.Path(source).is_dir():
                fix = "correct the address, or give this host access"
                raise ConfigError("not a directory that this host can read", where=source, fix=fix)
            copied = fetch(epath.Path(source), epath.Path(target))
    except TaserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{copied} files copied from {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
