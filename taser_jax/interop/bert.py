"""BERT between Hugging Face's names and shapes and ours, in NumPy alone."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.artifacts import read_json
from taser_jax.errors import ConfigError, DataError
from taser_jax.interop.tensors import Tensors, listed
from taser_jax.models.bert import BertConfig
from taser_jax.models.layers import Activation

Params = dict[str, Any]

CONFIG_FILE = "config.json"
_TOKEN_TABLE = "embeddings.word_embeddings.weight"
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
# Field of ours -> Hugging Face's.
_SIZES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "max_length": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
}


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One parameter: where it is in our tree, Hugging Face's name, our shape there and here.

    Attributes:
        path: keys from the encoder down.
        name: of the tensor.
        shape: ours. A kernel is [inputs..., outputs...].
        inputs: how many leading axes of a kernel are inputs; 0 where nothing is transposed.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    inputs: int = 0

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape under Hugging Face's name: a Linear's weight is [outputs, inputs]."""
        if self.inputs:
            return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (math.prod(self.shape),) if self.path[-1] != "embedding" else self.shape


def bert_config(directory: pathlib.Path, **overrides: Any) -> BertConfig:
    """The sizes and numerics that a checkpoint's `config.json` tells.

    Args:
        directory: of the checkpoint.
        overrides: fields of `BertConfig` in place of the checkpoint's.

    Raises:
        DataError: no config.json, not JSON, or a size is missing or no size.
        ConfigError: another architecture, or a variant of BERT that is not ours.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    value = _read_config(path)
    _check_architecture(value, str(path))
    fields: dict[str, Any] = {ours: _size(value, theirs, path) for ours, theirs in _SIZES.items()}
    heads, embed = fields["num_heads"], fields["embed_dim"]
    if embed % heads:
        raise DataError(
            f"hidden_size {embed} with num_attention_heads {heads}",
            where=str(path),
            expected="a hidden size that the heads divide",
        )
    activation = value.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act is {activation!r}",
            where=str(path),
            expected=f"one of {', '.join(_ACTIVATIONS)}",
            fix="no other activation is implemented here; choose another checkpoint",
        )
    fields |= {
        "head_dim": embed // heads,
        "activation": _ACTIVATIONS[activation],
        "dropout_rate": float(value.get("hidden_dropout_prob", 0.1)),
        "attention_dropout_rate": float(value.get("attention_probs_dropout_prob", 0.1)),
        "layer_norm_epsilon": float(value.get("layer_norm_eps", 1e-12)),
        "initializer_stddev": float(value.get("initializer_range", 0.02)),
    }
    return BertConfig(**(fields | overrides))


def config_to_json(config: BertConfig) -> dict[str, Any]:
    """`config.json` of Hugging Face's BertModel for a plain encoder.

    Raises:
        ConfigError: the heads together are not as wide as the hidden states, which BertModel
            cannot be.
    """
    if config.num_heads * config.head_dim != config.embed_dim:
        raise ConfigError(
            f"{config.num_heads} heads of {config.head_dim} with embed_dim {config.embed_dim}",
            where="BertConfig",
            expected="heads x head_dim = embed_dim: Hugging Face's BERT has no other",
            fix="export as saved_model or stablehlo",
        )
    theirs = {Activation.GELU_TANH: "gelu_new"}
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        **{name: getattr(config, ours) for ours, name in _SIZES.items()},
        "hidden_act": theirs.get(config.activation, config.activation.value),
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "layer_norm_eps": config.layer_norm_epsilon,
        "initializer_range": config.initializer_stddev,
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
    }


def encoder_from_tensors(
    tensors: Mapping[str, np.ndarray],
    config: BertConfig,
    *,
    where: str,
    layers: Sequence[int] | None = None,
) -> Params:
    """The parameters of a plain encoder, float32, from a BERT-family checkpoint's tensors.

    Heads for other tasks, poolers and buffers are left; LayerNorm may be named gamma and beta.

    Args:
        tensors: by name, with any prefix ("bert." or none).
        config: the encoder wanted.
        where: the checkpoint, for messages.
        layers: which of the checkpoint's blocks, from 0; None: the first `config.num_layers`.

    Returns:
        `embeddings/...`, `layers_i/...`.

    Raises:
        ConfigError: no BERT, or a tensor of another shape than `config` says.
        DataError: tensors are missing, hold NaN, or come unexpected.
    """
    tensors = _canonical(tensors, where)
    if layers is None:
        layers = range(config.num_layers)
    leaves = _leaves(config, layers)
    missing = [leaf.name for leaf in leaves if leaf.name not in tensors]
    if missing:
        raise DataError(
            f"{len(missing)} tensors are missing: {listed(missing)}",
            where=where,
            expected=f"the {len(leaves)} tensors of a BERT of {config.num_layers} layers",
            fix="download the checkpoint again, or set num_layers to what it has",
        )
    _check_no_more(tensors, leaves, layers, where)
    params: Params = {}
    for leaf in leaves:
        tensor = np.asarray(tensors[leaf.name])
        if tensor.shape != leaf.tensor_shape:
            raise ConfigError(
                f"{leaf.name} has shape {tuple(tensor.shape)}",
                where=where,
                expected=f"{leaf.tensor_shape}, for {_size_words(config)}",
                fix="take the sizes from the checkpoint's own config.json (pretrained_bert)",
            )
        if not np.issubdtype(tensor.dtype, np.floating) and tensor.dtype.name != "bfloat16":
            raise DataError(
                f"{leaf.name} is {tensor.dtype}",
                where=where,
                expected="floating-point weights",
                fix="quantised checkpoints cannot be read: take the one they were made from",
            )
        tensor = tensor.astype(np.float32)
        if not np.isfinite(tensor).all():
            raise DataError(
                f"{leaf.name} holds NaN or infinity", where=where, expected="finite weights"
            )
        _put(params, leaf.path, _ours(leaf, tensor))
    return params


def encoder_to_tensors(params: Params, config: BertConfig) -> Tensors:
    """A plain encoder's parameters under the names and shapes of Hugging Face's BertModel.

    Args:
        params: of a plain encoder, as `plain_encoder` gives them.
        config: its sizes.

    Raises:
        ConfigError: the parameters are not a plain encoder of these sizes.
    """
    tensors: Tensors = {}
    for leaf in _leaves(config, range(config.num_layers)):
        value = _get(params, leaf.path)
        if value is None or tuple(value.shape) != leaf.shape:
            found = "is absent" if value is None else f"has shape {tuple(value.shape)}"
            raise ConfigError(
                f"parameter {'/'.join(leaf.path)} {found}",
                where="encoder_to_tensors",
                expected=f"a plain encoder's, of shape {leaf.shape}",
                fix="choose one path of the dual encoder with plain_encoder",
            )
        tensors[leaf.name] = _theirs(leaf, np.asarray(value, np.float32))
    return tensors


def _ours(leaf: _Leaf, tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray((tensor.T if leaf.inputs else tensor).reshape(leaf.shape))


def _theirs(leaf: _Leaf, value: np.ndarray) -> np.ndarray:
    if not leaf.inputs:
        return np.array(value.reshape(leaf.tensor_shape))
    return np.ascontiguousarray(value.reshape(leaf.tensor_shape[::-1]).T)


def _leaves(config: BertConfig, layers: Sequence[int]) -> list[_Leaf]:
    """Every parameter of the encoder, in the order of the stack."""
    embed, mlp, heads = config.embed_dim, config.mlp_dim, (config.num_heads, config.head_dim)
    leaves = [
        _Leaf(("embeddings", "token", "embedding"), _TOKEN_TABLE, (config.vocab_size, embed)),
        _Leaf(
            ("embeddings", "position", "embedding"),
            "embeddings.position_embeddings.weight",
            (config.max_length, embed),
        ),
        _Leaf(
            ("embeddings", "type", "embedding"),
            "embeddings.token_type_embeddings.weight",
            (config.type_vocab_size, embed),
        ),
        *_layer_norm(("embeddings", "layer_norm"), "embeddings.LayerNorm", embed),
    ]
    for i, layer in enumerate(layers):
        ours, theirs = (f"layers_{i}",), f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            path = (*ours, "attention", name)
            leaves += _linear(path, f"{theirs}.attention.self.{name}", (embed,), heads)
        leaves += [
            *_linear(
                (*ours, "attention", "out"), f"{theirs}.attention.output.dense", heads, (embed,)
            ),
            *_layer_norm(
                (*ours, "attention_layer_norm"), f"{theirs}.attention.output.LayerNorm", embed
            ),
            *_linear((*ours, "mlp", "wi"), f"{theirs}.intermediate.dense", (embed,), (mlp,)),
            *_linear((*ours, "mlp", "wo"), f"{theirs}.output.dense", (mlp,), (embed,)),
            *_layer_norm((*ours, "mlp", "layer_norm"), f"{theirs}.output.LayerNorm", embed),
        ]
    return leaves


def _linear(
    path: tuple[str, ...], name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> list[_Leaf]:
    return [
        _Leaf((*path, "kernel"), f"{name}.weight", (*inputs, *outputs), len(inputs)),
        _Leaf((*path, "bias"), f"{name}.bias", outputs),
    ]


def _layer_norm(path: tuple[str, ...], name: str, embed: int) -> list[_Leaf]:
    return [
        _Leaf((*path, "scale"), f"{name}.weight", (embed,)),
        _Leaf((*path, "bias"), f"{name}.bias", (embed,)),
    ]


def _canonical(tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """The encoder's tensors without their prefix, under today's names of LayerNorm's."""
    prefixes = sorted(n.removesuffix(_TOKEN_TABLE) for n in tensors if n.endswith(_TOKEN_TABLE))
    if not prefixes:
        raise ConfigError(
            f"no tensor is named ...{_TOKEN_TABLE}; there are {listed(sorted(tensors))}",
            where=where,
            expected="a BERT-family encoder's tensors",
            fix="give a checkpoint of BERT's architecture",
        )
    prefix = next((p for p in ("", "bert.") if p in prefixes), prefixes[0])
    if prefix not in ("", "bert.") and len(prefixes) > 1:
        raise ConfigError(
            f"{len(prefixes)} encoders, under {listed(prefixes)}",
            where=where,
            expected="one encoder",
            fix="save the encoder that is wanted by itself",
        )
    named = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
            named[re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)] = tensor
    return named


