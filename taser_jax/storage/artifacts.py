"""Artefacts: files written whole or not at all, with a format version and content fingerprints."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import tokenize
import urllib.parse
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from etils import epath

from taser_jax.storage import checksums
from taser_jax.storage.errors import (
    ConfigError,
    DataError,
    FingerprintError,
    StorageError,
    TaserError,
    how_to_install,
)
from taser_jax.storage.typed_files import FilePath, Metadata, is_remote, read_json, typed

# Re-exported: readers of artefacts need them, too.
__all__ = ["FilePath", "Metadata", "is_remote", "read_json"]

T = TypeVar("T")

METADATA = "metadata.json"
# Ends the names of files and directories that are being written.
PARTIAL = ".partial"
# What NumPy raises for a damaged file, whose header may not be Python or whose shape not a size.
ARRAY_ERRORS = (
    *(OSError, ValueError, EOFError, SyntaxError, TypeError, KeyError),
    *(MemoryError, OverflowError, RecursionError, tokenize.TokenError, zipfile.BadZipFile),
)
_PLAN = "plan.json"
_DIGITS = 16
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Paths that no file can have -> what to do.
_PATHS = {
    errno.ENAMETOOLONG: "choose a shorter name: each part of a path has at most 255 bytes",
    errno.ELOOP: "name the directory that the link is meant for: this one leads to itself",
}
_STORAGE_ERRNOS = (
    *_FULL,
    *_PATHS,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EFBIG, errno.EIO),
)
# ArrayRecord and TensorFlow report a failed write by its text, not by an OSError.
_FULL_MESSAGES = ("no space left", "quota exceeded", "file too large")
_PARTIAL_WRITE = " requested and "
_BUCKET_PACKAGE = re.compile(r"[Ii]nstall (\w+) to access ")
_STORAGE_MESSAGES = (
    "no space left",
    "permission denied",
    "read-only file system",
    "quota exceeded",
    "not a directory",
    "file too large",
    # A path with U+0000.
    "embedded null",
)
_LONGEST_SHOWN = 120


def split_path(directory: FilePath, task: str, split: str, suffix: str = "") -> pathlib.Path:
    """The file of one task's split in a folder of runs, negatives or query embeddings.

    Example:
        >>> split_path("runs", "nq/dev", "test", ".trec").name
        'nq%2Fdev.test.trec'
    """
    name = f"{urllib.parse.quote(task, safe='')}.{urllib.parse.quote(split, safe='')}{suffix}"
    return pathlib.Path(directory) / name


def file_name(name: str) -> str:
    """A name given by the user, as used for folders and stages.

    Example:
        >>> file_name("TASER Det-R (mined negatives)")
        'taser-det-r-mined-negatives'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextlib.contextmanager
def storage_errors(path: FilePath, *, doing: str = "write") -> Iterator[None]:
    """Turns failed writes into a `StorageError` that says what to do.

    Example:
        >>> with storage_errors("out"):  # doctest: +SKIP
        ...     write_everything("out")

    Args:
        path: what is being written, for the message.
        doing: what is being done, for the message.

    Raises:
        StorageError: for a full disk, a read-only or forbidden place, an exhausted quota, or a path
            that no file can have.
        ConfigError: the package for this kind of bucket is not installed.
    """
    try:
        yield
    except TaserError:
        raise
    except OSError as raised:
        error = raised
        if raised.errno is None and isinstance(raised.__context__, OSError):
            # Gin raises a copy without the number and the file.
            error = raised.__context__
        # NumPy reports a partial write by its text alone.
        number = errno.ENOSPC if _PARTIAL_WRITE in str(error) else error.errno
        if number not in _STORAGE_ERRNOS:
            raise
        named = f" ({_shortened(error.filename)})" if error.filename else ""
        raise _storage_error(path, doing, f"{error.strerror or error}{named}", number) from error
    except ImportError as error:
        # What opens paths without TensorFlow has a package for each kind of bucket.
        needed = _BUCKET_PACKAGE.search(str(error))
        if needed is None:
            raise
        raise ConfigError(
            f"paths of this kind need {needed[1]} or TensorFlow, and neither is installed",
            where=os.fspath(path),
            fix=f"pip install {needed[1]}, or {how_to_install('tensorflow')}",
        ) from error
    except Exception as error:
        if not any(message in str(error).lower() for message in _STORAGE_MESSAGES):
            raise
        raise _storage_error(path, doing, str(error), None) from error


