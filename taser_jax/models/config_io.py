"""`model.json`: a dual encoder's configuration beside its checkpoints, embeddings and exports."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import typing
from typing import Any

from taser_jax.errors import ConfigError
from taser_jax.models.build import ModelConfig
from taser_jax.models.dual_encoder import DualEncoderConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig

FORMAT_VERSION = 1

_DEFAULT_KIND = "bert"
_KINDS: dict[str, type[ModelConfig]] = {
    _DEFAULT_KIND: DualEncoderConfig,
    "t5": T5DualEncoderConfig,
}


def to_json(config: ModelConfig) -> str:
    """Writes every field, defaults included, so that later defaults change no saved model.

    A BERT's file says no kind, and of query_tasks only where there are any: that is how all were
    written before there was a choice, and fingerprints of models are of this text.

    Example:
        >>> print(to_json(DualEncoderConfig()))
        {
          "format_version": 1,
          "bert": {
            "vocab_size": 30522,
            ...

    Returns:
        Indented JSON, ending in a newline; enums by value.
    """
    kind = next(name for name, kind in _KINDS.items() if type(config) is kind)
    named = {} if kind == _DEFAULT_KIND else {"kind": kind}
    fields = _plain(config)
    if kind == _DEFAULT_KIND and not config.query_tasks:
        del fields["query_tasks"]
    value = {"format_version": FORMAT_VERSION, **named, **fields}
    return json.dumps(value, indent=2) + "\n"


def from_json(text: str, *, where: str = "model.json") -> ModelConfig:
    """Reads what `to_json` wrote. Fields that are absent take their defaults.

    Args:
        text: the JSON.
        where: the file's name, for messages.

    Raises:
        ConfigError: malformed JSON, another format version, an unknown kind, field or enum value,
            or a value of the wrong type.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"no JSON: {error.msg}", where=f"{where}:{error.lineno}", expected="a JSON object"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{type(value).__name__}", where=where, expected="a JSON object")
    version = value.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"format_version is {version!r}",
            where=where,
            expected=str(FORMAT_VERSION),
            fix="read it with the taser_jax that wrote it, or train again",
        )
    kind = value.pop("kind", _DEFAULT_KIND)
    if kind not in _KINDS:
        raise ConfigError(
            f"kind is {kind!r}",
            where=where,
            expected=f"one of {', '.join(_KINDS)}",
            fix="read it with the taser_jax that wrote it",
        )
    return _dataclass(_KINDS[kind], value, where)


def save(config: ModelConfig, path: str | pathlib.Path) -> None:
    """Writes `to_json` to a file."""
    pathlib.Path(path).write_text(to_json(config), encoding="utf-8")


def load(path: str | pathlib.Path) -> ModelConfig:
    """Reads a file that `save` wrote.

    Raises:
        ConfigError: as `from_json`; also where there is no such file.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ConfigError("no such file", where=str(path), expected="a model's configuration")
    return from_json(path.read_text(encoding="utf-8"), where=str(path))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{value!r}", where=where, expected="a JSON object")
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    for name in value:
        if name not in names:
            raise ConfigError(
                f"unknown field {name!r}", where=where, expected=f"one of {', '.join(names)}"
            )
    fields = {name: _field(hints[name], v, f"{where}, field {name!r}") for name, v in value.items()}
    return kind(**fields)


def _field(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        if value not in values:
            raise ConfigError(f"{value!r}", where=where, expected=f"one of {', '.join(values)}")
        return hint(value)
    optional = type(None) in typing.get_args(hint)
    if value is None and optional:
        return None
    if optional:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
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