def _check_no_more(
    tensors: Mapping[str, np.ndarray], leaves: list[_Leaf], layers: Sequence[int], where: str
) -> None:
    """Adapters and the like inside a block would change what it computes: no silent loss."""
    known = {leaf.name for leaf in leaves}
    inside = tuple(f"encoder.layer.{layer}." for layer in layers)
    more = sorted(n for n in tensors if n.startswith(inside) and n not in known)
    if more:
        raise DataError(
            f"{len(more)} tensors that a BERT block does not have: {listed(more)}",
            where=where,
            expected="plain BERT blocks",
            fix="merge adapters into the weights first, or choose another checkpoint",
        )


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(
            f"no {CONFIG_FILE}" if path.parent.is_dir() else "no such directory",
            where=str(path.parent),
            expected=f"a Hugging Face directory with {CONFIG_FILE} and weights",
            fix="give the directory that the model's save_pretrained wrote",
        )
    return read_json(path)


def _check_architecture(value: Mapping[str, Any], where: str) -> None:
    architectures = value.get("architectures") or []
    model_type = value.get("model_type")
    if model_type is None and all(name.startswith("Bert") for name in architectures):
        model_type = "bert"
    if model_type != "bert":
        raise ConfigError(
            f"model_type is {model_type!r}"
            + (f" (architecture {', '.join(architectures)})" if architectures else ""),
            where=where,
            expected="model_type 'bert'",
            fix="give a BERT-family checkpoint: BERT, coCondenser, MiniLM, BERT-small, ...",
        )
    positions = value.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ConfigError(
            f"position_embedding_type is {positions!r}",
            where=where,
            expected="'absolute': relative positions are not implemented",
        )
    if value.get("is_decoder") or value.get("add_cross_attention"):
        raise ConfigError("a decoder", where=where, expected="a BERT encoder")


def _size(value: Mapping[str, Any], name: str, path: pathlib.Path) -> int:
    defaults = {"type_vocab_size": 2}
    size = value.get(name, defaults.get(name))
    if type(size) is not int or size < 1:
        raise DataError(
            f"{name} is {size!r}" if name in value else f"no field {name!r}",
            where=str(path),
            expected="an integer of 1 or more",
        )
    return size


def _size_words(config: BertConfig) -> str:
    names = ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "max_length", "type_vocab_size")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def _put(tree: Params, path: tuple[str, ...], value: np.ndarray) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree
