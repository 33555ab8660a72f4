"""T5's, T5 1.1's and umT5's parameters from and to Hugging Face's names, and from T5X's."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.batch import Tokens
from taser_jax.errors import ConfigError, DataError
from taser_jax.interop.tensors import Tensors, listed
from taser_jax.models.t5 import T5, T5Config

Params = dict[str, Any]
Path = tuple[str, ...]

# Sizes that arrays have.
_SHAPING = (
    *("vocab_size", "embed_dim", "num_layers", "num_decoder_layers", "num_heads", "head_dim"),
    *("mlp_dim", "num_buckets"),
)
_TABLE = "shared.weight"
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
# Copies of the table, the language-model head, and a table that old checkpoints have by mistake.
_LEFT = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight|lm_head\.weight|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


def t5_from_tensors(tensors: Mapping[str, np.ndarray], config: T5Config, *, where: str) -> Params:
    """Our parameters from a Hugging Face checkpoint's tensors, in float32.

    Args:
        tensors: by name.
        config: the T5 wanted; without decoder layers, the checkpoint's decoder is left.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: no T5, or a tensor of another shape or number of layers than `config` says.
        DataError: tensors are missing, hold NaN, or come unexpected.
    """
    tensors = dict(tensors)
    tensors.setdefault(_TABLE, tensors.get("encoder.embed_tokens.weight", np.zeros(0)))
    if not tensors[_TABLE].size:
        raise ConfigError(
            f"no tensor is named {_TABLE}; there are {listed(sorted(tensors))}",
            where=where,
            expected="a T5's tensors",
            fix="give a checkpoint of T5's architecture",
        )
    for stack, layers in _stacks(config).items():
        numbers = [int(m[1]) for n in tensors if (m := re.match(rf"{stack}\.block\.(\d+)\.", n))]
        _check_layers(stack, max(numbers, default=-1) + 1, layers, where)
    shapes = t5_shapes(config)
    names = {path: tensor_name(path) for path in shapes}
    _check_names(list(names.values()), tensors, tuple(_stacks(config)), where)
    params: Params = {}
    for path, shape in shapes.items():
        name = names[path]
        expected = _tensor_shape(path, shape)
        tensor = _weights(tensors[name], name, where)
        if tensor.shape != expected:
            raise _shape_error(name, tensor.shape, expected, config, where)
        ours = (tensor if _same_orientation(path) else tensor.T).reshape(shape)
        _put(params, path, np.ascontiguousarray(ours))
    return params


def t5_to_tensors(params: Params, config: T5Config) -> Tensors:
    """A tower's T5 under the names and shapes of Hugging Face's T5Model; float32.

    Raises:
        ConfigError: the parameters are not a T5 of these sizes.
    """
    tensors: Tensors = {}
    for path, shape in t5_shapes(config).items():
        value = find(params, path)
        if value is None or tuple(value.shape) != shape:
            found = "is absent" if value is None else f"has shape {tuple(value.shape)}"
            raise ConfigError(
                f"parameter {'/'.join(path)} {found}",
                where="t5_to_tensors",
                expected=f"shape {shape}, of a T5 of these sizes",
            )
        value = np.asarray(value, np.float32)
        if _same_orientation(path):
            tensors[tensor_name(path)] = np.array(value)
        else:
            flat = value.reshape(_tensor_shape(path, shape)[::-1])
            tensors[tensor_name(path)] = np.ascontiguousarray(flat.T)
    return tensors


def t5_from_t5x(tree: Mapping[str, Any], config: T5Config, *, where: str) -> Params:
    """Our parameters from a T5X tree, heads joined or not, layers scanned (axis 1) or not.

    Args:
        tree: `target` of a T5X checkpoint; what T5 does not have is left.
        config: the T5 wanted; without decoder layers, the checkpoint's decoder is left.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: an array of another shape, or another number of layers, than `config` says.
        DataError: arrays are missing or hold NaN.
    """
    tree = unscanned(tree)
    for stack, layers in _stacks(config).items():
        _check_layers(stack, count_layers(tree.get(stack, {})), layers, where)
    shapes = t5_shapes(config)
    missing = ["/".join(path) for path in shapes if find(tree, path) is None]
    if missing:
        raise _missing(missing, len(shapes), where)
    params: Params = {}
    for path, shape in shapes.items():
        name = "/".join(path)
        array = _weights(find(tree, path), name, where)
        joined = shape if _same_orientation(path) else _tensor_shape(path, shape)[::-1]
        if array.shape not in (shape, joined):
            raise _shape_error(name, array.shape, joined, config, where)
        _put(params, path, np.ascontiguousarray(array.reshape(shape)))
    return params


@functools.lru_cache(maxsize=8)
def t5_shapes(config: T5Config) -> dict[Path, tuple[int, ...]]:
    """Path and shape of every parameter of a T5; of its encoder alone without decoder layers."""
    tokens = Tokens(np.zeros((1, 1), np.int32), np.ones((1, 1), bool))
    method = "first_decoder_output" if config.num_decoder_layers else "encode"
    drawn = jax.eval_shape(
        lambda key: T5(config).init(key, tokens, method=method), jax.random.key(0)
    )
    leaves, _ = jax.tree_util.tree_flatten_with_path(drawn["params"])
    return {
        tuple(str(k.key) for k in path if hasattr(k, "key")): tuple(leaf.shape)
        for path, leaf in leaves
    }


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


def _same_orientation(path: Path) -> bool:
    """Whether Hugging Face's tensor is ours as it is, not transposed."""
    return path[-1] in ("scale", "embedding")


