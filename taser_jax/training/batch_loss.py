"""The loss of one batch as a function of the parameters, in training and in validation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from taser_jax.devices.mesh import shard_axes
from taser_jax.models.batch import Array, Batch, Encoded, EncoderInput, Role, TokenGroups
from taser_jax.models.parameters import in_dtype
from taser_jax.storage.errors import ConfigError
from taser_jax.training.objective import Objective, ObjectiveConfig, StepMetrics
from taser_jax.training.state import Params, named_key

Encode = Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]


def encode_groups(
    encode: Encode,
    params: PyTree,
    groups: Sequence[PyTree],
    keys: Sequence[jax.Array],
    *,
    num_chunks: int,
) -> tuple[list[PyTree], PyTree]:
    """Encodes groups of texts chunk by chunk: a backward pass holds one chunk of a group at a time.

    A contrastive loss needs all representations at once, but each representation needs only its
    own input. The chunks are a `lax.scan` over a rematerialised `encode`: the forward pass keeps
    representations and drops every activation, the loss is taken over all of them, and the
    backward pass encodes one chunk again, with the same key, to carry that chunk's cotangents
    into the parameters, whose gradients add up (Gao et al. 2021, "Scaling Deep Contrastive
    Learning Batch Size under Memory Limited Setup", section 3). The price is a second forward
    pass. Differentiate the caller's loss as usual.

    Chunk c holds rows c, c + num_chunks, c + 2·num_chunks, ... If a batch is split over devices in
    contiguous runs, every device then gives 1/num_chunks of its own rows to each chunk, and nothing
    moves between devices. Rows are returned in their original order. Where every device holds all
    parameters, each encodes its own rows and adds up its own gradients over groups and chunks: they
    are exchanged once, not once per group or chunk.

    Example:
        6 rows, num_chunks=2: chunk 0 encodes rows 0, 2, 4 and chunk 1 rows 1, 3, 5.

    Args:
        encode: (params, inputs, key) -> (rows, sums): `rows` has the inputs' batch as its leading
            axis, `sums` adds over inputs (may be None).
        params: parameters.
        groups: inputs of different lengths, trees of arrays with a leading batch axis.
        keys: a random key for each group; chunk c gets `fold_in(key, c)`, and with one chunk the
            key itself is used, which is the plain encoding.
        num_chunks: divides the batch of each group.

    Returns:
        Rows of each group, and the sums over all of them.

    Raises:
        ConfigError: `num_chunks` does not divide the batch of a group.
    """
    sizes = [len(jax.tree.leaves(inputs)[0]) for inputs in groups]
    for size in sizes:
        check_chunks(size, num_chunks)

    def encode_all(
        params: PyTree, groups: Sequence[PyTree], keys: Sequence[jax.Array]
    ) -> tuple[list[PyTree], PyTree]:
        encoded = [
            encode(params, inputs, key)
            if num_chunks == 1
            else _encode_chunks(encode, params, inputs, key, num_chunks=num_chunks)
            for inputs, key in zip(groups, keys, strict=True)
        ]
        rows, sums = zip(*encoded, strict=True)
        return list(rows), jax.tree.map(lambda *parts: functools.reduce(jnp.add, parts), *sums)

    def of_a_device(
        params: PyTree, groups: Sequence[PyTree], keys: Sequence[jax.Array]
    ) -> tuple[list[PyTree], PyTree]:
        rows, sums = encode_all(params, groups, keys)
        return rows, jax.lax.psum(sums, axes)

    axes = shard_axes(math.gcd(*sizes), num_chunks=num_chunks)
    is_one_encoding = num_chunks == 1 and len(groups) == 1
    if not axes or is_one_encoding:
        return encode_all(params, groups, keys)
    whole, split = PartitionSpec(), PartitionSpec(axes)
    return jax.shard_map(
        of_a_device,
        in_specs=(whole, split, whole),
        out_specs=(split, whole),
        # The chunks' sums begin as zeros that no device has changed yet.
        check_vma=False,
    )(params, groups, keys)


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
        problem = f"{batch_size} rows in {num_chunks} chunks on {num_shards} devices"
        fix = "choose a divisor of the queries, and of the passages, of one device"
        raise ConfigError(problem, where="TrainingConfig.num_chunks", fix=fix)


def _split(array: Array, num_chunks: int) -> jax.Array:
    return jnp.moveaxis(jnp.asarray(array).reshape(-1, num_chunks, *array.shape[1:]), 1, 0)


def _join(array: jax.Array) -> jax.Array:
    return jnp.moveaxis(array, 0, 1).reshape(-1, *array.shape[2:])


Loss = Callable[..., tuple[jax.Array, StepMetrics]]
"""`loss(params, batch, *, step, task=None) -> (loss, metrics)`."""


def make_loss(
    model: nn.Module,
    *,
    objective: Objective | None = None,
    num_chunks: int = 1,
    seed: int = 0,
    train: bool = True,
) -> Loss:
    """The loss of one batch as a function of the parameters, to be differentiated by the caller.

    Args:
        model: a dual encoder, with a method `encode(tokens, role=, task=, train=) -> Encoded`, the
            `dtype` of its blocks, and `query_tasks` whose queries have a tower of their own.
        objective: what is minimised; None is `ObjectiveConfig()`.
        num_chunks: number of chunks in which queries, and passages, are encoded.
        seed: the run's seed.
        train: whether dropout and routing noise are on.

    Returns:
        `loss(params, batch, *, step, task=None) -> (loss, metrics)`; metrics are the objective's.

    Raises:
        ConfigError: (from the returned function) `num_chunks` does not divide the batch, or the
            objective needs something that the model or the batch lacks.
    """
    objective = objective or ObjectiveConfig()

    def encode_side(
        params: Params,
        texts: EncoderInput | TokenGroups,
        *,
        role: Role,
        step: jax.Array,
        task: str | None,
    ) -> Encoded:
        def encode(
            params: Params, tokens: EncoderInput, key: jax.Array
        ) -> tuple[jax.Array, PyTree]:
            dropout, routing = jax.random.split(key)
            encoded: PyTree = model.apply(
                {"params": params},
                tokens,
                role=role,
                task=task,
                train=train,
                rngs={"dropout": dropout, "routing": routing},
                method="encode",
            )
            return encoded.embeddings, encoded.routing

        key = jax.random.fold_in(named_key(seed, f"encode {role.value}"), step)
        if not isinstance(texts, TokenGroups):
            (rows,), sums = encode_groups(encode, params, [texts], [key], num_chunks=num_chunks)
            return Encoded(rows, sums)
        keys = [jax.random.fold_in(key, number) for number in range(len(texts.groups))]
        parts, sums = encode_groups(encode, params, texts.groups, keys, num_chunks=num_chunks)
        return Encoded(jnp.concatenate(parts)[texts.place], sums)

    def loss_fn(
        params: Params, batch: Batch, *, step: jax.Array, task: str | None = None
    ) -> tuple[jax.Array, StepMetrics]:
        if num_chunks == 1:
            # Rounded once, a kernel has one gradient of all length groups and both roles, which XLA
            # adds up before devices exchange it. Chunks are added up in float32 instead.
            params = in_dtype(params, model.dtype)
        queries = encode_side(params, batch.queries, role=Role.QUERY, step=step, task=task)
        passages = encode_side(params, batch.passages, role=Role.PASSAGE, step=step, task=task)
        return objective(queries, passages, batch)

    return loss_fn
