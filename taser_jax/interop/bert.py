"""Converts BERT between Hugging Face's names and shapes and ours, with NumPy alone."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import jax
import msgspec
import numpy as np
from msgspec import Meta

from taser_jax.interop import leaves
from taser_jax.interop.leaves import Leaf, Params, Path, leaves_of, params_to_tensors, size_words
from taser_jax.interop.tensors import Shapes, Tensors, listed, read_config
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig, BertEncoder
from taser_jax.models.layers import Activation
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Share, read_typed

_TOKEN_TABLE = "embeddings.word_embeddings.weight"
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
# Sizes that the shapes of arrays show.
_SHAPING = ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "max_length", "type_vocab_size")
# Our field -> Hugging Face's.
_SIZES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "max_length": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
}
# Our parameters' names in a block, and beside the blocks -> Hugging Face's.
_BLOCK_NAMES = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "attention_layer_norm": "attention.output.LayerNorm",
    "mlp/wi": "intermediate.dense",
    "mlp/wo": "output.dense",
    "mlp/layer_norm": "output.LayerNorm",
}
_EMBEDDING_NAMES = {
    "token": "word_embeddings",
    "position": "position_embeddings",
    "type": "token_type_embeddings",
    "layer_norm": "LayerNorm",
}
_T = TypeVar("_T")


class _Kind(msgspec.Struct):
    """Read first, since other architectures have other fields."""

    model_type: str | None = None
    architectures: list[str] = []
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False


class _File(msgspec.Struct):
    """Sizes far above those of any BERT are damaged and would fill the memory."""

    vocab_size: Annotated[int, Meta(ge=1, le=10_000_000)]
    hidden_size: Annotated[int, Meta(ge=1, le=65_536)]
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1_000)]
    num_attention_heads: Annotated[int, Meta(ge=1, le=1_024)]
    intermediate_size: Annotated[int, Meta(ge=1, le=1_000_000)]
    max_position_embeddings: Annotated[int, Meta(ge=1, le=10_000_000)]
    type_vocab_size: Annotated[int, Meta(ge=1, le=1_000)] = 2
    hidden_act: str = "gelu"
    hidden_dropout_prob: Share = 0.1
    attention_probs_dropout_prob: Share = 0.1
    layer_norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-12
    initializer_range: Share = 0.02


def bert_config(directory: pathlib.Path, **overrides: object) -> BertConfig:
    """Reads the sizes and numerics from a checkpoint's `config.json`.

    Args:
        directory: the checkpoint's directory.
        overrides: fields of `BertConfig` that replace the checkpoint's.

    Raises:
        DataError: there is no config.json, it is not JSON, or a size is missing or invalid.
        ConfigError: another architecture, or an unsupported variant of BERT.
    """
    path, kind = read_config(directory, _Kind)
    _check_architecture(kind, str(path))
    file = read_typed(path, _File)
    fields: dict[str, Any] = {ours: getattr(file, theirs) for ours, theirs in _SIZES.items()}
    heads, embed = fields["num_heads"], fields["embed_dim"]
    if embed % heads:
        problem = f"hidden_size {embed} is not divisible by num_attention_heads {heads}"
        raise DataError(problem, where=str(path), fix="the file is damaged: download it again")
    activation = file.hidden_act
    if activation not in _ACTIVATIONS:
        problem = f"hidden_act is {activation!r}, not one of {', '.join(_ACTIVATIONS)}"
        raise ConfigError(problem, where=str(path), fix="choose another checkpoint")
    fields |= {
        "head_dim": embed // heads,
        "activation": _ACTIVATIONS[activation],
        "dropout_rate": file.hidden_dropout_prob,
        "attention_dropout_rate": file.attention_probs_dropout_prob,
        "layer_norm_epsilon": file.layer_norm_eps,
        "initializer_stddev": file.initializer_range,
    }
    return BertConfig(**(fields | overrides))


def config_to_json(config: BertConfig) -> dict[str, Any]:
    """`config.json` of Hugging Face's BertModel for a plain encoder.

    Raises:
        ConfigError: the heads together are not as wide as the hidden states, as BertModel requires.
    """
    if config.num_heads * config.head_dim != config.embed_dim:
        raise ConfigError(
            f"{config.num_heads} heads of {config.head_dim} with embed_dim {config.embed_dim}: "
            "Hugging Face's BERT has heads x head_dim = embed_dim",
            where="BertConfig",
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

    Heads for other tasks, poolers and buffers are ignored; LayerNorm may be named gamma and beta.

    Args:
        tensors: tensors by name, with any prefix ("bert." or none).
        config: the requested encoder.
        where: the checkpoint, for messages.
        layers: which of the checkpoint's blocks, from 0; None: the first `config.num_layers`.

    Returns:
        `embeddings/...`, `layers_i/...`.

    Raises:
        ConfigError: not a BERT, or a tensor's shape does not match `config`.
        DataError: tensors are missing, have NaN, or are unexpected.
    """
    tensors = _canonical(tensors, where)
    requested = _checked_leaves(tensors, config, where, layers)
    return leaves.params_from_tensors(
        requested, tensors, where=where, sizes=size_words(config, _SHAPING)
    )


