"""The training state: step, parameters, optimiser state; created where it will live."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from taser_jax.storage.errors import ConfigError
from taser_jax.training.passage_queue import PassageQueue, QueueSize

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


def _none_skipped() -> SkippedSteps:
    return SkippedSteps(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


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
        queue: `PassageQueue` of the last steps; None without a queue.
    """

    step: PyTree
    params: PyTree
    opt_state: PyTree
    skipped: SkippedSteps = dataclasses.field(default_factory=_none_skipped)
    queue: PyTree = None


def init_state(
    init_params: Callable[[jax.Array], Params],
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    param_shardings: PyTree | None = None,
    queue: QueueSize | None = None,
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
        queue: sizes of the queue of passages; None without a queue.

    Returns:
        The state at step 0.
    """

    def create(key: jax.Array) -> TrainState:
        params = init_params(key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            queue=None if queue is None else queue.empty(),
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

    Raises:
        ConfigError: the sharding tree is not shaped as the parameters.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(param_shardings))
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    if by_path.keys() != shapes.keys():
        missing = sorted(map(jax.tree_util.keystr, by_path.keys() ^ shapes.keys()))
        raise ConfigError(
            f"shardings and parameters differ at {missing[0]}",
            where="param_shardings",
            expected="one NamedSharding per parameter",
            fix="derive the shardings from the model that is trained",
        )
    replicated = NamedSharding(next(iter(by_path.values())).mesh, PartitionSpec())

    def of_leaf(path: KeyPath, leaf: Any) -> NamedSharding:
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
        queue=None if state.queue is None else PassageQueue(replicated, replicated),
    )
