"""Our own BERT encoders inside T5X checkpoints: sizes and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.batch import Role
from taser_jax.errors import ConfigError, DataError
from taser_jax.interop.bert import encoder_shapes
from taser_jax.interop.tensors import listed
from taser_jax.models.bert import BertConfig

Params = dict[str, Any]

_TOWERS = {Role.QUERY: "query_encoder", Role.PASSAGE: "passage_encoder"}


def t5x_encoder_tree(target: Mapping[str, Any], role: Role, *, where: str) -> Params:
    """The encoder of a role in a checkpoint's tree: the tree itself, `encoder` or the role's own.

    Raises:
        ConfigError: there is no BERT of our names.
    """
    for name in (None, "encoder", _TOWERS[role]):
        tree = target if name is None else target.get(name)
        if isinstance(tree, Mapping) and "token" in (tree.get("embeddings") or {}):
            return dict(tree)
    raise ConfigError(
        f"a T5X checkpoint of {listed(sorted(target))}",
        where=where,
        expected="embeddings/token and layers_i of a BERT, at the top or under encoder, or "
        "under query_encoder and passage_encoder",
        fix="a T5 model cannot be read as a BERT",
    )


def t5x_bert_config(tree: Params, *, where: str, like: BertConfig | None = None) -> BertConfig:
    """The sizes that an encoder's arrays tell.

    Args:
        tree: of the encoder.
        where: the checkpoint, for messages.
        like: where activation, epsilon and, of attention kernels that join heads and their
            width, the number of heads come from: arrays do not tell those.

    Raises:
        ConfigError: the number of heads is not to be seen and `like` is not given.
        DataError: a parameter that tells a size is missing.
    """
    like_or_default = like or BertConfig()
    try:
        vocab_size, embed_dim = tree["embeddings"]["token"]["embedding"].shape
        query = tree["layers_0"]["attention"]["query"]["kernel"].shape
        sizes: dict[str, Any] = {
            "vocab_size": vocab_size,
            "embed_dim": embed_dim,
            "num_layers": sum(name.startswith("layers_") for name in tree),
            "mlp_dim": tree["layers_0"]["mlp"]["wi"]["kernel"].shape[1],
            "max_length": tree["embeddings"]["position"]["embedding"].shape[0],
            "type_vocab_size": tree["embeddings"]["type"]["embedding"].shape[0],
        }
    except KeyError as error:
        raise DataError(
            f"parameter {error} is missing", where=where, expected="a plain BERT encoder"
        ) from error
    if len(query) == 3:
        heads = query[1:]
    elif like is not None:
        heads = (like.num_heads, query[1] // like.num_heads)
    else:
        raise ConfigError(
            f"attention kernels of shape {query} do not tell the number of heads",
            where=where,
            expected="[embed, heads, kv]",
            fix="write the sizes into BertConfig in place of pretrained_bert",
        )
    return BertConfig(
        **sizes,
        num_heads=int(heads[0]),
        head_dim=int(heads[1]),
        activation=like_or_default.activation,
        layer_norm_epsilon=like_or_default.layer_norm_epsilon,
    )


def t5x_encoder(tree: Params, config: BertConfig, *, where: str, layers: Sequence[int]) -> Params:
    """Float32 parameters of the encoder, its blocks chosen from the checkpoint's.

    Raises:
        DataError: parameters are missing.
        ConfigError: one has another size.
    """
    chosen = {"embeddings": tree["embeddings"]}
    chosen |= {f"layers_{i}": tree[f"layers_{layer}"] for i, layer in enumerate(layers)}
    params: Params = {}
    missing = []
    for path, shape in encoder_shapes(config).items():
        value: Any = chosen
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            missing.append("/".join(path))
            continue
        if value.size != math.prod(shape):
            raise ConfigError(
                f"{'/'.join(path)} has shape {value.shape}", where=where, expected=str(shape)
            )
        into = params
        for key in path[:-1]:
            into = into.setdefault(key, {})
        into[path[-1]] = np.array(value, np.float32).reshape(shape)
    if missing:
        raise DataError(
            f"{len(missing)} parameters are missing: {listed(missing)}",
            where=where,
            expected="a plain BERT encoder",
        )
    return params
