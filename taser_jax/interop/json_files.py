"""JSON files of other libraries' checkpoints."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from taser_jax.errors import DataError


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: it is not JSON, or another value than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"not JSON ({error})", where=str(path)) from error
    if not isinstance(value, dict):
        raise DataError(f"{type(value).__name__}", where=str(path), expected="a JSON object")
    return value
