"""Converts parameters of T5, T5 1.1 and umT5 from and to Hugging Face's names, and from T5X's."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from taser_jax.interop.leaves import (
    Leaf,
    Params,
    Path,
    check_shapes,
    leaves_of,
    params_from_tensors,
    size_words,
    weights,
)
from taser_jax.interop.tensors import Shapes, listed
from taser_jax.models.batch import Tokens
from taser_jax.models.layers import SIZES
from taser_jax.models.t5 import T5, T5Config
from taser_jax.storage.errors import ConfigError, DataError

_T = TypeVar("_T")
# Sizes that the shapes of arrays show.
_SHAPING = (*SIZES, "num_decoder_layers", "num_buckets")
_TABLE = "shared.weight"
_TABLE_ALIAS = "encoder.embed_tokens.weight"
_FIX_SIZES = "take the sizes from the checkpoint: t5 = pretrained_t5(source)"
# Places of a block's parts among Hugging Face's numbered layers.
_PARTS = {
    "encoder": {
        "attention": "layer.0.SelfAttention",
        "pre_attention_layer_norm": "layer.0.layer_norm",
        "relpos_bias": "layer.0.SelfAttention",
        "mlp": "layer.1.DenseReluDense",
        "pre_mlp_layer_norm": "layer.1.layer_norm",
    },
    "decoder": {
        "self_attention": "layer.0.SelfAttention",
        "pre_self_attention_layer_norm": "layer.0.layer_norm",
        "relpos_bias": "layer.0.SelfAttention",
        "encoder_decoder_attention": "layer.1.EncDecAttention",
        "pre_cross_attention_layer_norm": "layer.1.layer_norm",
        "mlp": "layer.2.DenseReluDense",
        "pre_mlp_layer_norm": "layer.2.layer_norm",
    },
}
_PROJECTIONS = {"query": "q", "key": "k", "value": "v", "out": "o"}
# Ignored: copies of the table, the language-model head, a table of old checkpoints by mistake.
_LEFT = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


def t5_from_tensors(tensors: Mapping[str, np.ndarray], config: T5Config, *, where: str) -> Params:
    """Our parameters from a Hugging Face checkpoint's tensors, in float32.

    Args:
        tensors: tensors by name.
        config: the requested T5; without decoder layers, the checkpoint's decoder is ignored.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: not a T5, or shapes or numbers of layers do not match `config`.
        DataError: tensors are missing, have NaN, or are unexpected.
    """
    tensors = _with_table(tensors)
    leaves, sizes = _checked_leaves(tensors, config, where), size_words(config, _SHAPING)
    return params_from_tensors(leaves, tensors, where=where, sizes=sizes)


def check_t5_shapes(shapes: Shapes, config: T5Config, *, where: str) -> None:
    """Refuses what `t5_from_tensors` would refuse, before any tensor is read.

    Args:
        shapes: shapes of a checkpoint's tensors, by name.
        config: the requested T5.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: not a T5, or shapes or numbers of layers do not match `config`.
        DataError: tensors are missing or unexpected.
    """
    shapes = _with_table(shapes)
    leaves, sizes = _checked_leaves(shapes, config, where), size_words(config, _SHAPING)
    check_shapes(leaves, shapes, where=where, sizes=sizes)


def _with_table(named: Mapping[str, _T]) -> dict[str, _T]:
    """The same, with the token table under its usual name."""
    if _TABLE in named or _TABLE_ALIAS not in named:
        return dict(named)
    return {**named, _TABLE: named[_TABLE_ALIAS]}


def _checked_leaves(names: Mapping[str, object], config: T5Config, where: str) -> list[Leaf]:
    if _TABLE not in names:
        problem = f"no tensor is named {_TABLE}; there are {listed(sorted(names))}"
        raise ConfigError(problem, where=where, fix="give a checkpoint of T5's architecture")
    for stack, layers in _stacks(config).items():
        numbers = [int(m[1]) for n in names if (m := re.match(rf"{stack}\.block\.(\d+)\.", n))]
        _check_layers(stack, max(numbers, default=-1) + 1, layers, where)
    leaves = t5_leaves(config)
    names_of_leaves = {leaf.name for leaf in leaves}
    _check_complete([leaf.name for leaf in leaves], names, where)
    # Adapters and biases inside a block change what it computes, so they cannot be ignored.
    stacks = tuple(f"{stack}." for stack in _stacks(config))
    more = sorted(n for n in names if n.startswith(stacks) and n not in names_of_leaves)
    more = [name for name in more if not _LEFT.fullmatch(name)]
    if more:
        raise DataError(
            f"{len(more)} tensors that such a T5 does not have: {listed(more)}",
            where=where,
            fix="merge adapters into the weights, or correct mlp_activations and position_bias",
        )
    return leaves


def t5_from_t5x(tree: Mapping[str, Any], config: T5Config, *, where: str) -> Params:
    """Our parameters from a T5X tree, with heads joined or not, and layers scanned (axis 1) or not.

    Args:
        tree: `target` of a T5X checkpoint; other arrays than those of T5 are ignored.
        config: the requested T5; without decoder layers, the checkpoint's decoder is ignored.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: shapes or numbers of layers do not match `config`.
        DataError: arrays are missing or have NaN.
    """
    tree = unscanned(tree)
    for stack, layers in _stacks(config).items():
        _check_layers(stack, count_layers(tree.get(stack, {})), layers, where)
    leaves, flat = t5_leaves(config), flatten_dict(tree)
    names = {"/".join(map(str, path)) for path in flat}
    _check_complete(["/".join(leaf.path) for leaf in leaves], names, where)
    params: dict[Path, np.ndarray] = {}
    for leaf in leaves:
        name = "/".join(leaf.path)
        array = weights(flat[leaf.path], name, where)
        # The oldest checkpoints join heads and their width in one axis.
        joined = leaf.tensor_shape[::-1] if leaf.inputs else leaf.shape
        if array.shape not in (leaf.shape, joined):
            sizes = f"{joined}, for {size_words(config, _SHAPING)}"
            problem = f"{name} has shape {array.shape}"
            raise ConfigError(problem, where=where, expected=sizes, fix=_FIX_SIZES)
        params[leaf.path] = np.ascontiguousarray(array.reshape(leaf.shape))
    return unflatten_dict(params)


@functools.lru_cache(maxsize=8)
def t5_leaves(config: T5Config) -> list[Leaf]:
    """Every parameter of a T5; of its encoder alone without decoder layers."""
    tokens = Tokens(np.zeros((1, 1), np.int32), np.ones((1, 1), bool))
    method = "first_decoder_output" if config.num_decoder_layers else "encode"
    drawn = jax.eval_shape(
        lambda key: T5(config).init(key, tokens, method=method), jax.random.key(0)
    )
    return leaves_of(drawn["params"], tensor_name)


def tensor_name(path: Path) -> str:
    """Hugging Face's name of a parameter.

    Example:
        >>> tensor_name(("decoder", "layers_2", "mlp", "wi_0", "kernel"))
        'decoder.block.2.layer.2.DenseReluDense.wi_0.weight'
    """
    if path[0] == "token_embedder":
        return _TABLE
    stack, place = path[0], path[1]
    if place.endswith("_norm"):
        return f"{stack}.final_layer_norm.weight"
    if place == "relpos_bias":
        return f"{stack}.block.0.{_PARTS[stack]['relpos_bias']}.relative_attention_bias.weight"
    part, number = path[2], place.removeprefix("layers_")
    name = f"{stack}.block.{number}.{_PARTS[stack][part]}"
    if part == "relpos_bias":
        return f"{name}.relative_attention_bias.weight"
    if part.endswith("layer_norm"):
        return f"{name}.weight"
    return f"{name}.{_PROJECTIONS.get(path[3], path[3])}.weight"


def _stacks(config: T5Config) -> dict[str, int]:
    stacks = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    return {name: layers for name, layers in stacks.items() if layers}


def unscanned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with `layers_i` instead of an `encoder/encoder` that has layers along axis 1."""
    result = dict(tree)
    for stack in ("encoder", "decoder"):
        inner = tree.get(stack, {})
        scanned = inner.get(stack) if isinstance(inner, Mapping) else None
        if not isinstance(scanned, Mapping):
            continue
        plain = {name: value for name, value in inner.items() if name != stack}
        count = jax.tree.leaves(dict(scanned))[0].shape[1]
        for i in range(count):
            plain[f"layers_{i}"] = jax.tree.map(lambda leaf, i=i: leaf[:, i], dict(scanned))
        result[stack] = plain
    return result


def count_layers(stack: Mapping[str, Any]) -> int:
    """Number of `layers_i` of an encoder or decoder."""
    return sum(bool(re.fullmatch(r"layers_\d+", name)) for name in stack)


def _check_layers(stack: str, layers: int, expected: int, where: str) -> None:
    if layers not in (0, expected):
        problem = f"{layers} layers in the {stack}, and {expected} in the model"
        raise ConfigError(problem, where=where, fix=_FIX_SIZES)


def _check_complete(required: Sequence[str], names: Collection[str], where: str) -> None:
    missing = [name for name in required if name not in names]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(required)} parameters are missing: {listed(missing)}",
            where=where,
            fix="download or copy the checkpoint again; an encoder alone has num_decoder_layers=0",
        )


def find(tree: PyTree, path: Path) -> Any:
    """The node at a path, or None."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree
