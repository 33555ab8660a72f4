"""Parameters of a dual encoder: drawn, as shapes, and the logical name of each axis."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.batch import Tokens
from taser_jax.models.dual_encoder import DualEncoder, Params
from taser_jax.storage.artifacts import Fingerprint
from taser_jax.storage.errors import ConfigError

_ANY_LENGTH = 1


def init_params(
    model: DualEncoder,
    key: jax.Array,
    *,
    query_length: int = _ANY_LENGTH,
    passage_length: int = _ANY_LENGTH,
) -> Params:
    """Draws parameters: plain nested dicts of float32 arrays, without partitioning metadata.

    Args:
        model: the dual encoder.
        key: a jax.random key.
        query_length: tokens per query, only checked against the position table.
        passage_length: tokens per passage, as for queries.
    """
    boxed = _boxed_params(model, key, query_length, passage_length)
    return jax.tree.map(_unbox, boxed, is_leaf=_is_boxed)


def abstract_params(model: DualEncoder) -> Params:
    """Shapes and dtypes of the parameters, without allocating them."""
    return jax.tree.map(_unbox, _abstract_boxed_params(model), is_leaf=_is_boxed)


def logical_axes(model: DualEncoder) -> Params:
    """For every parameter the logical name of each axis, as a PartitionSpec.

    Example:
        >>> logical_axes(model)["encoder"]["layers_0"]["mlp"]["wi"]["kernel"]
        PartitionSpec('embed', 'mlp')
    """
    return nn.get_partition_spec(_abstract_boxed_params(model))


def parameters_fingerprint(params: PyTree, configuration: str = "") -> str:
    """Fingerprint of parameters, with their paths, and of what they belong to.

    Args:
        params: the parameters.
        configuration: of the model, as JSON.
    """
    total = Fingerprint()
    if configuration:
        total.add(configuration)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        total.add(jax.tree_util.keystr(path)).add(np.asarray(leaf))
    return total.hex()


def in_dtype(params: Params, dtype: str) -> Params:
    """The kernels of the blocks' products in `dtype`; routers and all else stay as they are.

    A block rounds a kernel to its own dtype anyway, so that the model's output stays as it is.

    Example:
        Of `{"layers_0": {"wi": {"kernel": w, "bias": b}}}` w is rounded and b is not.
    """

    def rounded(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
        *parents, name = (str(entry.key) for entry in path)
        of_a_block = any(parent.startswith("layers_") for parent in parents)
        if name != "kernel" or not of_a_block or "router" in parents:
            return leaf
        return leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(rounded, params)


def check_same_parameters(given: Params, model: Params, *, where: str, fix: str) -> None:
    """Refuses a tree whose parameters have other names or shapes than a model's.

    Args:
        given: arrays or shapes.
        model: the model's, arrays or shapes.
        where: what the first holds, for messages.
        fix: what they advise.

    Raises:
        ConfigError: naming the first parameter that differs.
    """
    shapes, expected = (
        {name: tuple(leaf.shape) for name, leaf in leaves_by_path(tree).items()}
        for tree in (given, model)
    )
    for name in sorted(shapes.keys() | expected.keys()):
        shape = shapes.get(name)
        if shape != expected.get(name):
            problem = f"parameter {name} has shape {shape}, in the model {expected.get(name)}"
            raise ConfigError(problem, where=where, fix=fix)


def parameter_count(params: Params) -> int:
    """Number of parameters of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _boxed_params(
    model: DualEncoder, key: jax.Array, query_length: int, passage_length: int
) -> Params:
    queries, passages = (
        Tokens(jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))
        for length in (query_length, passage_length)
    )
    return model.config.initial_params(model.init(key, queries, passages)["params"])


@functools.lru_cache(maxsize=8)
def _abstract_boxed_params(model: DualEncoder) -> Params:
    # Tracing BERT-base takes a second, and commands ask for its shapes several times.
    return jax.eval_shape(lambda: _boxed_params(model, jax.random.key(0), _ANY_LENGTH, _ANY_LENGTH))


def _is_boxed(leaf: object) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def _unbox(leaf: PyTree) -> PyTree:
    return leaf.unbox(apply_constraint=False) if _is_boxed(leaf) else leaf
