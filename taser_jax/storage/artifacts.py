"""Artefacts: files written whole or not at all, with a format version and content fingerprints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import tokenize
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

from taser_jax.storage import checksums, publishing
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError, storage_errors
from taser_jax.storage.publishing import FilePath, is_remote
from taser_jax.storage.typed_files import Metadata, check_version, read_json, typed

# Re-exported: readers and writers of artefacts need them, too.
__all__ = ["FilePath", "Metadata", "check_version", "is_remote", "read_json", "storage_errors"]

M = TypeVar("M", bound=Metadata)

METADATA = "metadata.json"
# What NumPy raises for a damaged file, whose header may not be Python or whose shape not a size.
ARRAY_ERRORS = (
    *(OSError, ValueError, EOFError, SyntaxError, TypeError, KeyError),
    *(MemoryError, OverflowError, RecursionError, tokenize.TokenError, zipfile.BadZipFile),
)
_PLAN = "plan.json"
TOKEN_STORE, NEGATIVES, MODEL, VOCABULARY = "token store", "negatives", "model", "vocabulary"
COLLECTION, MEMORIES = "collection", "mixture of memories"
# File of an artefact -> its kind; metadata.json and plan.json name it themselves.
_KINDS = {
    "model.json": MODEL,
    "vocabulary.json": VOCABULARY,
    "passages": COLLECTION,
    "memories.json": MEMORIES,
}
_DIGITS = 16


def split_path(directory: FilePath, task: str, split: str, suffix: str = "") -> pathlib.Path:
    """The file of one task's split in a folder of runs, negatives or query embeddings.

    Example:
        >>> split_path("runs", "nq/dev", "test", ".trec").name
        'nq%2Fdev.test.trec'
    """
    name = f"{urllib.parse.quote(task, safe='')}.{urllib.parse.quote(split, safe='')}{suffix}"
    return pathlib.Path(directory) / name


def path_from(directory: FilePath, path: FilePath) -> str:
    """A relative path that leads from a directory to `path`, so that both can be moved together.

    The system follows ".." from the place that a link leads to: where the directory is below one,
    the path begins there. A link that `path` ends with stays.
    """
    lexical = os.path.relpath(path, directory)
    if os.path.realpath(os.path.join(directory, lexical)) == os.path.realpath(path):
        return lexical
    folder, name = os.path.split(os.fspath(path).rstrip("/"))
    there = os.path.join(os.path.realpath(folder), name)
    return os.path.relpath(there, os.path.realpath(directory))


def file_name(name: str) -> str:
    """A name given by the user, as used for folders and stages.

    Example:
        >>> file_name("TASER Det-R (mined negatives)")
        'taser-det-r-mined-negatives'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextlib.contextmanager
