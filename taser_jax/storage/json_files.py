"""Reads JSON files and checks what they hold."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Mapping
from typing import Any

from etils import epath

from taser_jax.storage import checksums
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_fields import JsonField, JsonType, check_text, checked_fields

FilePath = str | os.PathLike[str]
_ABSENT = object()


def is_remote(path: FilePath) -> bool:
    """Whether the path has a scheme, such as gs://."""
    return "://" in os.fspath(path)


def read_json(
    path: FilePath,
    *,
    fields: Mapping[str, JsonField] = types.MappingProxyType({}),
    fix: str | None = None,
    absent: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON object in a file, local or gs://.

    Example:
        read_json(path, fields={"vocab_size": JsonField(JsonType.INTEGER, minimum=1)})

    Args:
        path: the file.
        fields: what the fields must be, for files from elsewhere; null counts as absent. Others are
            passed through.
        fix: what the message advises.
        absent: returned if there is no such file; None makes that an error.

    Raises:
        DataError: it cannot be read, was damaged, is not a JSON object, has a lone surrogate, or
            has a field that is not what it must be.
    """
    value = _read(path, fix=fix, absent=_ABSENT if absent is None else absent)
    if absent is not None and value is absent:
        return absent
    if not isinstance(value, dict):
        found = type(value).__name__
        raise DataError(found, where=os.fspath(path), expected="a JSON object", fix=fix)
    return checked_fields(value, fields, where=os.fspath(path), fix=fix)


def read_strings(path: FilePath, *, fix: str | None = None) -> list[str]:
    """The JSON list of strings in a file, such as query ids.

    Raises:
        DataError: as `read_json`, or it holds anything but strings.
    """
    strings = {"list": JsonField(JsonType.LIST, required=True, items=JsonField(JsonType.STRING))}
    value = _read(path, fix=fix, absent=_ABSENT)
    return checked_fields({"list": value}, strings, where=os.fspath(path), fix=fix)["list"]


def _read(path: FilePath, *, fix: str | None, absent: object) -> Any:
    where = os.fspath(path)
    if not is_remote(path):
        checksums.check_file(path, fix=fix or "run the command that wrote it again")
    try:
        # Some editors put a byte order mark first.
        written = epath.Path(path).read_bytes().decode("utf-8-sig")
        value = json.loads(written)
    except FileNotFoundError as error:
        if absent is not _ABSENT:
            return absent
        raise DataError("no such file", where=where, fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=where, fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where, fix=fix) from error
    check_text(value, written=written, where=where, fix=fix)
    return value
