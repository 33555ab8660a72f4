"""T5, T5 1.1 and umT5 between other names and shapes and ours: Hugging Face's and T5X's."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.batch import Tokens
from taser_jax.errors import ConfigError, DataError
from taser_jax.interop.tensors import Tensors, listed
from taser_jax.models.t5 import T5, PositionBias, T5Config

Params = dict[str, Any]
Path = tuple[str, ...]

CONFIG_FILE = "config.json"
# Field of ours -> Hugging Face's.
_SIZES = {
    "vocab_size": "vocab_size",
    "embed_dim": "d_model",
    "num_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
    "num_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
}
_FEED_FORWARDS = {"relu": ("relu",), "gated-gelu": ("gelu", "linear")}
_POSITIONS = {"t5": PositionBias.SHARED, "umt5": PositionBias.PER_LAYER}
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


def t5_config(directory: pathlib.Path, **overrides: Any) -> T5Config:
    """The sizes and numerics that a Hugging Face checkpoint's `config.json` tells.

    Args:
        directory: of the checkpoint.
        overrides: fields of `T5Config` in place of the checkpoint's.

    Raises:
        DataError: no config.json, not JSON, or a size is missing or no size.
        ConfigError: another architecture, or a variant of T5 that is not ours.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise DataError(
            "no such file",
            where=str(path),
            expected="the configuration of a Hugging Face T5",
            fix="give the directory that the model's save_pretrained wrote",
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"no JSON: {error}", where=str(path), expected="a JSON object") from error
    kind = value.get("model_type") if isinstance(value, dict) else None
    if kind not in _POSITIONS:
        raise ConfigError(
            f"model_type is {kind!r}",
            where=str(path),
            expected=" or ".join(_POSITIONS),
            fix="give a T5 checkpoint; BERT's are read by pretrained_bert",
        )
    value.setdefault("num_decoder_layers", value.get("num_layers"))
    value.setdefault("relative_attention_num_buckets", 32)
    value.setdefault("relative_attention_max_distance", 128)
    if any(name.endswith("EncoderModel") for name in value.get("architectures") or ()):
        value["num_decoder_layers"] = 0
    feed_forward = value.get("feed_forward_proj", "relu")
    if feed_forward not in _FEED_FORWARDS:
        raise ConfigError(
            f"feed_forward_proj is {feed_forward!r}",
            where=str(path),
            expected=" or ".join(_FEED_FORWARDS),
            fix="no other feed-forward is implemented here; choose another checkpoint",
        )
    numbers = {
        "dropout_rate": float(value.get("dropout_rate", 0.1)),
        "rms_norm_epsilon": float(value.get("layer_norm_epsilon", 1e-6)),
    }
    fields: dict[str, Any] = {o: _size(value, theirs, path) for o, theirs in _SIZES.items()}
    fields |= {"mlp_activations": _FEED_FORWARDS[feed_forward], "position_bias": _POSITIONS[kind]}
    return T5Config(**(fields | numbers | overrides))


def _size(value: Mapping[str, Any], name: str, path: pathlib.Path) -> int:
    size = value.get(name)
    if type(size) is not int or size < (0 if name == "num_decoder_layers" else 1):
        raise DataError(f"{name} is {size!r}", where=str(path), expected="a positive integer")
    return size


