"""Shared by multi-task combiners: gradients with a leading task axis, trainable leaves, reports.

A combiner is an `optax.GradientTransformationExtraArgs` with
`update(task_grads, state, params, *, losses, key)`: each leaf of `task_grads` is a parameter's
gradients, [tasks, *shape], and the updates it returns have the parameters' own shapes. It is the
first link of the chain, so clipping, Adam and weight decay see one gradient.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, PyTree

_ROW = 512


class Reduction(enum.Enum):
    """Whether tasks' gradients are added up or averaged."""

    SUM = "sum"
    MEAN = "mean"


class Report(NamedTuple):
    """A combiner's report on its last step; part of its state, so that the step can log it.

    Attributes:
        weights: the mean factor of each task's gradient.
        scalars: other figures by name.
        usable: False where the combined gradient is meaningless and the step must be skipped;
            None means always usable.
    """

    weights: Float[Array, " task"]
    scalars: dict[str, Array]
    usable: Bool[Array, ""] | None = None


def no_report(num_tasks: int, *scalars: str) -> Report:
    """What a combiner's state holds before the first step."""
    zeros = {name: jnp.zeros((), jnp.float32) for name in scalars}
    return Report(jnp.zeros((num_tasks,), jnp.float32), zeros)


def find_report(opt_state: PyTree) -> Report | None:
    """The combiner's report in an optimiser state; None where there is no combiner."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, Report))
    return next((leaf for leaf in leaves if isinstance(leaf, Report)), None)


def keep_trainable(tree: PyTree, trainable: PyTree[bool] | None) -> PyTree:
    """The tree with each frozen parameter replaced by `optax.MaskedNode`, which has no leaves."""
    if trainable is None:
        return tree
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else optax.MaskedNode(), tree, trainable
    )


def with_frozen(gradients: PyTree, params: PyTree) -> PyTree:
    """A tree as `keep_trainable` makes it, with 0 for each frozen parameter."""

    def of_leaf(param: jax.Array, gradient: PyTree) -> jax.Array:
        return jnp.zeros_like(param) if isinstance(gradient, optax.MaskedNode) else gradient

    return jax.tree.map(of_leaf, params, gradients)


def gram_matrix(leaves: Sequence[Float[Array, "task ..."]]) -> Float[Array, "task task"]:
    """Dot products of the tasks' whole gradients, <g_s, g_t>; norms squared on the diagonal.

    One pass over memory; a CPU's matrix product would transpose all gradients first.
    """
    num_tasks = len(leaves[0])
    rows, columns = np.triu_indices(num_tasks)
    products = []
    for leaf in leaves:
        tasks = [leaf[task].astype(jnp.float32) for task in range(num_tasks)]
        pairs = zip(rows, columns, strict=True)
        products.append(sums([tasks[row] * tasks[column] for row, column in pairs]))
    upper = jnp.sum(jnp.stack(products), axis=0)
    places = np.zeros((num_tasks, num_tasks), np.int32)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return upper[places]


def sums(arrays: Sequence[Float[Array, "*shape"]]) -> Float[Array, " sums"]:
    """Sums of arrays of one shape in one pass, without storing them.

    Sums run along the last axis first, of long vectors in rows: one running float32 sum over
    millions of entries would lose digits.
    """
    if arrays[0].ndim == 1:
        missing = -arrays[0].size % _ROW
        arrays = [jnp.pad(array, (0, missing)).reshape(-1, _ROW) for array in arrays]
    axes = (arrays[0].ndim - 1,) if arrays[0].ndim else ()
    totals = jax.lax.reduce(
        tuple(arrays),
        (np.float32(0),) * len(arrays),
        lambda left, right: tuple(x + y for x, y in zip(left, right, strict=True)),
        axes,
    )
    return jnp.stack([jnp.sum(total) for total in totals])


def squared_norms(leaves: Sequence[Float[Array, "task ..."]]) -> Float[Array, " task"]:
    """Squared norm of each task's whole gradient."""
    parts = [jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in leaves]
    return jnp.sum(jnp.stack(parts), axis=0)


def _weighted_sum(
    weights: Float[Array, " task"], gradients: Float[Array, "task *shape"]
) -> Float[Array, "*shape"]:
    """Σ_t w_t·g_t, written out: a product with so short an axis would not be fused."""
    total = weights[0] * gradients[0]
    for task in range(1, len(gradients)):
        total = total + weights[task] * gradients[task]
    return total


def weighted_gradients(
    weights: Float[Array, " task"],
    task_grads: PyTree,
    params: PyTree,
    *,
    trainable: PyTree[bool] | None,
) -> PyTree:
    """One gradient tree, Σ_t w_t·g_t of each trainable leaf; 0 for frozen ones."""
    trainable_grads = keep_trainable(task_grads, trainable)
    return with_frozen(
        jax.tree.map(functools.partial(_weighted_sum, weights), trainable_grads), params
    )


def weights_entropy(weights: Float[Array, " task"]) -> Float[Array, ""]:
    """−Σ p ln p of the weights' shares, in nats; negative weights count as 0."""
    positive = jnp.maximum(weights, 0.0)
    shares = positive / jnp.maximum(jnp.sum(positive), jnp.finfo(jnp.float32).tiny)
    return jnp.sum(jax.scipy.special.entr(shares))


Leaves = tuple[Sequence[Array], ...]


def sum_over_devices(
    function: Callable[..., Array],
    *,
    stacked: Leaves,
    plain: Leaves = (),
    shared: tuple[Array, ...] = (),
    shardings: Sequence[NamedSharding] | None = None,
) -> Array:
    """The sum of a function over all parameters and over the devices that hold parts of them.

    Example:
        Two parameters on eight devices, both split over `fsdp`: each device calls `function` on its
        parts of both, and one all-reduce adds up the results.

    Args:
        function: called as `function(stacked, plain, *shared)` with lists of parameters that are
            split over the same axes; its results add up over parameters and over parts of them.
        stacked: lists of arrays [task, ...], one array per parameter.
        plain: lists of arrays without the task axis.
        shared: arrays replicated on all devices.
        shardings: shardings of the parameters, on one mesh; the task axis is not split. None leaves
            the sum to the compiler.
    """
    if shardings is None:
        return function(stacked, plain, *shared)
    specs = tuple(sharding.spec for sharding in shardings)

    def of_a_device(stacked: Leaves, plain: Leaves, shared: tuple[Array, ...]) -> Array:
        results = []
        for axes, places in _by_split(specs).items():
            result = function(_picked(stacked, places), _picked(plain, places), *shared)
            results.append(jax.lax.psum(result, axes) if axes else result)
        return functools.reduce(operator.add, results)

    wide = tuple(PartitionSpec(None, *spec) for spec in specs)
    mapped = jax.shard_map(
        of_a_device,
        mesh=shardings[0].mesh,
        in_specs=((wide,) * len(stacked), (specs,) * len(plain), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    return mapped(_tuples(stacked), _tuples(plain), shared)


def _by_split(specs: Sequence[PartitionSpec]) -> dict[tuple[str, ...], list[int]]:
    """Mesh axes -> places of the parameters that are split over exactly these."""
    places: dict[tuple[str, ...], list[int]] = {}
    for place, spec in enumerate(specs):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
        axes = tuple(sorted(axis for entry in entries for axis in entry))
        places.setdefault(axes, []).append(place)
    return places


def _picked(leaves: Leaves, places: Sequence[int]) -> Leaves:
    return tuple([arrays[place] for place in places] for arrays in leaves)


def _tuples(leaves: Leaves) -> Leaves:
    return tuple(map(tuple, leaves))
