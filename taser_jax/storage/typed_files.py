"""JSON read into types: ranges are annotations, and what does not fit names file, field and fix."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import os
import re
import stat
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeGuard, TypeVar

import msgspec
from etils import epath

from taser_jax.storage import checksums
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.publishing import FilePath, is_remote

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
# Ranges of numbers, for fields of files and of configurations.
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
# As many as JAX's keys take.
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PositiveNumber = Annotated[float, msgspec.Meta(gt=0)]
NaturalNumber = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveShare = Annotated[float, msgspec.Meta(gt=0, le=1)]
Rate = Annotated[float, msgspec.Meta(ge=0, lt=1)]

BUILDERS: dict[type, list[Callable[..., Any]]] = collections.defaultdict(list)
"""Type -> functions that make its values and that Gin files may refer to."""

_SHOWN = 60
_AT = re.compile(r" - at '(key in )?\$?(.*?)'$")
_NAMED = re.compile(r"`(.*?)`")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_BOUNDS = {">=": r", \1 or more", "<=": r", \1 or less", ">": r" above \1", "<": r" below \1"}


class Metadata(msgspec.Struct, frozen=True):
    """The metadata.json of an artefact, as far as all kinds share it.

    Attributes:
        fingerprints: of what it was made from, by name.
    """

    fingerprints: dict[str, str]


class Checked:
    """Base of configurations: their fields are checked against the ranges of their annotations.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Sizes(Checked):
        ...     block: Positive = 512

        `Sizes(block=0)` raises "Sizes: block is 0", expected "an integer, 1 or more".

    Attributes:
        RANGE_FIX: what the messages advise.
    """

    RANGE_FIX: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), fix=self.RANGE_FIX)


def builds(function: Function) -> Function:
    """Lets Gin files refer to a function wherever they set what it returns.

    Example:
        `DualEncoderConfig.bert = @pretrained_bert()`
    """
    BUILDERS[typing.get_type_hints(function)["return"]].append(function)
    return function


def check_ranges(annotated: Any, values: Mapping[str, object], *, fix: str | None = None) -> None:
    """Checks values against the ranges of a class's fields or a function's parameters.

    Args:
        annotated: the class or function.
        values: by name.
        fix: what messages advise.

    Raises:
        ConfigError: naming the class or function, and the first value out of its range.
    """
    given = {name: hint for name, hint in _ranges(annotated).items() if name in values}
    for name, hint in given.items():
        try:
            msgspec.convert(values[name], hint)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{name} is {values[name]!r}",
                where=annotated.__name__,
                expected=_in_words(str(error)).partition(" - at ")[0].removeprefix("expected "),
                fix=fix,
            ) from error


@functools.cache
def _ranges(annotated: object) -> dict[str, Any]:
    """Fields or parameters that have a range, with their annotations."""
    hints = typing.get_type_hints(annotated, include_extras=True)
    plain = typing.get_type_hints(annotated)
    return {name: hint for name, hint in hints.items() if hint != plain[name]}


def typed(value: object, kind: type[T], *, where: str, fix: str | None = None) -> T:
    """JSON values as a type: a Struct or a dataclass, a list, or a dictionary of one type.

    A field that is null counts as absent; fields that the type does not have are ignored.

    Example:
        >>> class Sizes(msgspec.Struct):
        ...     vocab_size: Positive
        >>> typed({"vocab_size": 32, "model_type": "t5"}, Sizes, where="config.json").vocab_size
        32

    Args:
        value: from `json.loads`.
        kind: the type.
        where: the file, for messages.
        fix: what messages advise.

    Raises:
        DataError: naming file and field, for one that is required and absent, of another type, or
            out of range.
    """
    if isinstance(value, dict) and hasattr(kind, "__annotations__"):
        value = {name: part for name, part in value.items() if part is not None}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, *rest = _AT.split(_in_words(str(error)))
        field = rest[1].lstrip(".") if rest else ""
        if choices := _choices(kind, field):
            message = f"expected one of {', '.join(map(repr, choices))}"
        content = _at(value, field)
        raise DataError(
            f"{field} is {content}: {message}" if content else message,
            where=f"{where}, field {field!r}" if field else where,
            fix=fix,
        ) from error


def check_regular(path: FilePath) -> None:
    """Refuses a pipe or a device, which could not be read twice, and whose end may never come.

    Raises:
        DataError: it is one.
    """
    if not is_remote(path) and os.path.exists(path):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DataError(
                "a pipe or a device, not a file",
                where=os.fspath(path),
                fix="write what it gives into a file, and name that",
            )


def check_version(value: Mapping[str, Any], version: int, *, where: FilePath, fix: str) -> None:
    """Refuses a format version that this code does not read.

    Args:
        value: what was read; its "format_version" is compared.
        version: the one that is read.
        where: the file it came from.
        fix: what the message advises.

    Raises:
        DataError: naming both.
    """
    written = value.get("format_version")
    if written != version:
        problem, expected = f"format version {written}", f"format version {version}"
        raise DataError(problem, where=os.fspath(where), expected=expected, fix=fix)


def read_typed(
    path: FilePath,
    kind: type[T],
    *,
    fix: str | None = None,
    absent: T | None = None,
    version: int | None = None,
) -> T:
    """A JSON file, local or gs://, as a type.

    Example:
        read_typed("config.json", Sizes)

    Args:
        path: the file.
        kind: as for `typed`.
        fix: what the message advises.
        absent: returned if there is no such file; None makes that an error.
        version: its format version; None if it has none.

    Raises:
        DataError: it cannot be read, was damaged, is not JSON, has a lone surrogate, is of another
            version, or has a field that is not what it must be.
    """
    where = os.fspath(path)
    check_regular(path)
    checksums.check_file(path, fix=fix or "run the command that wrote it again")
    try:
        # Some editors put a byte order mark first.
        written = epath.Path(path).read_bytes().decode("utf-8-sig")
        value = json.loads(written)
    except FileNotFoundError as error:
        if absent is not None:
            return absent
        raise DataError("no such file", where=where, fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=where, fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where, fix=fix) from error
    check_text(value, written=written, where=where, fix=fix)
    if version is not None:
        facts = typed(value, dict[str, Any], where=where, fix=fix)
        check_version(facts, version, where=where, fix=fix or "")
    return typed(value, kind, where=where, fix=fix)


def read_json(
    path: FilePath, *, fix: str | None = None, absent: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object in a file, unchecked; arguments and errors as for `read_typed`."""
    return read_typed(path, dict[str, Any], fix=fix, absent=absent)