def config_to_json(config: T5Config) -> dict[str, Any]:
    """`config.json` of Hugging Face's T5Model, or T5EncoderModel where there is no decoder."""
    kinds = {position: kind for kind, position in _POSITIONS.items()}
    kind = kinds[config.position_bias]
    family = {"t5": "T5", "umt5": "UMT5"}[kind]
    feed_forwards = {value: name for name, value in _FEED_FORWARDS.items()}
    if config.mlp_activations not in feed_forwards:
        raise ConfigError(
            f"mlp_activations are {config.mlp_activations}",
            where="T5Config",
            expected=" or ".join(map(str, feed_forwards)),
        )
    return {
        "architectures": [f"{family}{'Model' if config.num_decoder_layers else 'EncoderModel'}"],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_decoder_layers": config.num_decoder_layers or config.num_layers,
        "feed_forward_proj": feed_forwards[config.mlp_activations],
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": config.rms_norm_epsilon,
        "is_encoder_decoder": bool(config.num_decoder_layers),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


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
        value = _get(params, path)
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


def t5x_t5_config(tree: Mapping[str, Any], *, where: str, **overrides: Any) -> T5Config:
    """The sizes that the arrays of a T5X checkpoint tell, plain or scanned.

    What no array tells, `max_distance` above all, has T5's value unless overridden.

    Args:
        tree: `target` of a T5X checkpoint.
        where: the checkpoint, for messages.
        overrides: fields of `T5Config`.

    Raises:
        ConfigError: the tree is no T5.
    """
    tree = _unscanned(tree)
    table = _get(tree, ("token_embedder", "embedding"))
    first = _get(tree, ("encoder", "layers_0"))
    if table is None or not isinstance(first, Mapping) or "bias" in str(_paths(first)):
        raise ConfigError(
            f"no T5: the checkpoint has {listed(sorted('/'.join(p) for p in _paths(tree)))}",
            where=where,
            expected="token_embedder/embedding, encoder/layers_0/attention/query/kernel, ...",
            fix="give a T5X checkpoint of a T5",
        )
    shared = _get(tree, ("encoder", "relpos_bias", "rel_embedding"))
    own = _get(first, ("relpos_bias", "rel_embedding"))
    positions, query = (own if shared is None else shared), _get(first, ("attention", "query"))
    gated, mlp = "wi_0" in first.get("mlp", {}), _get(first, ("mlp", "wo", "kernel"))
    if positions is None or query is None or mlp is None:
        raise ConfigError(
            f"a block without a part of T5's: it has {listed(sorted(first))}",
            where=where,
            expected="relpos_bias, attention and mlp",
        )
    heads, buckets = positions.shape
    fields = {
        "vocab_size": table.shape[0],
        "embed_dim": table.shape[1],
        "num_layers": _count_layers(tree["encoder"]),
        "num_decoder_layers": _count_layers(tree.get("decoder", {})),
        "num_heads": heads,
        "head_dim": math.prod(query["kernel"].shape[1:]) // heads,
        "mlp_dim": mlp.shape[0],
        "num_buckets": buckets,
        "mlp_activations": _FEED_FORWARDS["gated-gelu" if gated else "relu"],
        "position_bias": PositionBias.PER_LAYER if shared is None else PositionBias.SHARED,
    }
    return T5Config(**(fields | overrides))


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
    tree = _unscanned(tree)
    for stack, layers in _stacks(config).items():
        _check_layers(stack, _count_layers(tree.get(stack, {})), layers, where)
    shapes = t5_shapes(config)
    missing = ["/".join(path) for path in shapes if _get(tree, path) is None]
    if missing:
        raise _missing(missing, len(shapes), where)
    params: Params = {}
    for path, shape in shapes.items():
        name = "/".join(path)
        array = _weights(_get(tree, path), name, where)
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


def _unscanned(tree: Mapping[str, Any]) -> dict[str, Any]:
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


def _count_layers(stack: Mapping[str, Any]) -> int:
    return sum(bool(re.fullmatch(r"layers_\d+", name)) for name in stack)


def _paths(tree: Any, path: Path = ()) -> list[Path]:
    if not isinstance(tree, Mapping):
        return [path]
    return [leaf for name, node in tree.items() for leaf in _paths(node, (*path, str(name)))]


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
    sizes = ", ".join(f"{n} {getattr(config, n)}" for n in _SIZES if n != "max_distance")
    return ConfigError(
        f"{name} has shape {tuple(found)}",
        where=where,
        expected=f"{tuple(expected)}, for {sizes}",
        fix="take the sizes from the checkpoint: t5 = pretrained_t5(source)",
    )


def _get(tree: Any, path: Path) -> Any:
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _put(tree: Params, path: Path, value: np.ndarray) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
