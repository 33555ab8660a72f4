"""Converts weights of BERT and its relatives from and to Hugging Face, with NumPy alone."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from taser_jax.interop import leaves
from taser_jax.interop.bert_formats import FORMATS
from taser_jax.interop.leaves import Leaf, Params, Path, leaves_of, params_to_tensors, size_words
from taser_jax.interop.tensors import Shapes, Tensors, listed
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertEncoder
from taser_jax.models.bert_config import BertConfig, Family
from taser_jax.storage.errors import ConfigError, DataError

# Frequencies of rotary positions, which some checkpoints have.
_BUFFER = ".inv_freq"
# Sizes that the shapes of arrays show.
_SHAPING = ("vocab_size", "embed_dim", "mlp_dim", "num_heads", "max_length", "type_vocab_size")
_T = TypeVar("_T")


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
    tensors = _canonical(tensors, config, where)
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
    shapes = _canonical(shapes, config, where)
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
    blocks = tuple(f"{FORMATS[config.family].block}{layer}." for layer in layers)
    more = sorted(
        name
        for name in names
        if name.startswith(blocks) and name not in names_of_leaves and not name.endswith(_BUFFER)
    )
    if more:
        raise DataError(
            f"{len(more)} tensors that a BERT block does not have: {listed(more)}",
            where=where,
            fix="merge adapters into the weights first, or choose another checkpoint",
        )
    return requested


def encoder_to_tensors(params: Params, config: BertConfig) -> Tensors:
    """A plain encoder's parameters under the names and shapes of Hugging Face's model.

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
    fused = FORMATS[config.family].fused
    parts = {
        name: (place, len(names)) for names in fused.values() for place, name in enumerate(names)
    }
    found = leaves_of(drawn["params"], lambda path: tensor_name(path, layers, config.family))
    return [
        dataclasses.replace(leaf, part=parts.get("/".join(leaf.path[1:-1]), leaf.part))
        for leaf in found
    ]


def tensor_name(path: Path, layers: Sequence[int], family: Family = Family.BERT) -> str:
    """Hugging Face's name of a parameter; our block i is block `layers[i]` of the checkpoint.

    Example:
        >>> tensor_name(("layers_1", "mlp", "wi", "kernel"), (0, 6))
        'encoder.layer.6.intermediate.dense.weight'
    """
    format = FORMATS[family]
    of_fused = {ours: name for name, kernels in format.fused.items() for ours in kernels}
    names = {**format.names, **of_fused}
    *places, kind = path
    suffix = "bias" if kind == "bias" else "weight"
    if not places[0].startswith("layers_"):
        return f"{names['/'.join(places)]}.{suffix}"
    number = layers[int(places[0].removeprefix("layers_"))]
    return f"{format.block}{number}.{names['/'.join(places[1:])]}.{suffix}"


def _canonical(tensors: Mapping[str, _T], config: BertConfig, where: str) -> dict[str, _T]:
    """The encoder's tensors without prefix, with LayerNorm's current names."""
    format = FORMATS[config.family]
    table, usual = format.token_table, ("", f"{config.family.value}.")
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
            name = name.removeprefix(prefix)
            name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
            named[re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)] = tensor
    return named