def check_text(value: object, *, written: str, where: str, fix: str | None = None) -> None:
    r"""Refuses JSON with a lone surrogate, which cannot be written as UTF-8.

    A JSON escape can stand for one half of a surrogate pair, such as \ud800.

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
    # Not recursive: values may be nested more deeply than Python's recursion limit.
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:
        field, part = waiting.pop()
        if isinstance(part, str) and part.encode(errors="ignore").decode() != part:
            raise DataError(
                "one half of a character of two (a lone surrogate, such as \\ud800)",
                where=f"{where}, field {field!r}",
                fix=fix or "write the file again from its source, or replace the escape by \\ufffd",
            )
        if isinstance(part, list):
            waiting += reversed([(f"{field}[{i}]", inner) for i, inner in enumerate(part)])
        elif isinstance(part, dict):
            names = {name: f"{field}.{ascii(name)[1:-1]}".lstrip(".") for name in part}
            for name, inner in reversed(part.items()):
                waiting += [(names[name], inner), (names[name], name)]


def _in_words(message: str) -> str:
    """An error of msgspec's: types and bounds in words, names in quotes.

    Example:
        >>> _in_words("Expected `int` >= 1")
        'expected an integer, 1 or more'
    """

    def worded(named: re.Match[str]) -> str:
        types = named[1].split(" | ")
        words = [_WORDS.get(kind, kind) for kind in types]
        return " or ".join(words) if words != types or "null" in types else f"'{named[1]}'"

    message = _NAMED.sub(worded, message[0].lower() + message[1:])
    for sign, words in _BOUNDS.items():
        message = re.sub(rf" {sign} (-?\d+(?:\.0*[1-9]\d*)?)(?:\.0)?", words, message)
    return message


def _at(value: Any, field: str) -> str:
    """The value of a field such as `files[3].size`, as JSON; empty where that is not known."""
    try:
        for name, index in re.findall(r"(\w+)|\[(\d+)\]", field):
            value = value[int(index)] if index else value[name]
    except (KeyError, IndexError, TypeError):
        return ""
    if "[...]" in field or not field:
        return ""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


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
    settings: dict[str, Any] = {}
    for name, value in to_plain(configs).items():
        if isinstance(value, dict):
            settings |= flatten(**{f"{name}.{key}": part for key, part in value.items()})
        else:
            settings[name] = value
    return settings


def parts_of(value: object) -> Mapping[str, Any] | None:
    """The fields of a dataclass or the items of a mapping; None for any other value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {str(key): part for key, part in value.items()} if isinstance(value, Mapping) else None


def is_enum(hint: object) -> TypeGuard[type[enum.Enum]]:
    """Whether an annotation, or a part of one, is an enum."""
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _choices(hint: Any, field: str) -> list[object]:
    """Values of the enum that a field must be of; empty for a field of another type."""
    for name in re.findall(r"\w+", field):
        if not name.isdecimal():
            parts = (hint, *typing.get_args(hint))
            hints = (typing.get_type_hints(part) for part in parts if isinstance(part, type))
            hint = next((names[name] for names in hints if name in names), None)
    parts = (hint, *typing.get_args(hint))
    return [member.value for part in parts if is_enum(part) for member in part]
