"""Checks values from Gin against the annotations of the parameters that they set."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import os
import re
import types
import typing
from typing import Any

_SEQUENCES = (collections.abc.Sequence, list, tuple)
_MAPPINGS = (collections.abc.Mapping, dict)


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value; unknown kinds of annotations allow all.

    A whole number passes as a float and a list as a tuple; a string is no sequence of letters.

    Example:
        >>> fits({"query": 32}, dict[str, int]), fits("faq", collections.abc.Sequence[str])
        (True, False)

    Args:
        value: as given.
        hint: a resolved annotation.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin in _SEQUENCES or hint in _SEQUENCES:
        if isinstance(value, str | bytes) or not isinstance(value, collections.abc.Sequence):
            return False
        if origin is tuple and Ellipsis not in parts:
            return len(value) == len(parts) and all(map(fits, value, parts))
        return not parts or all(fits(part, parts[0]) for part in value)
    if origin in _MAPPINGS or hint in _MAPPINGS:
        if not isinstance(value, collections.abc.Mapping):
            return False
        return not parts or all(
            fits(key, parts[0]) and fits(part, parts[1]) for key, part in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    is_class = dataclasses.is_dataclass(hint) or inspect.isabstract(hint)
    if is_class or hint in (str, bool, type(None)):
        return isinstance(value, hint)
    if origin is os.PathLike or hint is os.PathLike:
        return isinstance(value, os.PathLike)
    return True


def at_home(value: object) -> object:
    """Expands `~` in paths: shells leave it alone after `=`, and Gin everywhere.

    Example:
        >>> at_home(["~/data", "a~b"]) == [os.path.expanduser("~/data"), "a~b"]
        True
    """
    if isinstance(value, str):
        return os.path.expanduser(value) if f"{value}/".startswith("~/") else value
    if type(value) is list:
        return [at_home(part) for part in value]
    if type(value) is tuple:
        return tuple(at_home(part) for part in value)
    if type(value) is dict:
        return {at_home(key): at_home(part) for key, part in value.items()}
    return value


def shown(hint: Any) -> str:
    """An annotation as it is written in code.

    Example:
        >>> shown(collections.abc.Mapping[str, int] | None)
        'Mapping[str, int] | None'
    """
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"[\w.]+\.(?=\w)", "", text)


def fix_of(value: Any, hint: Any) -> str | None:
    """What to write instead, where that is obvious."""
    candidates = [[value], {value: value}] if isinstance(value, str) else [[value]]
    for wrapped in candidates:
        if fits(wrapped, hint):
            return f"write {wrapped!r}"
    return None
