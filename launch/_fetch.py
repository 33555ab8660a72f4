"""Copies a directory, local or in a bucket, to this host; skips files that have not changed.

usage: python launch/_fetch.py gs://BUCKET/tokens data
"""

from __future__ import annotations

import os
import pathlib
import sys

from etils import epath


def fetch(source: epath.Path, target: pathlib.Path) -> int:
    """Copies files that are missing or have another size or time than their source; counts them."""
    target.mkdir(parents=True, exist_ok=True)
    copied = 0
    for path in sorted(source.iterdir()):
        place = target / path.name
        if path.is_dir():
            copied += fetch(path, place)
        elif not _is_current(path, place):
            # Under another name until complete: an interrupted copy is made again.
            partial, time = place.with_name(f"{place.name}.partial"), path.stat().mtime
            path.copy(partial, overwrite=True)
            os.utime(partial, (time, time))
            os.replace(partial, place)
            copied += 1
    return copied


def _is_current(source: epath.Path, place: pathlib.Path) -> bool:
    if not place.exists():
        return False
    there, here = source.stat(), place.stat()
    # Buckets truncate times to whole seconds.
    return (there.length, int(there.mtime)) == (here.st_size, int(here.st_mtime))


def main(source: str, target: str) -> int:
    """Copies as the command line says; returns the exit status."""
    if not epath.Path(source).is_dir():
        print(f"error: {source}: not a directory that this host can read", file=sys.stderr)
        print("  fix: correct the address, or give this host access", file=sys.stderr)
        return 2
    print(f"{fetch(epath.Path(source), pathlib.Path(target))} files copied from {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
