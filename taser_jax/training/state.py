"""The training state: created where it will live, and a table of its parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.storage.progress import aligned


def named_key(seed: int, name: str) -> jax.Array:
    """The key of one purpose ("init", "dropout", "routing") under one seed.

    The name enters by SHA-256, not by Python's `hash`, which differs from process to process.

    Args:
        seed: the run's seed.
        name: what the draws are for.

    Returns:
        A typed scalar key; fold the step into it.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return jax.random.fold_in(jax.random.key(seed), int.from_bytes(digest[:4], "little"))


def named_seed(seed: int, name: str) -> int:
    """The seed of one part, such as a task, under one seed; the order of parts does not matter."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


Params: TypeAlias = PyTree
"""A nested dictionary of arrays, as Flax makes it."""


class SkippedSteps(NamedTuple):
    """Counts of steps that changed no parameter (`step.apply_gradients`); int32 scalars.

    Attributes:
        in_a_row: those since the last step that changed them.
        total: all of them.
    """

    in_a_row: PyTree
    total: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state, which checkpoints save and steps update.

    The fields are trees because shardings and abstract arrays have this structure, too.

    Attributes:
        step: steps done so far, skipped ones included, int32 scalar.
        params: float32 parameters.
        opt_state: state of the optax chain.
        skipped: counts of the steps that changed neither parameters nor optimiser state.
    """

    step: PyTree
    params: PyTree
    opt_state: PyTree
    skipped: SkippedSteps = dataclasses.field(
        default_factory=lambda: SkippedSteps(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    )


def init_state(
    init_params: Callable[[jax.Array], Params],
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    param_shardings: PyTree | None = None,
) -> TrainState:
    """A fresh state, every leaf computed directly on the devices that keep it.

    No device and no host ever holds a whole copy, so a model that only fits sharded can start.

    Args:
        init_params: key -> parameters, for example
            `functools.partial(init_params, model, query_length=..., passage_length=...)`.
        optimizer: the optax chain that will update them.
        key: key of the initial weights.
        param_shardings: tree of `NamedSharding` shaped as the parameters; None keeps everything
            on the default device.

    Returns:
        The state at step 0.
    """

    def create(key: jax.Array) -> TrainState:
        params = init_params(key)
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params)
        )

    if param_shardings is None:
        return jax.jit(create)(key)
    shardings = state_shardings(jax.eval_shape(create, key), param_shardings)
    return jax.jit(create, out_shardings=shardings)(key)


def state_shardings(state: TrainState, param_shardings: PyTree) -> TrainState:
    """Shardings of a whole state from those of its parameters.

    An optimiser leaf belongs to the parameter whose path ends its own path and whose shape ends
    its own shape. It takes that parameter's sharding, with extra leading axes (moments per task,
    say) unsharded; anything else, such as a counter, is replicated.

    Args:
        state: a state or an abstract one (`jax.eval_shape`).
        param_shardings: tree of `NamedSharding` shaped as `state.params`.

    Returns:
        A `TrainState` of `NamedSharding`.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(param_shardings))
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    replicated = NamedSharding(next(iter(by_path.values())).mesh, PartitionSpec())

    def of_leaf(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        for start in range(len(path)):
            owner = path[start:]
            if owner in by_path:
                extra = leaf.ndim - len(shapes[owner])
                if extra < 0 or leaf.shape[extra:] != shapes[owner]:
                    break
                sharding = by_path[owner]
                return NamedSharding(sharding.mesh, PartitionSpec(*(None,) * extra, *sharding.spec))
        return replicated

    return TrainState(
        step=replicated,
        params=param_shardings,
        opt_state=jax.tree_util.tree_map_with_path(of_leaf, state.opt_state),
        skipped=SkippedSteps(replicated, replicated),
    )


def parameter_table(params: PyTree, *, logical_axes: PyTree, shardings: PyTree) -> str:
    """One line per parameter, and the total.

    Example:
        parameter                          shape       axes           sharding          count
        encoder/layers_0/mlp/wi/kernel     768 x 3072  embed, mlp     fsdp, model   2,359,296
        ...
        total                                                                     127,787,520

    Args:
        params: tree of arrays or `jax.ShapeDtypeStruct`.
        logical_axes: the same tree of PartitionSpec of logical names.
        shardings: the same tree of NamedSharding.
    """
    specs, places = leaves_by_path(logical_axes), leaves_by_path(shardings)
    header = ["parameter", "shape", "axes", "sharding", "count"]
    rows = []
    for name, leaf in leaves_by_path(params).items():
        axes, place = _spec_text(specs[name]), _spec_text(places[name].spec)
        shape = " x ".join(str(size) for size in leaf.shape)
        rows.append([name, shape, axes, place, f"{math.prod(leaf.shape):,}"])
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    lines = [header, *rows, ["total", "", "", "", f"{total:,}"]]
    return "\n".join(aligned(lines, left=len(header) - 1))


def _spec_text(spec: PartitionSpec) -> str:
    return ", ".join(
        "+".join(axis) if isinstance(axis, tuple) else str(axis or "-") for axis in spec
    )
