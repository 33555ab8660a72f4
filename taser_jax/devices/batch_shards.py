"""Random draws for a device's share of a batch, equal to the whole batch's draws."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped, UInt32

from taser_jax.devices.partitioning import BATCH_AXES


@dataclasses.dataclass(frozen=True)
class BatchShard:
    """Which share of a batch a program sees.

    Attributes:
        index: the share's number, in the order of the batch's rows.
        count: number of equal shares.
    """

    index: Int[Array, ""]
    count: int

    def first_position(self, size: int) -> UInt32[Array, ""]:
        """Entries of the whole batch's array before those of the share, modulo 2**32.

        Args:
            size: entries of the share's array, whose first axis is the batch's rows.
        """
        return self.index.astype(jnp.uint32) * jnp.uint32(size % 2**32)


_CURRENT: contextvars.ContextVar[BatchShard | None] = contextvars.ContextVar("shard", default=None)


def current_shard() -> BatchShard | None:
    """The share of the batch that is being traced; None where the batch is whole."""
    return _CURRENT.get()


@contextlib.contextmanager
def on_shard(shard: BatchShard) -> Iterator[None]:
    """Traces a model on one share of a batch.

    Inside `jax.shard_map` a model sees its device's rows alone. Dropout's masks and routing noise
    must still be those of the whole batch, or results would depend on the number of devices.

    Args:
        shard: the share.
    """
    token = _CURRENT.set(shard)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def rows_of_shard(
    draw: Callable[[tuple[int, ...]], Shaped[Array, "..."]], shape: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """Random numbers for this share's rows, as a draw for the whole batch gives them.

    Args:
        draw: shape -> random numbers.
        shape: shape of the result; its first axis has the share's rows.
    """
    shard = current_shard()
    if shard is None:
        return draw(shape)
    rows, *others = shape
    whole = draw((rows * shard.count, *others))
    return jax.lax.dynamic_slice_in_dim(whole, shard.index * rows, rows)


def shard_axes(rows: int, *, num_chunks: int) -> tuple[str, ...]:
    """Mesh axes over which a batch can be computed apart: devices there hold all parameters.

    Args:
        rows: rows of the batch.
        num_chunks: equal chunks into which each device divides its rows.

    Returns:
        Axes of more than one device; none without a mesh (`jax.set_mesh`), where another axis
        splits parameters, or where the rows cannot be shared out evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1}
    axes = tuple(axis for axis in BATCH_AXES if axis in split)
    count = math.prod(mesh.shape[axis] for axis in axes)
    is_alone = split == set(axes) and "fsdp" not in split and not mesh.manual_axes
    return axes if is_alone and rows % (count * num_chunks) == 0 else ()


def this_shard(axes: tuple[str, ...]) -> BatchShard:
    """The share of the device at hand, inside `jax.shard_map` over `axes`."""
    return BatchShard(jax.lax.axis_index(axes), jax.lax.axis_size(axes))
