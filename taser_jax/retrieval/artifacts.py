"""Files and directories of this package: written whole or not at all, read with their version."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from taser_jax.errors import DataError, FingerprintError
from taser_jax.storage import storage_errors

METADATA = "metadata.json"
_PLAN = "plan.json"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a scratch path beside `path` that takes its place when the block succeeds.

    What is written to the scratch path may be a file or a directory; a reader sees the old content
    or the new, never half of it.

    Raises:
        StorageError: the disk is full or the directory cannot be written.
    """
    target = pathlib.Path(path)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with storage_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield scratch
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(scratch, target)
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                scratch.unlink()


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes one JSON value, readable by a person, atomically."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_metadata(directory: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Reads a directory's metadata.json and checks what it is.

    Args:
        directory: the artefact.
        kind: what it must hold, for example "embeddings".
        version: the newest format version this code reads.

    Raises:
        DataError: nothing there (or unfinished), not JSON, another kind, or another version.
    """
    path = pathlib.Path(directory) / METADATA
    if not path.is_file():
        raise DataError(
            f"no finished {kind} here",
            where=str(path),
            expected=f"a directory that the command making {kind} wrote to its end",
            fix="run that command again (it goes on where it stopped), or correct the path",
        )
    try:
        metadata = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(path)) from error
    found = (metadata.get("kind"), metadata.get("format_version"))
    if found != (kind, version):
        raise DataError(
            f"kind {found[0]!r}, format version {found[1]!r}",
            where=str(path),
            expected=f"kind {kind!r}, format version {version}",
            fix="rebuild it with this version of taser_jax, or correct the path",
        )
    return metadata


def kind_of(directory: str | os.PathLike[str]) -> str | None:
    """What a directory holds, finished or not; None where that is nothing of this package's."""
    for name in (METADATA, _PLAN):
        path = pathlib.Path(directory) / name
        if path.is_file():
            return json.loads(path.read_text("utf-8")).get("kind")
    return None


def follow_plan(directory: str | os.PathLike[str], plan: dict[str, Any]) -> None:
    """Records what a resumable command is about to make, or checks that it is still the same.

    Args:
        directory: the artefact; its plan.json is written by whoever comes first.
        plan: everything that must not change between runs that share the work.

    Raises:
        FingerprintError: the directory was begun with another plan; names what differs.
    """
    path = pathlib.Path(directory) / _PLAN
    if not path.exists():
        write_json(path, plan)
        return
    begun = json.loads(path.read_text("utf-8"))
    differing = [name for name in sorted(begun.keys() | plan) if begun.get(name) != plan.get(name)]
    if differing:
        raise FingerprintError(
            f"begun with {', '.join(f'{name} {begun.get(name)}' for name in differing)}",
            where=str(directory),
            expected=", ".join(f"{name} {plan.get(name)}" for name in differing),
            fix="name another directory, or delete this one to begin again",
        )
