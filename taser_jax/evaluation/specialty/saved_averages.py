"""T-SAGE's own moving average of sensitivities, read from the optimiser state of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import parameter_path

_FIELD = "average"


def has_saved_average(checkpoint: epath.Path, abstract_params: PyTree) -> bool:
    """Whether a checkpoint's optimiser state holds T-SAGE's average of these parameters."""
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(checkpoint / "state").item_metadata.tree
    return _path_to_average(tree, _by_path(abstract_params)) is not None


def restore_saved_average(
    checkpoint: epath.Path, abstract_params: PyTree
) -> dict[str, dict[str, jax.Array]]:
    """The average I that T-SAGE took its weights from, as it was saved.

    Args:
        checkpoint: a `checkpoint_N` directory that has one.
        abstract_params: shapes and shardings of the parameters.

    Returns:
        Task -> path of a trainable parameter -> float32 of its shape, sharded alike.
    """
    params = _by_path(abstract_params)
    place = checkpoint / "state"
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(place).item_metadata.tree
        keys = _path_to_average(tree, params) or ()

        def wanted(path: KeyPath, leaf: Any) -> Any:
            """The average's shape and sharding; a placeholder for leaves that are not read."""
            if tuple(map(_name, path[: len(keys)])) != keys:
                return ocp.PLACEHOLDER
            sharding = params[parameter_path(path[len(keys) + 1 :])].sharding
            return jax.ShapeDtypeStruct(tuple(leaf.shape), jnp.float32, sharding=sharding)

        item = jax.tree_util.tree_map_with_path(wanted, tree)
        restored = reader.restore(
            place,
            args=ocp.args.PyTreeRestore(
                item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
            ),
        )
    for key in keys:
        restored = restored[key]
    return {task: _by_path(tree) for task, tree in restored.items()}


def _name(key: Any) -> Any:
    """A dictionary's key or a list's place, from a JAX path."""
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path_to_average(tree: PyTree, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Keys down to the first "average" whose branches, one per task, are shaped as parameters."""
    branches: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        branches = tree.items()
    elif isinstance(tree, list | tuple):
        branches = enumerate(tree)
    for key, branch in branches:
        if key == _FIELD and isinstance(branch, Mapping) and _all_fit(branch.values(), params):
            return (key,)
        below = _path_to_average(branch, params)
        if below is not None:
            return (key, *below)
    return None


def _all_fit(trees: Iterable[PyTree], params: Mapping[str, Any]) -> bool:
    leaves = [leaf for tree in trees for leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return bool(leaves) and all(
        parameter_path(path) in params and tuple(leaf.shape) == params[parameter_path(path)].shape
        for path, leaf in leaves
    )
