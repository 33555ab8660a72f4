"""Parameters and sizes of T5, T5 1.1 and umT5, from and to Hugging Face, and from T5X's arrays."""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Mapping

import jax
import msgspec
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from taser_jax.interop.tensors import (
    Layers,
    Leaf,
    Path,
    check_room,
    leaves_of,
    listed,
    params_from_tensors,
    read_config,
    size_words,
    weights,
)
from taser_jax.models.dual_encoder import DualEncoder, Params
from taser_jax.models.layers import SIZES
from taser_jax.models.parameters import abstract_params, check_same_parameters
from taser_jax.models.t5 import PositionBias, T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Natural, Positive, PositiveNumber, Share, typed

# Sizes that the shapes of arrays show.
_SHAPING = (*SIZES, "num_decoder_layers", "num_buckets")
_TABLE = "shared.weight"
_TABLE_ALIAS = "encoder.embed_tokens.weight"
_FEED_FORWARDS = {"relu": ("relu",), "gated-gelu": ("gelu", "linear")}
_POSITIONS = {"t5": PositionBias.SHARED, "umt5": PositionBias.PER_LAYER}
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
    # Some writers have the table under the encoder's name alone.
    if _TABLE_ALIAS in tensors:
        tensors = {_TABLE: tensors[_TABLE_ALIAS], **tensors}
    if _TABLE not in tensors:
        problem = f"no tensor is named {_TABLE}; there are {listed(sorted(tensors))}"
        raise ConfigError(problem, where=where, fix="give a checkpoint of T5's architecture")
    return params_from_tensors(
        t5_leaves(config),
        tensors,
        blocks=("encoder.", "decoder.") if config.num_decoder_layers else ("encoder.",),
        ignored=_LEFT,
        where=where,
        sizes=size_words(config, _SHAPING),
    )


def t5_from_t5x(tree: Params, config: T5Config, *, where: str) -> Params:
    """Our parameters from a T5X tree, with heads joined or not, and layers scanned (axis 1) or not.

    Args:
        tree: `target` of a T5X checkpoint; other arrays than those of T5 are ignored.
        config: the requested T5; without decoder layers, the checkpoint's decoder is ignored.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: arrays are missing, or shapes do not match `config`.
        DataError: arrays have NaN.
    """
    leaves, flat = t5_leaves(config), flatten_dict(_unscanned(tree))
    params: dict[Path, np.ndarray] = {}
    for leaf in leaves:
        if leaf.path in flat:
            array = weights(flat[leaf.path], "/".join(leaf.path), where)
            # The oldest checkpoints join heads and their width in one axis.
            joined = leaf.tensor_shape[::-1] if leaf.inputs else leaf.shape
            shape = leaf.shape if array.shape == joined else array.shape
            params[leaf.path] = np.ascontiguousarray(array.reshape(shape))
    expected = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, np.float32) for leaf in leaves}
    fix = "take the sizes from the checkpoint: t5 = pretrained_t5(source)"
    check_same_parameters(unflatten_dict(params), unflatten_dict(expected), where=where, fix=fix)
    return unflatten_dict(params)


@functools.lru_cache(maxsize=8)
def t5_leaves(config: T5Config) -> list[Leaf]:
    """Every parameter of a T5; of its encoder alone without decoder layers."""
    decodes = bool(config.num_decoder_layers)
    embedding = T5Embedding.FIRST_DECODER_OUTPUT if decodes else T5Embedding.ENCODER_MEAN
    model = DualEncoder(T5DualEncoderConfig(t5=config, embedding=embedding))
    return leaves_of(abstract_params(model)["encoder"], tensor_name)


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


def tower_of(tree: Params) -> Params:
    """The first T5 of a dual encoder's tree; any other tree as it is."""
    parts = (part for part in tree.values() if isinstance(part, Mapping))
    return next((part for part in parts if "token_embedder" in part), tree)


def _unscanned(tree: Params) -> Params:
    """The tree with `layers_i` instead of an `encoder/encoder` that has layers along axis 1."""
    result = dict(tree)
    for stack in ("encoder", "decoder"):
        parts = tree.get(stack, {})
        if isinstance(scanned := parts.get(stack), Mapping):
            plain = {name: part for name, part in parts.items() if name != stack}
            for layer in range(jax.tree.leaves(scanned)[0].shape[1]):
                plain[f"layers_{layer}"] = jax.tree.map(lambda leaf, i=layer: leaf[:, i], scanned)
            result[stack] = plain
    return result


