"""Settings of an encoder that are not in its weights, from its sentence-transformers files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.models.dual_encoder import Normalization
from taser_jax.storage.artifacts import read_json
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.json_fields import JsonField, JsonType, checked_fields

MODULES_FILE = "modules.json"
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIZE_FIELDS = {"max_seq_length": JsonField(JsonType.INTEGER, minimum=1)}
_POOLING_FIELDS = {
    **dict.fromkeys(_POOLING_FLAGS, JsonField(JsonType.BOOLEAN)),
    "pooling_mode": JsonField((JsonType.STRING, JsonType.LIST), items=JsonField(JsonType.STRING)),
}

_PROMPT_FIELDS = {"prompts": JsonField(JsonType.OBJECT)}
_QUERY_PROMPTS = ("query", "search_query")
_PASSAGE_PROMPTS = ("passage", "document", "search_document")


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """How token states become an embedding, and the limits and prompt of texts.

    Attributes:
        pooling: how token states become one vector.
        normalization: normalisation of that vector.
        max_length: maximum tokens per text; None if not recorded.
        query_prompt: text put before every query.
    """

    pooling: Pooling
    normalization: Normalization
    max_length: int | None = None
    query_prompt: str = ""


def read_encoder_settings(directory: pathlib.Path) -> EncoderSettings | None:
    """Reads modules.json and the files that it names.

    Args:
        directory: the checkpoint's directory.

    Returns:
        The settings; None where the directory has no modules.json (a plain checkpoint).

    Raises:
        ConfigError: an unsupported module or pooling, or a prompt for passages.
        DataError: a file is missing or damaged.
    """
    modules_path = directory / MODULES_FILE
    if not modules_path.is_file():
        return None
    modules = {_name(module, modules_path): module for module in _modules(modules_path)}
    unknown = sorted(set(modules) - {"Transformer", "Pooling", "Normalize"})
    if unknown or "Pooling" not in modules:
        raise ConfigError(
            f"modules {', '.join(modules)}",
            where=str(modules_path),
            expected="Transformer, Pooling and perhaps Normalize",
            fix="take a model without further layers",
        )
    pooling = _pooling(directory / str(modules["Pooling"]["path"]) / "config.json")
    sizes = read_json(directory / "sentence_bert_config.json", fields=_SIZE_FIELDS, absent={})
    return EncoderSettings(
        pooling=pooling,
        normalization=Normalization.L2 if "Normalize" in modules else Normalization.NONE,
        max_length=sizes.get("max_seq_length"),
        query_prompt=_query_prompt(directory / "config_sentence_transformers.json"),
    )


def _modules(path: pathlib.Path) -> list[Mapping[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise DataError("no list of modules", where=str(path), expected="[{...}, ...]")
    return value


def _name(module: Mapping[str, Any], path: pathlib.Path) -> str:
    """The class name of a module; the classes have moved between packages under the same names."""
    if not isinstance(module.get("type"), str) or not isinstance(module.get("path"), str):
        raise DataError(f"module {dict(module)}", where=str(path), expected="'type' and 'path'")
    return module["type"].rpartition(".")[2]


def _pooling(path: pathlib.Path) -> Pooling:
    """The only pooling mode; older files have one boolean per mode, newer ones name the mode."""
    settings = read_json(path, fields=_POOLING_FIELDS)
    modes = [name for name in _POOLING_FLAGS if settings.get(name)]
    mode = settings.get("pooling_mode", [_POOLING_FLAGS[name] for name in modes])
    chosen = mode if isinstance(mode, list) else [mode]
    if len(chosen) != 1 or chosen[0] not in {pooling.value for pooling in Pooling}:
        raise ConfigError(
            f"pooling by {', '.join(map(str, chosen)) or 'nothing'}",
            where=str(path),
            expected=f"one of {', '.join(pooling.value for pooling in Pooling)}",
            fix="take a model that pools in one of these ways",
        )
    return Pooling(chosen[0])


def _query_prompt(path: pathlib.Path) -> str:
    found = read_json(path, fields=_PROMPT_FIELDS, absent={}).get("prompts", {})
    names = dict.fromkeys((*_PASSAGE_PROMPTS, *_QUERY_PROMPTS), JsonField(JsonType.STRING))
    prompts = checked_fields(found, names, where=f"{path}, field 'prompts'")
    for name in _PASSAGE_PROMPTS:
        if prompts.get(name):
            raise ConfigError(
                f"a prompt for passages, {prompts[name]!r}",
                where=str(path),
                expected="prompts for queries alone",
                fix="take another model; passages are encoded as title and text",
            )
    return next((prompts[name] for name in _QUERY_PROMPTS if prompts.get(name)), "")
