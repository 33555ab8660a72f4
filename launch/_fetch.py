"""Copies a directory, of a bucket or local, to this host; what is there is not copied again.

usage: python launch/_fetch.py gs://BUCKET/tokens data
"""

from __future__ import annotations

import sys

from etils import epath


def fetch(source: str, target: str) -> int:
    """Copies what is missing or of another size; returns how many files that was."""
    root = epath.Path(source)
    if not root.is_dir():
        sys.exit(f"error: no directory {source}\n  fix: correct the address, or this host's access")
    copied = 0
    waiting = [root]
    while waiting:
        for path in waiting.pop().iterdir():
            if path.is_dir():
                waiting.append(path)
                continue
            place = epath.Path(target) / path.relative_to(root)
            if place.exists() and place.stat().length == path.stat().length:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            # A copy that is cut off has another name, and is made again.
            partial = place.with_name(place.name + ".partial")
            path.copy(partial, overwrite=True)
            partial.replace(place)
            copied += 1
    return copied


if __name__ == "__main__":
    print(f"{fetch(*sys.argv[1:3])} files copied from {sys.argv[1]}")