def replacing(path: FilePath, *, recorded: bool = True) -> Iterator[epath.Path]:
    """Yields a scratch path that takes the place of `path` when the block succeeds.

    The scratch path may become a file or a directory; a reader sees the old content or the new,
    never a part of it, also after a kill.

    Args:
        path: a local or gs:// path; its folder is created where absent.
        recorded: whether to add a file's size and checksum to the `checksums.txt` beside it.

    Raises:
        StorageError: the disk is full or the directory cannot be written.
    """
    target = epath.Path(path)
    with storage_errors(path):
        if is_remote(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        else:
            publishing.make_folder(target.parent)
        scratch = publishing.scratch_for(target)
        try:
            yield scratch
            if recorded and not scratch.is_dir():
                with checksums.recording(target, checksums.found(scratch)):
                    publishing.publish(scratch, target)
            else:
                publishing.publish(scratch, target)
        finally:
            with contextlib.suppress(OSError):
                if scratch.is_dir():
                    scratch.rmtree()
                else:
                    scratch.unlink(missing_ok=True)


def write_text(path: FilePath, text: str, *, recorded: bool = True) -> None:
    """Writes a UTF-8 text file atomically; `recorded` as for `replacing`."""
    write_bytes(path, text.encode(), recorded=recorded)


def write_bytes(path: FilePath, content: bytes, *, recorded: bool = True) -> None:
    """Writes a file atomically, as a bucket always does; `recorded` as for `replacing`."""
    if is_remote(path):
        target = epath.Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        record = len(content), f"{zlib.crc32(content):08x}"
        with checksums.recording(target, record) if recorded else contextlib.nullcontext():
            target.write_bytes(content)
        return
    with replacing(path, recorded=recorded) as scratch:
        scratch.write_bytes(content)


def write_json(path: FilePath, value: object) -> None:
    """Writes one indented JSON value atomically and records its checksum."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_metadata(
    directory: FilePath,
    kind: str,
    version: int,
    fields: type[M],
    *,
    fingerprints: Mapping[str, str] | None = None,
    fix: str = "",
) -> M:
    """Reads a directory's metadata.json and checks its kind and what it was made from.

    Args:
        directory: the artefact.
        kind: what it must hold, for example "embeddings".
        version: the newest format version this code reads.
        fields: the type of its fields; others are ignored.
        fingerprints: those that it must have, as far as it records them.
        fix: what a message about another fingerprint advises.

    Raises:
        DataError: the artefact is absent, unfinished, damaged, not JSON, or of another kind or
            version, or a field is not what it must be.
        FingerprintError: it was made from something else.
    """
    path = epath.Path(directory) / METADATA
    if not path.exists():
        raise DataError(
            f"no finished {kind} here",
            where=str(path),
            fix="rerun that command (it resumes where it stopped), or correct the path",
        )
    metadata = read_json(path)
    written = (metadata.get("kind"), metadata.get("format_version"))
    if written != (kind, version):
        raise DataError(
            f"kind {written[0]!r}, format version {written[1]!r}",
            where=str(path),
            expected=f"kind {kind!r}, format version {version}",
            fix="rebuild it with this version of taser_jax, or correct the path",
        )
    again = f"delete {os.fspath(directory)} and run the command that makes {kind} again"
    checksums.check_directory(directory, fix=again)
    result = typed(metadata, fields, where=os.fspath(path), fix=again)
    what = f"{kind} {os.fspath(directory)}"
    require_equal(what, result.fingerprints, fingerprints or {}, fix)
    return result


def kind_of(directory: FilePath) -> str | None:
    """The kind of artefact in a directory, finished or not; None if it is not this package's."""
    folder = epath.Path(directory)
    for name in (METADATA, _PLAN):
        if (folder / name).exists():
            facts = read_json(folder / name)
            is_store = "passages_fingerprint" in facts
            return facts.get("kind", TOKEN_STORE if is_store else NEGATIVES)
    return next((kind for name, kind in _KINDS.items() if (folder / name).exists()), None)


def check_kind(directory: FilePath, kinds: Sequence[str]) -> None:
    """Refuses a directory with an artefact of another kind, before anything is written there.

    Raises:
        ConfigError: naming what is there.
    """
    present = kind_of(directory)
    if present is not None and present not in kinds:
        raise ConfigError(
            f"{present} is here already",
            where=os.fspath(directory),
            expected=f"{' or '.join(kinds) or 'no artefact'}, or an empty or new directory",
            fix="choose another directory, or delete this one",
        )


def check_empty(directory: FilePath) -> None:
    """Refuses a place with anything in it, before a whole directory is put there.

    Raises:
        ConfigError: there is a file, or a directory that holds more than a lock.
    """
    place = epath.Path(directory)
    ours = {publishing.LOCK, publishing.SCRATCH}
    is_free = place.is_dir() and {path.name for path in place.iterdir()} <= ours
    if place.exists() and not is_free:
        fix = "choose another directory, or delete what is there"
        raise ConfigError("there is something here already", where=os.fspath(place), fix=fix)


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
    what: str, recorded: Mapping[str, str], expected: Mapping[str, str], fix: str
) -> None:
    """Raises `FingerprintError` naming both sides where any shared fingerprint differs.

    Args:
        what: the artefact being checked, with its path.
        recorded: name -> fingerprint in the artefact.
        expected: name -> fingerprint required.
        fix: the command that would rebuild it.
    """
    for name in sorted(expected.keys() & recorded.keys()):
        if recorded[name] != expected[name]:
            raise FingerprintError(
                f"made from {name} {recorded[name]}",
                where=what,
                expected=f"{name} {expected[name]}",
                fix=fix,
            )
