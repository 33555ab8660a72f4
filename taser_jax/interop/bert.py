"""Weights of BERT and its relatives from and to Hugging Face, and in and out of dual encoders.

A dual encoder is made of plain BERTs, one per role (and task).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping

import jax
import numpy as np

from taser_jax.interop.bert_formats import FORMATS
from taser_jax.interop.tensors import Leaf, Path, leaves_of, listed, params_from_tensors, size_words
from taser_jax.models.batch import Role
from taser_jax.models.bert_config import BertConfig, Family
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, Params
from taser_jax.models.parameters import abstract_params
from taser_jax.storage.errors import ConfigError

# Frequencies of rotary positions, which some checkpoints have.
_BUFFER = re.compile(r".*\.inv_freq")
# Sizes that the shapes of arrays show.
_SHAPING = ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "max_length", "type_vocab_size")


def encoder_from_tensors(
    tensors: Mapping[str, np.ndarray], config: BertConfig, *, where: str
) -> Params:
    """The parameters of a plain encoder, float32, from a BERT-family checkpoint's tensors.

    Further blocks, heads for other tasks, poolers and buffers are ignored; LayerNorm may be named
    gamma and beta.

    Args:
        tensors: tensors by name, with any prefix ("bert." or none).
        config: the requested encoder.
        where: the checkpoint, for messages.

    Returns:
        `embeddings/...`, `layers_i/...`.

    Raises:
        ConfigError: not a BERT, or a tensor's shape does not match `config`.
        DataError: tensors are missing, have NaN, or are unexpected.
    """
    block = FORMATS[config.family].block
    return params_from_tensors(
        bert_leaves(config),
        _canonical(tensors, config, where),
        blocks=tuple(f"{block}{layer}." for layer in range(config.num_layers)),
        ignored=_BUFFER,
        where=where,
        sizes=size_words(config, _SHAPING),
    )


@functools.lru_cache(maxsize=8)
def bert_leaves(config: BertConfig) -> list[Leaf]:
    """All parameters of a plain encoder."""
    shapes = abstract_params(DualEncoder(DualEncoderConfig(bert=config)))["encoder"]
    fused = FORMATS[config.family].fused
    parts = {
        name: (place, len(names)) for names in fused.values() for place, name in enumerate(names)
    }
    return [
        dataclasses.replace(leaf, part=parts.get("/".join(leaf.path[1:-1]), leaf.part))
        for leaf in leaves_of(shapes, lambda path: tensor_name(path, config.family))
    ]


def tensor_name(path: Path, family: Family = Family.BERT) -> str:
    """Hugging Face's name of a parameter.

    Example:
        >>> tensor_name(("layers_1", "mlp", "wi", "kernel"))
        'encoder.layer.1.intermediate.dense.weight'
    """
    format = FORMATS[family]
    of_fused = {ours: name for name, kernels in format.fused.items() for ours in kernels}
    names = {**format.names, **of_fused}
    *places, kind = path
    suffix = "bias" if kind == "bias" else "weight"
    if not places[0].startswith("layers_"):
        return f"{names['/'.join(places)]}.{suffix}"
    number = places[0].removeprefix("layers_")
    return f"{format.block}{number}.{names['/'.join(places[1:])]}.{suffix}"


def _canonical(
    tensors: Mapping[str, np.ndarray], config: BertConfig, where: str
) -> dict[str, np.ndarray]:
    """The encoder's tensors without prefix, with LayerNorm's current names."""
    format = FORMATS[config.family]
    table = tensor_name(("embeddings", "token", "embedding"), config.family)
    usual = ("", f"{config.family.value}.")
    prefixes = sorted(name.removesuffix(table) for name in tensors if name.endswith(table))
    if not prefixes:
        problem = f"no tensor is named ...{table}; there are {listed(sorted(tensors))}"
        fix = f"give a checkpoint of {format.architecture}'s architecture"
        raise ConfigError(problem, where=where, fix=fix)
    prefix = next((p for p in usual if p in prefixes), prefixes[0])
    if prefix not in usual and len(prefixes) > 1:
        problem = f"{len(prefixes)} encoders, under {listed(prefixes)}"
        raise ConfigError(problem, where=where, fix="save the required encoder by itself")
    named = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix).replace("LayerNorm.gamma", "LayerNorm.weight")
            named[name.replace("LayerNorm.beta", "LayerNorm.bias")] = tensor
    return named


def plain_encoder(
    params: Params, config: DualEncoderConfig, role: Role, *, task: str | None = None
) -> Params:
    """The parameters of the plain BERT that encodes a role's texts at inference.

    With Det-R it has the role's expert in every specialised block; with I > 2 experts, the first of
    the role's group.

    Args:
        params: parameters of the dual encoder.
        config: its configuration; routing is not learned.
        role: the role.
        task: the task whose query tower to use, if tasks have their own.

    Returns:
        `embeddings/...`, `layers_i/{attention, attention_layer_norm, mlp}/...`.

    Raises:
        ConfigError: tasks have query towers and no task is given.
    """
    tower = params[config.tower_name(role, task)]
    expert, _ = config.experts.group(role)
    return {name: _plain_block(block, expert) for name, block in tower.items()}


def _plain_block(block: Params, expert: int) -> Params:
    if "experts" not in block:
        return block
    rest = {name: value for name, value in block.items() if name != "experts"}
    return {**rest, "mlp": jax.tree.map(lambda leaf: leaf[expert], block["experts"])}
