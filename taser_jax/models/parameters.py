"""A dual encoder as files hold it: its parameters by path and shape, its configuration as JSON."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.batch import Tokens
from taser_jax.models.bert_config import Family
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig, Params
from taser_jax.models.fusion import BertFusionConfig, T5FusionConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.artifacts import FilePath, Fingerprint, check_version
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import flatten, read_json, to_plain, typed

FORMAT_VERSION = 1
_DEFAULT_KIND = DualEncoderConfig.kind
_CONFIGS = (DualEncoderConfig, T5DualEncoderConfig, BertFusionConfig, T5FusionConfig)
# What files say of towers' first weights; no configuration has the field, nor experts' `pattern`.
_COPIED = "copied"
_KINDS = {config.kind: config for config in _CONFIGS}
# Fields that do not affect the embedding of a passage.
_OF_QUERIES = ("towers", "query_tasks", "tower_init", "decoder_layers", "documents")


def init_params(model: DualEncoder, key: jax.Array, *, length: int = 1) -> Params:
    """Draws parameters: plain nested dicts of float32 arrays, without partitioning metadata.

    Args:
        model: the dual encoder.
        key: a jax.random key.
        length: tokens of the longest text, only checked against the position table.
    """
    return jax.tree.map(_unbox, _boxed_params(model, key, length), is_leaf=_is_boxed)


def abstract_params(model: DualEncoder) -> Params:
    """Shapes and dtypes of the parameters, without allocating them."""
    return jax.tree.map(_unbox, _abstract_boxed_params(model), is_leaf=_is_boxed)


def logical_axes(model: DualEncoder) -> Params:
    """For every parameter the logical name of each axis, as a PartitionSpec.

    Example:
        >>> logical_axes(model)["encoder"]["layers_0"]["mlp"]["wi"]["kernel"]
        PartitionSpec('embed', 'mlp')
    """
    return nn.get_partition_spec(_abstract_boxed_params(model))


def parameters_fingerprint(params: PyTree, configuration: str = "") -> str:
    """Fingerprint of parameters, with their paths, and of what they belong to.

    Args:
        params: the parameters.
        configuration: of the model, as JSON.
    """
    total = Fingerprint()
    if configuration:
        total.add(configuration)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        total.add(jax.tree_util.keystr(path)).add(np.asarray(leaf))
    return total.hex()


def in_dtype(params: Params, dtype: str) -> Params:
    """The kernels of the blocks' products in `dtype`; routers and all else stay as they are.

    A block rounds a kernel to its own dtype anyway, so that the model's output stays as it is.

    Example:
        Of `{"layers_0": {"wi": {"kernel": w, "bias": b}}}` w is rounded and b is not.
    """

    def rounded(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        *parents, name = (str(entry.key) for entry in path)
        of_a_block = any(parent.startswith("layers_") for parent in parents)
        if name != "kernel" or not of_a_block or "router" in parents:
            return leaf
        return leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(rounded, params)


def check_same_parameters(given: Params, model: Params, *, where: str, fix: str) -> None:
    """Refuses a tree whose parameters have other names or shapes than a model's.

    Args:
        given: arrays or shapes.
        model: the model's, arrays or shapes.
        where: what the first holds, for messages.
        fix: what they advise.

    Raises:
        ConfigError: naming the first parameter that differs.
    """
    shapes, expected = (
        {name: tuple(leaf.shape) for name, leaf in leaves_by_path(tree).items()}
        for tree in (given, model)
    )
    for name in sorted(shapes.keys() | expected.keys()):
        shape = shapes.get(name)
        if shape != expected.get(name):
            problem = f"parameter {name} has shape {shape}, in the model {expected.get(name)}"
            raise ConfigError(problem, where=where, fix=fix)


def parameter_count(params: Params) -> int:
    """Number of parameters of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _boxed_params(model: DualEncoder, key: jax.Array, length: int) -> Params:
    texts = Tokens(jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))
    return model.config.initial_params(model.init(key, texts, texts)["params"])


@functools.lru_cache(maxsize=8)
def _abstract_boxed_params(model: DualEncoder) -> Params:
    # Tracing BERT-base takes a second, and commands ask for its shapes several times.
    return jax.eval_shape(lambda: _boxed_params(model, jax.random.key(0), length=1))


def _is_boxed(leaf: object) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def _unbox(leaf: PyTree) -> PyTree:
    return leaf.unbox(apply_constraint=False) if _is_boxed(leaf) else leaf


def config_to_json(config: ModelConfig) -> str:
    """Writes every field but `scan`, so that changed defaults do not affect saved models.

    A BERT's file has no kind, and no query_tasks if they are empty. Fingerprints of models depend
    on this text.

    Example:
        >>> print(config_to_json(DualEncoderConfig()))
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
    fields[config.stack].pop("scan")
    if fields.get("bert", {}).get("family") == Family.BERT.value:
        del fields["bert"]["family"], fields["bert"]["rotary"]
    if "experts" in fields:
        fields["experts"] = _with_field(fields["experts"], "pattern", None, before="blocks")
    return _with_field(fields, "tower_init", _COPIED, before="normalization")


def _with_field(
    fields: Mapping[str, Any], name: str, value: str | None, *, before: str
) -> dict[str, Any]:
    items = list(fields.items())
    items.insert(list(fields).index(before), (name, value))
    return dict(items)


def passage_json(config: ModelConfig) -> str:
    """The settings that passage embeddings depend on; fusing documents does not change them."""
    fields = {name: v for name, v in _settings(config).items() if name not in _OF_QUERIES}
    return json.dumps({"kind": config.kind.removesuffix("_fusion"), **fields}, sort_keys=True)


def read_config(path: FilePath) -> ModelConfig:
    """Reads a file of what `config_to_json` wrote. Absent fields take their defaults.

    Raises:
        DataError: malformed JSON, another format version, a value of the wrong type, or an unknown
            enum value.
        ConfigError: an unknown kind or field.
    """
    again = "read it with the version of taser_jax that wrote it, or train again"
    where, value = os.fspath(path), read_json(path, fix=again)
    check_version(value, FORMAT_VERSION, where=where, fix=again)
    del value["format_version"]
    for fields, name, constant in (
        (value, "tower_init", _COPIED),
        (value.get("experts"), "pattern", None),
    ):
        if isinstance(fields, dict) and fields.get(name) == constant:
            fields.pop(name, None)
    kind = value.pop("kind", _DEFAULT_KIND)
    if not isinstance(kind, str) or kind not in _KINDS:
        problem = f"kind is {kind!r}, not one of {', '.join(_KINDS)}"
        raise ConfigError(problem, where=where, fix=again)
    config: ModelConfig = typed(value, _KINDS[kind], where=where, fix=again)
    if unknown := flatten(**value).keys() - flatten(**to_plain(config)).keys():
        raise ConfigError(f"unknown fields: {', '.join(sorted(unknown))}", where=where, fix=again)
    return config
