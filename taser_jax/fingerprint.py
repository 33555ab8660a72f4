"""Content fingerprints: which model, collection and vocabulary an artefact came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from taser_jax.errors import FingerprintError

_DIGITS = 16


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


def fingerprint_json(value: Any) -> str:
    """Fingerprint of a JSON-able value, independent of the order of keys."""
    return fingerprint([json.dumps(value, sort_keys=True, ensure_ascii=False)])


def require_equal(
    what: str, found: Mapping[str, str], expected: Mapping[str, str], fix: str
) -> None:
    """Raises `FingerprintError` naming both sides where any shared fingerprint differs.

    Args:
        what: the artefact being checked, with its path.
        found: name -> fingerprint recorded in the artefact.
        expected: name -> fingerprint of what it is to be used with.
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