def _tensor_shape(path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape under Hugging Face's name: a Linear's weight is [outputs, inputs]."""
    if _same_orientation(path):
        return shape
    inputs = 2 if path[-2] == "out" else 1
    return math.prod(shape[inputs:]), math.prod(shape[:inputs])


def _stacks(config: T5Config) -> dict[str, int]:
    stacks = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    return {name: layers for name, layers in stacks.items() if layers}


def unscanned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with `layers_i` in place of an `encoder/encoder` with layers along axis 1."""
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
    """How many `layers_i` an encoder or decoder has."""
    return sum(bool(re.fullmatch(r"layers_\d+", name)) for name in stack)


def paths(tree: Any, path: Path = ()) -> list[Path]:
    """The path of every leaf."""
    if not isinstance(tree, Mapping):
        return [path]
    return [leaf for name, node in tree.items() for leaf in paths(node, (*path, str(name)))]


def _weights(array: Any, name: str, where: str) -> np.ndarray:
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise DataError(
            f"{name} is {array.dtype}",
            where=where,
            expected="floating-point weights",
            fix="quantised checkpoints cannot be read: take the one they were made from",
        )
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{name} holds NaN or infinity", where=where, expected="finite weights")
    return array


def _check_layers(stack: str, found: int, expected: int, where: str) -> None:
    if found not in (0, expected):
        raise ConfigError(
            f"{found} layers in the {stack}",
            where=where,
            expected=f"{expected}, as the model is configured",
            fix="take the sizes from the checkpoint: t5 = pretrained_t5(source)",
        )


def _check_names(
    names: list[str], tensors: Mapping[str, np.ndarray], stacks: tuple[str, ...], where: str
) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise _missing(missing, len(names), where)
    # Adapters and biases inside a block would change what it computes: no silent loss.
    prefixes = tuple(f"{stack}." for stack in stacks)
    known = set(names)
    more = sorted(n for n in tensors if n.startswith(prefixes) and n not in known)
    more = [name for name in more if not _LEFT.fullmatch(name)]
    if more:
        raise DataError(
            f"{len(more)} tensors that such a T5 does not have: {listed(more)}",
            where=where,
            expected="plain T5 weights",
            fix="merge adapters into the weights, or correct mlp_activations and position_bias",
        )


def _missing(names: list[str], count: int, where: str) -> DataError:
    return DataError(
        f"{len(names)} of {count} parameters are missing: {listed(names)}",
        where=where,
        expected="all parameters of a T5 as configured",
        fix="download or copy the checkpoint again; an encoder alone has num_decoder_layers=0",
    )


def _shape_error(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], config: T5Config, where: str
) -> ConfigError:
    sizes = ", ".join(f"{name} {getattr(config, name)}" for name in _SHAPING)
    return ConfigError(
        f"{name} has shape {tuple(found)}",
        where=where,
        expected=f"{tuple(expected)}, for {sizes}",
        fix="take the sizes from the checkpoint: t5 = pretrained_t5(source)",
    )


def find(tree: Any, path: Path) -> Any:
    """The node at a path, or None."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _put(tree: Params, path: Path, value: np.ndarray) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
