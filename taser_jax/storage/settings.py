"""Configurations as JSON: nested and read back by type, or flat, one path per setting."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from taser_jax.storage.errors import ConfigError

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """A configuration as JSON values: dataclasses and mappings as objects, enums by value.

    Example:
        >>> to_plain(LayerRange(first=1, last=None))  # doctest: +SKIP
        {'first': 1, 'last': None}
    """
    parts = parts_of(value)
    if parts is not None:
        return {name: to_plain(part) for name, part in parts.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def from_plain(kind: type[T], value: object, where: str) -> T:
    """A configuration from what `to_plain` made of it; absent fields take their defaults.

    Args:
        kind: a dataclass of numbers, strings, enums, tuples of one type and such dataclasses.
        value: JSON values.
        where: the file, for messages.

    Raises:
        ConfigError: an unknown field or enum value, or a value of another type; names the field.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r}", where=where, expected="a JSON object")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in value:
        if name not in names:
            raise ConfigError(
                f"unknown field {name!r}", where=where, expected=f"one of {', '.join(names)}"
            )
    return kind(
        **{
            name: _typed(hints[name], part, f"{where}, field {name!r}")
            for name, part in value.items()
        }
    )


def _typed(hint: Any, value: object, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        if value not in values:
            raise ConfigError(f"{value!r}", where=where, expected=f"one of {', '.join(values)}")
        return hint(value)
    if typing.get_origin(hint) is tuple:
        part_type = typing.get_args(hint)[0]
        if not isinstance(value, list) or any(type(part) is not part_type for part in value):
            parts = "integers" if part_type is int else "strings"
            raise ConfigError(f"{value!r}", where=where, expected=f"a list of {parts}")
        return tuple(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{value!r}", where=where, expected=f"a value of type {hint.__name__}")
    return value


def flatten(**configs: object) -> dict[str, Any]:
    """Every setting of some configurations by its path, so that a stage can name what changed.

    Example:
        >>> flatten(evaluation=EvaluationConfig())["evaluation.judge"]  # doctest: +SKIP
        'qrels'

    Args:
        configs: name -> dataclass, mapping, enum, sequence or plain value, nested to any depth.

    Returns:
        Path -> JSON-able value.
    """
    found: dict[str, Any] = {}
    for name, value in configs.items():
        parts = parts_of(value)
        if parts is None:
            found[name] = to_plain(value)
        else:
            found |= flatten(**{f"{name}.{key}": part for key, part in parts.items()})
    return found


def parts_of(value: object) -> Mapping[str, Any] | None:
    """The fields of a dataclass or the items of a mapping; None for any other value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {str(key): part for key, part in value.items()} if isinstance(value, Mapping) else None
