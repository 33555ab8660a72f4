"""`model.json`: a dual encoder's configuration, stored beside its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from taser_jax.models.bert_config import Family
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.fusion import BertFusionConfig, T5FusionConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.artifacts import check_version
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import to_plain, typed

FORMAT_VERSION = 1

_DEFAULT_KIND = DualEncoderConfig.kind
_CONFIGS = (DualEncoderConfig, T5DualEncoderConfig, BertFusionConfig, T5FusionConfig)
# Where a file has a field that no configuration has, (field, value), and the field after it.
_CONSTANTS = (
    (("experts",), ("pattern", None), "blocks"),
    ((), ("tower_init", "copied"), "normalization"),
)
_KINDS = {config.kind: config for config in _CONFIGS}


def to_json(config: ModelConfig) -> str:
    """Writes every field but `scan`, so that changed defaults do not affect saved models.

    A BERT's file has no kind, and no query_tasks if they are empty. Fingerprints of models depend
    on this text.

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
    named = {} if config.kind == _DEFAULT_KIND else {"kind": config.kind}
    fields = _settings(config)
    if not named and not config.query_tasks:
        del fields["query_tasks"]
    value = {"format_version": FORMAT_VERSION, **named, **fields}
    return json.dumps(value, indent=2) + "\n"


def _settings(config: ModelConfig) -> dict[str, Any]:
    """A model's fields with the constants that fingerprints of BERT's models include.

    A BERT has no field of the other families. How a step is compiled is no part of a model.
    """
    fields = to_plain(config)
    for stack in ("bert", "t5"):
        fields.get(stack, {}).pop("scan", None)
    if fields.get("bert", {}).get("family") == Family.BERT.value:
        del fields["bert"]["family"], fields["bert"]["rotary"]
    for names, constant, before in _CONSTANTS:
        part = fields
        for name in names:
            part = part.get(name, {})
        if before in part:
            items = list(part.items())
            items.insert(list(part).index(before), constant)
            part.clear()
            part.update(items)
    return fields


# Fields that do not affect the embedding of a passage.
_OF_QUERIES = ("towers", "query_tasks", "tower_init", "decoder_layers", "documents")


def passage_json(config: ModelConfig) -> str:
    """The settings that passage embeddings depend on; fusing documents does not change them."""
    fields = {name: v for name, v in _settings(config).items() if name not in _OF_QUERIES}
    return json.dumps({"kind": config.kind.removesuffix("_fusion"), **fields}, sort_keys=True)


def from_json(text: str, *, where: str = "model.json") -> ModelConfig:
    """Reads what `to_json` wrote. Absent fields take their defaults.

    Args:
        text: the JSON.
        where: the file's name, for messages.

    Raises:
        ConfigError: malformed JSON, another format version, an unknown kind, field or enum value,
            or a value of the wrong type.
    """
    again = "read it with the version of taser_jax that wrote it, or train again"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", where=where, fix=again) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{type(value).__name__}", where=where, expected="a JSON object")
    check_version(value, FORMAT_VERSION, where=where, fix=again, error=ConfigError)
    del value["format_version"]
    for names, (field, constant), _ in _CONSTANTS:
        part = value
        for name in names:
            part = part.get(name, {})
        if isinstance(part, dict) and part.get(field) == constant:
            part.pop(field, None)
    kind = value.pop("kind", _DEFAULT_KIND)
    if not isinstance(kind, str) or kind not in _KINDS:
        problem = f"kind is {kind!r}, not one of {', '.join(_KINDS)}"
        raise ConfigError(problem, where=where, fix=again)
    config: ModelConfig = typed(value, _KINDS[kind], where=where, fix=again)
    unknown = set(_paths(value)) - set(_paths(to_plain(config)))
    if unknown:
        raise ConfigError(f"unknown fields: {', '.join(sorted(unknown))}", where=where, fix=again)
    return config


def _paths(value: Mapping[str, object], place: str = "") -> Iterator[str]:
    """Names of all fields, those of objects within as `object.field`."""
    for name, part in value.items():
        yield f"{place}{name}"
        if isinstance(part, dict):
            yield from _paths(part, f"{place}{name}.")