def check_shapes(
    shapes: Shapes, config: BertConfig, *, where: str, layers: Sequence[int] | None = None
) -> None:
    """Refuses what `encoder_from_tensors` would refuse, before any tensor is read.

    Args:
        shapes: shapes of a checkpoint's tensors, by name.
        config: the requested encoder.
        where: the checkpoint, for messages.
        layers: which of the checkpoint's blocks, from 0; None: the first `config.num_layers`.

    Raises:
        ConfigError: not a BERT, or a tensor's shape does not match `config`.
        DataError: tensors are missing or unexpected.
    """
    shapes = _canonical(shapes, where)
    requested = _checked_leaves(shapes, config, where, layers)
    leaves.check_shapes(requested, shapes, where=where, sizes=size_words(config, _SHAPING))


def _checked_leaves(
    names: Mapping[str, object], config: BertConfig, where: str, layers: Sequence[int] | None
) -> list[Leaf]:
    """The encoder's leaves, after checking that its blocks have these tensors and no others."""
    if layers is None:
        layers = range(config.num_layers)
    requested = bert_leaves(config, tuple(layers))
    names_of_leaves = {leaf.name for leaf in requested}
    missing = [leaf.name for leaf in requested if leaf.name not in names]
    if missing:
        raise DataError(
            f"{len(missing)} tensors of a BERT of {config.num_layers} layers are missing: "
            f"{listed(missing)}",
            where=where,
            fix="download the checkpoint again, or set num_layers to what it has",
        )
    # Adapters and the like change what a block computes.
    blocks = tuple(f"encoder.layer.{layer}." for layer in layers)
    more = sorted(n for n in names if n.startswith(blocks) and n not in names_of_leaves)
    if more:
        raise DataError(
            f"{len(more)} tensors that a BERT block does not have: {listed(more)}",
            where=where,
            fix="merge adapters into the weights first, or choose another checkpoint",
        )
    return requested


def encoder_to_tensors(params: Params, config: BertConfig) -> Tensors:
    """A plain encoder's parameters under the names and shapes of Hugging Face's BertModel.

    Args:
        params: parameters of a plain encoder, from `plain_encoder`.
        config: its sizes.

    Raises:
        ConfigError: the parameters are not a plain encoder of these sizes.
    """
    return params_to_tensors(params, bert_leaves(config, tuple(range(config.num_layers))))


@functools.lru_cache(maxsize=8)
def bert_leaves(config: BertConfig, layers: tuple[int, ...]) -> list[Leaf]:
    """All parameters of a plain encoder whose blocks are these of a checkpoint."""
    tokens = Tokens(np.zeros((1, 1), np.int32), np.ones((1, 1), bool))
    drawn = jax.eval_shape(
        lambda key: BertEncoder(config).init(key, tokens, role=Role.QUERY), jax.random.key(0)
    )
    return leaves_of(drawn["params"], lambda path: tensor_name(path, layers))


def tensor_name(path: Path, layers: Sequence[int]) -> str:
    """Hugging Face's name of a parameter; our block i is block `layers[i]` of the checkpoint.

    Example:
        >>> tensor_name(("layers_1", "mlp", "wi", "kernel"), (0, 6))
        'encoder.layer.6.intermediate.dense.weight'
    """
    place, *part, kind = path
    suffix = "bias" if kind == "bias" else "weight"
    if place == "embeddings":
        return f"embeddings.{_EMBEDDING_NAMES[part[0]]}.{suffix}"
    number = layers[int(place.removeprefix("layers_"))]
    return f"encoder.layer.{number}.{_BLOCK_NAMES['/'.join(part)]}.{suffix}"


def _canonical(tensors: Mapping[str, _T], where: str) -> dict[str, _T]:
    """The encoder's tensors without prefix, with LayerNorm's current names."""
    prefixes = sorted(n.removesuffix(_TOKEN_TABLE) for n in tensors if n.endswith(_TOKEN_TABLE))
    if not prefixes:
        problem = f"no tensor is named ...{_TOKEN_TABLE}; there are {listed(sorted(tensors))}"
        raise ConfigError(problem, where=where, fix="give a checkpoint of BERT's architecture")
    prefix = next((p for p in ("", "bert.") if p in prefixes), prefixes[0])
    if prefix not in ("", "bert.") and len(prefixes) > 1:
        problem = f"{len(prefixes)} encoders, under {listed(prefixes)}"
        raise ConfigError(problem, where=where, fix="save the required encoder by itself")
    named = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
            named[re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)] = tensor
    return named


def _check_architecture(kind: _Kind, where: str) -> None:
    architectures, model_type = kind.architectures, kind.model_type
    if model_type is None and all(name.startswith("Bert") for name in architectures):
        model_type = "bert"
    if model_type != "bert":
        named = f" (architecture {', '.join(architectures)})" if architectures else ""
        problem = f"model_type is {model_type!r}{named}; 'bert' can be read"
        fix = "give a BERT-family checkpoint: BERT, coCondenser, MiniLM, BERT-small, ..."
        raise ConfigError(problem, where=where, fix=fix)
    positions = kind.position_embedding_type
    if positions != "absolute":
        problem = f"position_embedding_type is {positions!r}; only 'absolute' is implemented"
        raise ConfigError(problem, where=where, fix="choose another checkpoint")
    if kind.is_decoder or kind.add_cross_attention:
        raise ConfigError("this is a decoder", where=where, fix="give a BERT encoder")