class _File(msgspec.Struct, kw_only=True):
    """Fields of `T5Config` under the names of Hugging Face."""

    vocab_size: Positive
    embed_dim: Positive = msgspec.field(name="d_model")
    num_layers: Layers
    num_heads: Positive
    head_dim: Positive = msgspec.field(name="d_kv")
    mlp_dim: Positive = msgspec.field(name="d_ff")
    num_decoder_layers: Natural | None = None
    num_buckets: Positive = msgspec.field(name="relative_attention_num_buckets", default=32)
    max_distance: Positive = msgspec.field(name="relative_attention_max_distance", default=128)
    dropout_rate: Share = 0.1
    rms_norm_epsilon: PositiveNumber = msgspec.field(name="layer_norm_epsilon", default=1e-6)
    mlp_activations: str = msgspec.field(name="feed_forward_proj", default="relu")


def t5_config(directory: pathlib.Path) -> T5Config:
    """Reads the sizes and numerics from a Hugging Face checkpoint's `config.json`.

    Args:
        directory: the checkpoint's directory.

    Raises:
        DataError: there is no config.json, it is not JSON, or a size is missing, invalid, or too
            large for the weights.
        ConfigError: another architecture, or an unsupported variant of T5.
    """
    where, values, described = read_config(directory)
    kind = described.model_type
    if kind not in _POSITIONS:
        fix = "give a T5 checkpoint; BERT's are read by pretrained_bert"
        problem = f"model_type is {kind!r}, not {' or '.join(_POSITIONS)}"
        raise ConfigError(problem, where=where, fix=fix)
    file = typed(values, _File, where=where)
    if any(name.endswith("EncoderModel") for name in described.architectures):
        file.num_decoder_layers = 0
    elif file.num_decoder_layers is None:
        file.num_decoder_layers = file.num_layers
    feed_forward = file.mlp_activations
    if feed_forward not in _FEED_FORWARDS:
        problem = f"feed_forward_proj is {feed_forward!r}, not {' or '.join(_FEED_FORWARDS)}"
        raise ConfigError(problem, where=where, fix="choose another checkpoint")
    fields = msgspec.structs.asdict(file) | {
        "mlp_activations": _FEED_FORWARDS[feed_forward],
        "position_bias": _POSITIONS[kind],
    }
    config = T5Config(**fields)
    check_room(directory, config)
    return config


def t5_to_json(config: T5Config) -> dict[str, object]:
    """`config.json` of Hugging Face's T5Model, or of T5EncoderModel without decoder layers."""
    kind = next(name for name, bias in _POSITIONS.items() if bias is config.position_bias)
    feed_forwards = {activations: name for name, activations in _FEED_FORWARDS.items()}
    model = "Model" if config.num_decoder_layers else "EncoderModel"
    fields = {name: getattr(config, name) for name in _File.__struct_fields__}
    fields["num_decoder_layers"] = config.num_decoder_layers or config.num_layers
    fields["mlp_activations"] = feed_forwards[config.mlp_activations]
    return {
        "architectures": [f"{'T5' if kind == 't5' else 'UMT5'}{model}"],
        "model_type": kind,
        **msgspec.to_builtins(_File(**fields)),
        "is_encoder_decoder": bool(config.num_decoder_layers),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def t5x_t5_config(tree: Params, *, where: str) -> T5Config:
    """Infers the sizes from the arrays of a T5X checkpoint, plain or scanned.

    Settings that arrays do not show, such as `max_distance`, have T5's values.

    Args:
        tree: `target` of a T5X checkpoint, of a T5 or a dual encoder.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: the tree is not a T5.
    """
    tree = _unscanned(tower_of(tree))
    flat = flatten_dict(tree)
    block = {path[2:]: array for path, array in flat.items() if path[:2] == ("encoder", "layers_0")}
    table = flat.get(("token_embedder", "embedding"))
    shared = flat.get(("encoder", "relpos_bias", "rel_embedding"))
    positions = block.get(("relpos_bias", "rel_embedding")) if shared is None else shared
    query, mlp = block.get(("attention", "query", "kernel")), block.get(("mlp", "wo", "kernel"))
    biased = any(path[-1] == "bias" for path in block)
    if biased or table is None or positions is None or query is None or mlp is None:
        names = sorted("/".join(map(str, path)) for path in flat)
        problem = f"not a T5: the checkpoint has {listed(names)}"
        raise ConfigError(problem, where=where, fix="give a T5X checkpoint of a T5")
    feed_forward = "gated-gelu" if ("mlp", "wi_0", "kernel") in block else "relu"
    heads, buckets = positions.shape
    layers = {
        stack: sum(bool(re.fullmatch(r"layers_\d+", name)) for name in tree.get(stack, {}))
        for stack in _PARTS
    }
    return T5Config(
        vocab_size=table.shape[0],
        embed_dim=table.shape[1],
        num_layers=layers["encoder"],
        num_decoder_layers=layers["decoder"],
        num_heads=heads,
        head_dim=math.prod(query.shape[1:]) // heads,
        mlp_dim=mlp.shape[0],
        num_buckets=buckets,
        mlp_activations=_FEED_FORWARDS[feed_forward],
        position_bias=PositionBias.PER_LAYER if shared is None else PositionBias.SHARED,
    )
