"""Converts parameters between our tree and Hugging Face's named tensors, leaf by leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    inputs: int = 0

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape under Hugging Face's name: a Linear's weight is [outputs, inputs]."""
        if self.inputs:
            return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (math.prod(self.shape),) if self.path[-1] != "embedding" else self.shape


def params_from_tensors(
    tensors: Mapping[str, np.ndarray], leaves: Sequence[Leaf], *, where: str, sizes: str, fix: str
) -> Params:
    """Our parameters, float32, from tensors of the names that the leaves have.

    Args:
        tensors: tensors by name, including all those of the leaves.
        leaves: the requested parameters.
        where: the checkpoint, for messages.
        sizes: the model's sizes in words, for messages.
        fix: the advice if a shape differs.

    Raises:
        ConfigError: a tensor of another shape.
        DataError: a tensor that holds NaN or no floating-point numbers.
    """
    params: dict[Path, np.ndarray] = {}
    for leaf in leaves:
        tensor = weights(tensors[leaf.name], leaf.name, where)
        check_shape(leaf, tensor.shape, where=where, sizes=sizes, fix=fix)
        ours = (tensor.T if leaf.inputs else tensor).reshape(leaf.shape)
        params[leaf.path] = np.ascontiguousarray(ours)
    return unflatten_dict(params)


def check_shape(leaf: Leaf, shape: tuple[int, ...], *, where: str, sizes: str, fix: str) -> None:
    """Refuses a tensor of another shape than the leaf's; arguments as of `params_from_tensors`."""
    if shape != leaf.tensor_shape:
        raise ConfigError(
            f"{leaf.name} has shape {shape}",
            where=where,
            expected=f"{leaf.tensor_shape}, for {sizes}",
            fix=fix,
        )


def params_to_tensors(params: Params, leaves: Sequence[Leaf]) -> Tensors:
    """Our parameters under Hugging Face's names and shapes; float32.

    Raises:
        ConfigError: the parameters are not those of the leaves.
    """
    flat, tensors = flatten_dict(params), {}
    for leaf in leaves:
        value = flat.get(leaf.path)
        if value is None or tuple(value.shape) != leaf.shape:
            found = "is absent" if value is None else f"has shape {tuple(value.shape)}"
            raise ConfigError(
                f"parameter {'/'.join(leaf.path)} {found}",
                where="params_to_tensors",
                expected=f"that of a plain encoder, of shape {leaf.shape}",
                fix="choose one path of the dual encoder with plain_encoder",
            )
        value = np.asarray(value, np.float32)
        if leaf.inputs:
            value = value.reshape(leaf.tensor_shape[::-1]).T
        # An array of its own, not a view of the parameters.
        tensors[leaf.name] = np.array(value.reshape(leaf.tensor_shape), order="C")
    return tensors


def weights(array: ArrayLike, name: str, where: str) -> Float[np.ndarray, "*shape"]:
    """Floating-point weights as float32.

    Raises:
        DataError: other numbers, NaN or infinity.
    """
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise DataError(
            f"{name} is {array.dtype}",
            where=where,
            expected="floating-point weights",
            fix="quantised checkpoints are not supported: use the original checkpoint",
        )
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{name} has NaN or infinity", where=where, expected="finite weights")
    return array
