"""Converts parameters between our tree and Hugging Face's named tensors, leaf by leaf.

A model's tree gives the shapes, and one function the names of Hugging Face.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float
from numpy.typing import ArrayLike

from taser_jax.interop.tensors import Tensors
from taser_jax.storage.errors import ConfigError, DataError

Params = dict[str, Any]
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its path in our tree, Hugging Face's name, and its shape.

    Attributes:
        path: keys from the encoder down.
        name: name of the tensor.
        shape: ours. A kernel is [inputs..., outputs...].
        inputs: number of leading axes of a kernel that are inputs; 0 if it is not transposed.
        part: which of how many equal parts of the tensor it is, along the tensor's first axis.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    inputs: int = 0
    part: tuple[int, int] = (0, 1)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape under Hugging Face's name: a Linear's weight is [outputs, inputs]."""
        rows, *rest = self.part_shape
        return rows * self.part[1], *rest

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of this parameter's part of the tensor."""
        if self.inputs:
            return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (math.prod(self.shape),) if self.path[-1] != "embedding" else self.shape


def leaves_of(shapes: Params, name_of: Callable[[Path], str]) -> list[Leaf]:
    """The leaves of an encoder.

    Args:
        shapes: its parameters, abstract ones, boxed by Flax or not.
        name_of: path -> Hugging Face's name.
    """
    leaves = []
    for keys, array in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(str(key.key) for key in keys if hasattr(key, "key"))
        is_kernel = path[-1] in ("kernel", "rel_embedding")
        inputs = 1 + (path[-2] == "out") if is_kernel else 0
        leaves.append(Leaf(path, name_of(path), tuple(array.shape), inputs))
    return sorted(leaves, key=_place)


def _place(leaf: Leaf) -> tuple[list[int], int, str]:
    """Messages name the first blocks first, and in each its largest parameter."""
    numbers = [int(number) for number in re.findall(r"\d+", leaf.name)]
    return numbers, -math.prod(leaf.shape), leaf.name


def check_shapes(
    leaves: Sequence[Leaf], shapes: Mapping[str, tuple[int, ...]], *, where: str, sizes: str
) -> None:
    """Refuses tensors of other shapes than the leaves', before any tensor is read.

    Args:
        leaves: the requested parameters.
        shapes: shapes of tensors by name, including all those of the leaves.
        where: the checkpoint, for messages.
        sizes: the model's sizes in words, for messages.

    Raises:
        ConfigError: a tensor of another shape.
    """
    for leaf in leaves:
        if shapes[leaf.name] != leaf.tensor_shape:
            raise ConfigError(
                f"{leaf.name} has shape {shapes[leaf.name]}",
                where=where,
                expected=f"{leaf.tensor_shape}, for {sizes}",
                fix="take the sizes from the checkpoint's own config.json: pretrained_bert(source) "
                "or pretrained_t5(source)",
            )


def params_from_tensors(
    leaves: Sequence[Leaf], tensors: Mapping[str, np.ndarray], *, where: str, sizes: str
) -> Params:
    """Our parameters, float32, from tensors of the names that the leaves have.

    Args:
        leaves: the requested parameters.
        tensors: tensors by name, including all those of the leaves.
        where: the checkpoint, for messages.
        sizes: the model's sizes in words, for messages.

    Raises:
        ConfigError: a tensor of another shape.
        DataError: a tensor that holds NaN or no floating-point numbers.
    """
    shapes = {leaf.name: tensors[leaf.name].shape for leaf in leaves}
    check_shapes(leaves, shapes, where=where, sizes=sizes)
    params: dict[Path, np.ndarray] = {}
    for leaf in leaves:
        place, count = leaf.part
        tensor = np.split(weights(tensors[leaf.name], leaf.name, where), count)[place]
        ours = (tensor.T if leaf.inputs else tensor).reshape(leaf.shape)
        params[leaf.path] = np.ascontiguousarray(ours)
    return unflatten_dict(params)


def params_to_tensors(params: Params, leaves: Sequence[Leaf]) -> Tensors:
    """Our parameters under Hugging Face's names and shapes; float32.

    Raises:
        ConfigError: the parameters are not those of the leaves.
    """
    flat = flatten_dict(params)
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for leaf in sorted(leaves, key=lambda leaf: leaf.part):
        value = flat.get(leaf.path)
        if value is None or tuple(value.shape) != leaf.shape:
            problem = "is absent" if value is None else f"has shape {tuple(value.shape)}"
            raise ConfigError(
                f"parameter {'/'.join(leaf.path)} {problem}, not {leaf.shape}",
                where="params_to_tensors",
                fix="choose one path of the dual encoder with plain_encoder",
            )
        value = np.asarray(value, np.float32)
        if leaf.inputs:
            value = value.reshape(leaf.part_shape[::-1]).T
        parts[leaf.name].append(value.reshape(leaf.part_shape))
    # Arrays of their own, not views of the parameters.
    return {name: np.ascontiguousarray(np.concatenate(found)) for name, found in parts.items()}


def weights(array: ArrayLike, name: str, where: str) -> Float[np.ndarray, "*shape"]:
    """Floating-point weights as float32.

    Raises:
        DataError: other numbers, NaN or infinity.
    """
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fix = "quantised checkpoints are not supported: use the original checkpoint"
        raise DataError(f"{name} is {array.dtype}, not floating-point", where=where, fix=fix)
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{name} has NaN or infinity", where=where)
    return array


def check_sizes(
    checkpoint: object,
    model: object,
    *,
    names: Sequence[str],
    where: str,
    fix: str,
    fixes: Mapping[str, str],
) -> None:
    """Refuses weights whose sizes differ from the model's.

    Example:
        "the checkpoint has mlp_dim 24, num_layers 4; expected: mlp_dim 48, num_layers 2, as the
        model is configured"

    Args:
        checkpoint: configuration of the checkpoint.
        model: configuration of the model, of the same type.
        names: fields that must be equal.
        where: the checkpoint.
        fix: advice for all cases.
        fixes: field -> additional advice if that field differs.

    Raises:
        ConfigError: naming every field that differs.
    """
    differing = [name for name in names if getattr(checkpoint, name) != getattr(model, name)]
    if differing:
        raise ConfigError(
            f"the checkpoint has {size_words(checkpoint, differing)}",
            where=where,
            expected=f"{size_words(model, differing)}, as the model is configured",
            fix="; ".join([fix, *(fixes[name] for name in differing if name in fixes)]),
        )


def size_words(config: object, names: Sequence[str]) -> str:
    """Fields of a configuration in words, such as "mlp_dim 24, num_layers 4"."""
    values = {name: getattr(config, name) for name in names}
    return ", ".join(f"{name} {getattr(v, 'value', v)}" for name, v in values.items())
