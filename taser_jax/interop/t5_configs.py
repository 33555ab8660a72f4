"""T5's sizes: from and to a Hugging Face configuration, and from T5X's arrays."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from flax.traverse_util import flatten_dict
from msgspec import Meta

from taser_jax.interop.t5 import count_layers, find, unscanned
from taser_jax.interop.tensors import listed, read_config
from taser_jax.models.t5 import PositionBias, T5Config
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Share, read_typed

# Our field -> Hugging Face's.
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


class _Kind(msgspec.Struct):
    """Read first, since other architectures have other fields."""

    model_type: str | None = None
    architectures: list[str] = []


class _File(msgspec.Struct):
    """Sizes far above those of any T5 are damaged and would fill the memory."""

    vocab_size: Annotated[int, Meta(ge=1, le=10_000_000)]
    d_model: Annotated[int, Meta(ge=1, le=65_536)]
    num_layers: Annotated[int, Meta(ge=1, le=1_000)]
    num_heads: Annotated[int, Meta(ge=1, le=1_024)]
    d_kv: Annotated[int, Meta(ge=1, le=65_536)]
    d_ff: Annotated[int, Meta(ge=1, le=1_000_000)]
    num_decoder_layers: Annotated[int, Meta(ge=0, le=1_000)] | None = None
    relative_attention_num_buckets: Annotated[int, Meta(ge=1, le=100_000)] = 32
    relative_attention_max_distance: Annotated[int, Meta(ge=1, le=10_000_000)] = 128
    feed_forward_proj: str = "relu"
    dropout_rate: Share = 0.1
    layer_norm_epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-6


def t5_config(directory: pathlib.Path, **overrides: object) -> T5Config:
    """Reads the sizes and numerics from a Hugging Face checkpoint's `config.json`.

    Args:
        directory: the checkpoint's directory.
        overrides: fields of `T5Config` that replace the checkpoint's.

    Raises:
        DataError: there is no config.json, it is not JSON, or a size is missing or invalid.
        ConfigError: another architecture, or an unsupported variant of T5.
    """
    path, described = read_config(directory, _Kind)
    kind = described.model_type
    if kind not in _POSITIONS:
        fix = "give a T5 checkpoint; BERT's are read by pretrained_bert"
        problem = f"model_type is {kind!r}, not {' or '.join(_POSITIONS)}"
        raise ConfigError(problem, where=str(path), fix=fix)
    file = read_typed(path, _File)
    if any(name.endswith("EncoderModel") for name in described.architectures):
        file.num_decoder_layers = 0
    elif file.num_decoder_layers is None:
        file.num_decoder_layers = file.num_layers
    feed_forward = file.feed_forward_proj
    if feed_forward not in _FEED_FORWARDS:
        problem = f"feed_forward_proj is {feed_forward!r}, not {' or '.join(_FEED_FORWARDS)}"
        raise ConfigError(problem, where=str(path), fix="choose another checkpoint")
    numbers = {"dropout_rate": file.dropout_rate, "rms_norm_epsilon": file.layer_norm_epsilon}
    fields: dict[str, Any] = {ours: getattr(file, theirs) for ours, theirs in _SIZES.items()}
    fields |= {"mlp_activations": _FEED_FORWARDS[feed_forward], "position_bias": _POSITIONS[kind]}
    return T5Config(**(fields | numbers | overrides))


def t5_to_json(config: T5Config) -> dict[str, Any]:
    """`config.json` of Hugging Face's T5Model, or of T5EncoderModel without decoder layers."""
    kind = next(name for name, bias in _POSITIONS.items() if bias is config.position_bias)
    feed_forwards = {activations: name for name, activations in _FEED_FORWARDS.items()}
    model = "Model" if config.num_decoder_layers else "EncoderModel"
    return {
        "architectures": [f"{'T5' if kind == 't5' else 'UMT5'}{model}"],
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


def t5x_t5_config(tree: Mapping[str, Any], *, where: str, **overrides: Any) -> T5Config:
    """Infers the sizes from the arrays of a T5X checkpoint, plain or scanned.

    Settings that arrays do not show, such as `max_distance`, have T5's values unless overridden.

    Args:
        tree: `target` of a T5X checkpoint.
        where: the checkpoint, for messages.
        overrides: fields of `T5Config`.

    Raises:
        ConfigError: the tree is not a T5.
    """
    tree = unscanned(tree)
    table = find(tree, ("token_embedder", "embedding"))
    first = find(tree, ("encoder", "layers_0"))
    biased = isinstance(first, Mapping) and any(path[-1] == "bias" for path in flatten_dict(first))
    if table is None or not isinstance(first, Mapping) or biased:
        problem = f"not a T5: the checkpoint has {listed(sorted(flatten_dict(tree, sep='/')))}"
        raise ConfigError(problem, where=where, fix="give a T5X checkpoint of a T5")
    shared = find(tree, ("encoder", "relpos_bias", "rel_embedding"))
    own = find(first, ("relpos_bias", "rel_embedding"))
    positions, query = (own if shared is None else shared), find(first, ("attention", "query"))
    gated, mlp = "wi_0" in first.get("mlp", {}), find(first, ("mlp", "wo", "kernel"))
    if positions is None or query is None or mlp is None:
        problem = f"not a T5: a block lacks relpos_bias, attention or mlp: {listed(sorted(first))}"
        raise ConfigError(problem, where=where, fix="give a T5X checkpoint of a T5")
    heads, buckets = positions.shape
    fields = {
        "vocab_size": table.shape[0],
        "embed_dim": table.shape[1],
        "num_layers": count_layers(tree["encoder"]),
        "num_decoder_layers": count_layers(tree.get("decoder", {})),
        "num_heads": heads,
        "head_dim": math.prod(query["kernel"].shape[1:]) // heads,
        "mlp_dim": mlp.shape[0],
        "num_buckets": buckets,
        "mlp_activations": _FEED_FORWARDS["gated-gelu" if gated else "relu"],
        "position_bias": PositionBias.PER_LAYER if shared is None else PositionBias.SHARED,
    }
    return T5Config(**(fields | overrides))
