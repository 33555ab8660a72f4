"""What to change in a recipe that needs more memory than a chip has."""

from __future__ import annotations

from taser_jax.models.bert import Remat
from taser_jax.models.build import ModelConfig, remat
from taser_jax.partitioning import Partitioner
from taser_jax.pipelines.training_config import TrainingConfig

# Parameters, gradients and moments that leave this share of the memory to activations.
_STATE_SHARE = 0.5


def what_would_fit(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    partitioner: Partitioner,
    smallest_batch: int,
    needed: int,
    available: int,
    state_bytes: int,
) -> str:
    """The settings to change, by what takes the memory.

    Args:
        model: its rematerialisation.
        training: its chunks.
        partitioner: devices along each axis.
        smallest_batch: queries of the step's smallest batch.
        needed: bytes of a device.
        available: bytes a device has.
        state_bytes: of `needed`, parameters and optimiser state.
    """
    fixes = []
    room = available * _STATE_SHARE
    if state_bytes > room:
        free = partitioner.mesh.shape["data"] * partitioner.mesh.shape["fsdp"]
        now = partitioner.mesh.shape["fsdp"]
        splits = [size for size in range(now + 1, free + 1) if free % size == 0]
        wide = [size for size in splits if state_bytes * now / size <= room]
        if splits:
            fixes.append(
                f"MESH_FSDP={(wide or splits[-1:])[0]} splits parameters and optimiser state"
            )
        else:
            fixes.append("more chips, or NUM_MODEL_PARTITIONS, to split parameters and state")
    activations = needed - state_bytes
    if activations > available - min(state_bytes, room):
        if remat(model) is Remat.NONE:
            fixes.append("REMAT=block recomputes each block in the backward pass")
        rows = smallest_batch // partitioner.batch_devices
        factor = activations / max(available - min(state_bytes, room), 1)
        chunks = [
            size
            for size in range(training.num_chunks + 1, rows + 1)
            if rows % size == 0 and size >= factor * training.num_chunks
        ]
        if chunks:
            fixes.append(f"NUM_CHUNKS={chunks[0]} encodes a part of the batch at a time")
    fixes.append("more chips, over which the batch is split")
    return "; or ".join(fixes)
