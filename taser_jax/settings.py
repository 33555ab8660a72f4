"""Configurations as flat, JSON-able settings, so that a stage can say which one changed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


def flatten(**configs: Any) -> dict[str, Any]:
    """Names every setting of some configurations by its path.

    Example:
        >>> flatten(evaluation=EvaluationConfig())["evaluation.judge"]  # doctest: +SKIP
        'qrels'

    Args:
        configs: name -> dataclass, mapping, enum, sequence or plain value, nested as they like.

    Returns:
        Path -> JSON-able value.
    """
    found: dict[str, Any] = {}
    for name, value in configs.items():
        inner = _parts(value)
        if inner is None:
            found[name] = _plain(value)
        else:
            found |= flatten(**{f"{name}.{key}": part for key, part in inner.items()})
    return found


def _parts(value: Any) -> Mapping[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {str(key): part for key, part in value.items()} if isinstance(value, Mapping) else None


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
