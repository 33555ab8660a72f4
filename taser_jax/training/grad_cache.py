"""Exact gradients of a batch-wide loss in the memory of one chunk (GradCache)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from taser_jax.devices.mesh import on_shard, shard_axes, this_shard
from taser_jax.models.batch import Array
from taser_jax.storage.errors import ConfigError

Encode = Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]


def encode_in_chunks(
    encode: Encode, params: PyTree, inputs: PyTree, key: jax.Array, *, num_chunks: int
) -> tuple[PyTree, PyTree]:
    """Encodes a batch chunk by chunk so that its backward pass holds one chunk at a time.

    A contrastive loss needs all representations at once, but each representation needs only its
    own input. The chunks are a `lax.scan` over a rematerialised `encode`: the forward pass keeps
    representations and drops every activation, the loss is taken over all of them, and the
    backward pass encodes one chunk again, with the same key, to carry that chunk's cotangents
    into the parameters, whose gradients add up (Gao et al. 2021, "Scaling Deep Contrastive
    Learning Batch Size under Memory Limited Setup", section 3). The price is a second forward
    pass. Differentiate the caller's loss as usual.

    Chunk c holds rows c, c + num_chunks, c + 2·num_chunks, ... If a batch is split over devices in
    contiguous runs, every device then gives 1/num_chunks of its own rows to each chunk, and nothing
    moves between devices. Rows are returned in their original order.

    Example:
        6 rows, num_chunks=2: chunk 0 encodes rows 0, 2, 4 and chunk 1 rows 1, 3, 5.

    Where every device holds all parameters, each encodes its own rows and adds up its own
    gradients over the chunks: they are exchanged once per step, not once per chunk.

    Args:
        encode: (params, inputs, key) -> (rows, sums): `rows` has the inputs' batch as its leading
            axis, `sums` adds over inputs (may be None).
        params: parameters.
        inputs: tree of arrays with a leading batch axis.
        key: random key; chunk c gets `fold_in(key, c)`, and with one chunk `key` itself is used,
            which is the plain encoding.
        num_chunks: divides the batch.

    Returns:
        (rows, sums) of the whole batch.

    Raises:
        ConfigError: `num_chunks` does not divide the batch.
    """
    check_chunks(len(jax.tree.leaves(inputs)[0]), num_chunks)
    if num_chunks == 1:
        return encode(params, inputs, key)

    axes = shard_axes(len(jax.tree.leaves(inputs)[0]), num_chunks=num_chunks)
    if not axes:
        return _encode_chunks(encode, params, inputs, key, num_chunks=num_chunks)

    def of_a_device(params: PyTree, inputs: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
        with on_shard(this_shard(axes)):
            rows, sums = _encode_chunks(encode, params, inputs, key, num_chunks=num_chunks)
        return rows, jax.lax.psum(sums, axes)

    whole, split = PartitionSpec(), PartitionSpec(axes)
    return jax.shard_map(
        of_a_device,
        in_specs=(whole, split, whole),
        out_specs=(split, whole),
        # The chunks' sums begin as zeros that no device has changed yet.
        check_vma=False,
    )(params, inputs, key)


def _encode_chunks(
    encode: Encode, params: PyTree, inputs: PyTree, key: jax.Array, *, num_chunks: int
) -> tuple[PyTree, PyTree]:
    # Inside a scan XLA cannot merge the two forward passes, so no barrier is needed.
    encode_again = jax.checkpoint(encode, prevent_cse=False)

    def encode_chunk(sums: PyTree, chunk: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        index, chunk_inputs = chunk
        rows, chunk_sums = encode_again(params, chunk_inputs, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, chunk_sums), rows

    chunks = jax.tree.map(lambda array: _split(array, num_chunks), inputs)
    first = jax.tree.map(lambda array: array[0], chunks)
    _, sums_shape = jax.eval_shape(encode, params, first, key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums_shape)
    sums, rows = jax.lax.scan(encode_chunk, zeros, (jnp.arange(num_chunks), chunks))
    return jax.tree.map(_join, rows), sums


def check_chunks(batch_size: int, num_chunks: int, *, num_shards: int = 1) -> None:
    """Raises `ConfigError` unless every device can give each chunk the same number of rows.

    Args:
        batch_size: queries, or passages, of the global batch.
        num_chunks: chunks that it is encoded in.
        num_shards: devices the batch is split over.
    """
    if num_chunks < 1 or batch_size % (num_chunks * num_shards):
        raise ConfigError(
            f"{batch_size} rows in {num_chunks} chunks on {num_shards} devices",
            where="num_chunks",
            expected="a positive number of chunks; chunks x devices divides queries and passages",
            fix="choose TrainingConfig.num_chunks as a divisor of the batch size of one device",
        )


def _split(array: Array, num_chunks: int) -> jax.Array:
    return jnp.moveaxis(jnp.asarray(array).reshape(-1, num_chunks, *array.shape[1:]), 1, 0)


def _join(array: jax.Array) -> jax.Array:
    return jnp.moveaxis(array, 0, 1).reshape(-1, *array.shape[2:])