def _shortened(path: object) -> str:
    text = str(path)
    half = _LONGEST_SHOWN // 2
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"


def _storage_error(path: FilePath, doing: str, reason: str, number: int | None) -> StorageError:
    if number in _PATHS:
        return StorageError(
            f"could not {doing}: {reason}",
            where=_shortened(path),
            expected="the path of a file or directory that can exist",
            fix=_PATHS[number],
        )
    full = number in (*_FULL, errno.EFBIG) or any(
        message in reason.lower() for message in _FULL_MESSAGES
    )
    return StorageError(
        f"could not {doing}: {reason}",
        where=os.fspath(path),
        expected="a directory that can be written, with room left on its disk",
        fix="free some space or choose another directory, then run the same command again"
        if full
        else "choose a directory you may write to, or change its permissions",
    )


@contextlib.contextmanager
def replacing(path: FilePath, *, recorded: bool = False) -> Iterator[epath.Path]:
    """Yields a scratch path beside `path` that takes its place when the block succeeds.

    The scratch path may become a file or a directory; a reader sees the old content or the new,
    never a part of it.

    Args:
        path: a local or gs:// path; its folder is created where absent.
        recorded: whether to add a local file's size and checksum to the `checksums.txt` beside it.

    Raises:
        StorageError: the disk is full or the directory cannot be written.
    """
    target = epath.Path(path)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with storage_errors(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield scratch
            if target.is_dir():
                target.rmtree()
            if recorded and not is_remote(path):
                checksums.replace(path, scratch)
            else:
                scratch.replace(target)
    finally:
        with contextlib.suppress(OSError):
            if scratch.is_dir():
                scratch.rmtree()
            else:
                scratch.unlink(missing_ok=True)


def write_text(path: FilePath, text: str, *, recorded: bool = False) -> None:
    """Writes a UTF-8 text file atomically; `recorded` as for `replacing`."""
    write_bytes(path, text.encode(), recorded=recorded)


def write_bytes(path: FilePath, content: bytes, *, recorded: bool = False) -> None:
    """Writes a file atomically, as a bucket always does; `recorded` as for `replacing`."""
    if is_remote(path):
        epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
        epath.Path(path).write_bytes(content)
        return
    with replacing(path, recorded=recorded) as scratch:
        scratch.write_bytes(content)


def write_json(path: FilePath, value: object) -> None:
    """Writes one indented JSON value atomically and records its checksum."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", recorded=True)


def check_version(
    value: Mapping[str, Any],
    version: int,
    *,
    where: FilePath,
    fix: str,
    error: type[TaserError] = DataError,
) -> None:
    """Refuses a format version that this code does not read.

    Args:
        value: what was read; its "format_version" is compared.
        version: the one that is read.
        where: the file it came from.
        fix: what the message advises.
        error: what is raised.
    """
    found = value.get("format_version")
    if found != version:
        raise error(
            f"format version {found}",
            where=os.fspath(where),
            expected=f"format version {version}",
            fix=fix,
        )


def read_metadata(directory: FilePath, kind: str, version: int, fields: type[T]) -> T:
    """Reads a directory's metadata.json and checks its kind.

    Args:
        directory: the artefact.
        kind: what it must hold, for example "embeddings".
        version: the newest format version this code reads.
        fields: the type of its fields; others are ignored.

    Raises:
        DataError: the artefact is absent, unfinished, damaged, not JSON, or of another kind or
            version, or a field is not what it must be.
    """
    path = epath.Path(directory) / METADATA
    if not path.exists():
        raise DataError(
            f"no finished {kind} here",
            where=str(path),
            fix="rerun that command (it resumes where it stopped), or correct the path",
        )
    metadata = read_json(path)
    found = (metadata.get("kind"), metadata.get("format_version"))
    if found != (kind, version):
        raise DataError(
            f"kind {found[0]!r}, format version {found[1]!r}",
            where=str(path),
            expected=f"kind {kind!r}, format version {version}",
            fix="rebuild it with this version of taser_jax, or correct the path",
        )
    again = f"delete {os.fspath(directory)} and run the command that makes {kind} again"
    if not is_remote(path):
        checksums.check_directory(directory, fix=again)
    return typed(metadata, fields, where=os.fspath(path), fix=again)


def kind_of(directory: FilePath) -> str | None:
    """The kind of artefact in a directory, finished or not; None if it is not this package's."""
    for name in (METADATA, _PLAN):
        path = epath.Path(directory) / name
        if path.exists():
            return read_json(path).get("kind")
    return None


def follow_plan(directory: FilePath, plan: Mapping[str, Any]) -> None:
    """Records what a resumable command will make, or checks that a rerun makes the same.

    Args:
        directory: the artefact; the first run writes its plan.json.
        plan: everything that must not change between runs that share the work.

    Raises:
        FingerprintError: the directory was begun with another plan; names what differs.
    """
    path = epath.Path(directory) / _PLAN
    if not path.exists():
        write_json(path, plan)
        return
    begun = read_json(path)
    differing = [name for name in sorted({*begun, *plan}) if begun.get(name) != plan.get(name)]
    if differing:
        raise FingerprintError(
            f"begun with {', '.join(f'{name} {begun.get(name)}' for name in differing)}",
            where=str(directory),
            expected=", ".join(f"{name} {plan.get(name)}" for name in differing),
            fix="name another directory, or delete this one to begin again",
        )


class Fingerprint:
    """An incremental SHA-256 over strings, bytes and arrays, each framed by its length.

    Example:
        >>> Fingerprint().add("a").add("b").hex() != Fingerprint().add("ab").hex()
        True
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, part: str | bytes | int | np.ndarray) -> Fingerprint:
        """Adds one part; parts do not run together. Returns self."""
        if isinstance(part, np.ndarray):
            self.add(f"{part.dtype.str}{part.shape}")
            data = np.ascontiguousarray(part).tobytes()
        elif isinstance(part, bytes):
            data = part
        else:
            data = str(part).encode("utf-8", "surrogatepass")
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)
        return self

    def hex(self) -> str:
        """The first 16 hexadecimal digits."""
        return self._hash.hexdigest()[:_DIGITS]


def fingerprint(parts: Iterable[str | bytes | int | np.ndarray]) -> str:
    """Fingerprint of the parts in order."""
    total = Fingerprint()
    for part in parts:
        total.add(part)
    return total.hex()


def fingerprint_json(value: object) -> str:
    """Fingerprint of a JSON-able value, independent of the order of keys."""
    return fingerprint([json.dumps(value, sort_keys=True, ensure_ascii=False)])


def require_equal(
    what: str, found: Mapping[str, str], expected: Mapping[str, str], fix: str
) -> None:
    """Raises `FingerprintError` naming both sides where any shared fingerprint differs.

    Args:
        what: the artefact being checked, with its path.
        found: name -> fingerprint recorded in the artefact.
        expected: name -> fingerprint required.
        fix: the command that would rebuild it.
    """
    for name in sorted(expected.keys() & found.keys()):
        if found[name] != expected[name]:
            raise FingerprintError(
                f"{what} was made from {name} {found[name]}",
                where=what,
                expected=f"{name} {expected[name]}",
                fix=fix,
            )
