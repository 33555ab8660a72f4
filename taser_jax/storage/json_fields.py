"""What JSON from elsewhere may hold: one description per field, checked before anything is used."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

from taser_jax.storage.errors import DataError

_SHOWN = 60


class JsonType(enum.Enum):
    """A type of JSON values, named as messages name it."""

    STRING = "a string"
    INTEGER = "an integer"
    NUMBER = "a finite number"
    BOOLEAN = "true or false"
    OBJECT = "an object {...}"
    LIST = "a list [...]"

    def holds(self, value: object) -> bool:
        """Whether the value is of this type; true and false are no numbers."""
        if self is JsonType.INTEGER:
            return type(value) is int
        if self is JsonType.NUMBER:
            return type(value) in (int, float) and _is_finite(value)  # type: ignore[arg-type]
        return isinstance(value, _PYTHON[self])


_PYTHON = {
    JsonType.STRING: str,
    JsonType.BOOLEAN: bool,
    JsonType.OBJECT: dict,
    JsonType.LIST: list,
}


@dataclasses.dataclass(frozen=True)
class JsonField:
    """What one field of a JSON object may be. `null` counts as absent.

    Example:
        JsonField(JsonType.INTEGER, required=True, minimum=1)  # a size

    Attributes:
        types: one of these types.
        required: whether it may be absent.
        minimum: the least number; `above` excludes the number itself.
        above: a number that it must exceed.
        maximum: the greatest number.
        choices: the strings that it may be; empty for any.
        items: what each element of a list, or each value of an object, must be.
        fields: fields of an object; others are ignored.
    """

    types: JsonType | tuple[JsonType, ...]
    _: dataclasses.KW_ONLY
    required: bool = False
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    items: JsonField | None = None
    fields: Mapping[str, JsonField] | None = None

    @property
    def expected(self) -> str:
        """The description, in words.

        Example:
            >>> JsonField(JsonType.INTEGER, minimum=1, maximum=8).expected
            'an integer, at least 1, at most 8'
        """
        types = self.types if isinstance(self.types, tuple) else (self.types,)
        limits = {"at least": self.minimum, "above": self.above, "at most": self.maximum}
        words = [f"{name} {limit:,}" for name, limit in limits.items() if limit is not None]
        words += [f"one of {', '.join(map(repr, self.choices))}"] if self.choices else []
        return ", ".join([" or ".join(kind.value for kind in types), *words])

    def accepts(self, value: object) -> bool:
        """Whether type and range are right; items and fields are not checked."""
        types = self.types if isinstance(self.types, tuple) else (self.types,)
        if not any(kind.holds(value) for kind in types):
            return False
        if isinstance(value, str) and self.choices:
            return value in self.choices
        if type(value) not in (int, float):
            return True
        number: Any = value
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.above is None or number > self.above)
            and (self.maximum is None or number <= self.maximum)
        )


def checked_fields(
    value: Mapping[str, Any],
    fields: Mapping[str, JsonField],
    *,
    where: str,
    fix: str | None = None,
    _inside: str = "",
) -> dict[str, Any]:
    """A JSON object whose fields are what they must be, without those that are null.

    Example:
        >>> checked_fields({"a": 1, "b": None}, {"b": JsonField(JsonType.STRING)}, where="x.json")
        {'a': 1}

    Args:
        value: the object.
        fields: descriptions by name; fields without one are passed through.
        where: the file, for messages.
        fix: what messages advise.

    Raises:
        DataError: naming file and field, for one that is required and absent, of another type, or
            out of range.
    """
    found = {name: item for name, item in value.items() if item is not None or name not in fields}
    for name, field in fields.items():
        path = f"{_inside}{name}"
        if name in found:
            found[name] = _checked(found[name], field, path=path, where=where, fix=fix)
        elif field.required:
            raise DataError(f"no field {path!r}", where=where, expected=field.expected, fix=fix)
    return found


def lone_surrogate(value: object) -> str | None:
    r"""Finds the first string with a lone surrogate, which cannot be written as UTF-8.

    A JSON escape can stand for one half of a surrogate pair.

    Example:
        >>> lone_surrogate({"a": ["b", "\ud800"]})
        'a[1]'

    Args:
        value: from `json.loads`, nested to any depth.

    Returns:
        The string's place; None if no string has one.
    """
    # Not recursive: values may be nested more deeply than Python's recursion limit.
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, str) and not _is_text(item):
            return path
        inner: list[tuple[str, object]] = []
        if isinstance(item, dict):
            for name, part in item.items():
                inside = f"{path}.{ascii(name)[1:-1]}".lstrip(".")
                inner += [(inside, name), (inside, part)]
        elif isinstance(item, list):
            inner = [(f"{path}[{i}]", part) for i, part in enumerate(item)]
        waiting += reversed(inner)
    return None


def check_text(value: object, *, written: str, where: str, fix: str | None = None) -> None:
    """Refuses JSON with a lone surrogate.

    Args:
        value: what was parsed.
        written: the text it was parsed from, which is searched first: that is quick.
        where: file and line.
        fix: what the message advises.

    Raises:
        DataError: naming the field.
    """
    if "\\u" not in written:
        return
    field = lone_surrogate(value)
    if field is not None:
        raise DataError(
            "one half of a character of two (a lone surrogate, such as \\ud800)",
            where=f"{where}, field {field!r}",
            expected="text that can be written as UTF-8",
            fix=fix or "write the file again from its source, or replace the escape by \\ufffd",
        )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(value: Any, field: JsonField, *, path: str, where: str, fix: str | None) -> Any:
    if not field.accepts(value):
        raise DataError(
            f"{path} is {_shown(value)}",
            where=f"{where}, field {path!r}",
            expected=field.expected,
            fix=fix,
        )
    if field.items is not None and isinstance(value, list):
        value = [
            _checked(item, field.items, path=f"{path}[{i}]", where=where, fix=fix)
            for i, item in enumerate(value)
        ]
    if field.items is not None and isinstance(value, dict):
        value = {
            name: _checked(item, field.items, path=f"{path}.{name}", where=where, fix=fix)
            for name, item in value.items()
        }
    if field.fields is not None and isinstance(value, dict):
        value = checked_fields(value, field.fields, where=where, fix=fix, _inside=f"{path}.")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
