"""Meshes, rematerialisation and chunks for a recipe on a topology, judged by formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from taser_jax.devices.step_report import Roofline
from taser_jax.devices.topologies import Topology
from taser_jax.models.batch import BatchShape
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.layers import Remat

# Traffic that XLA counts for BERT base on v5e (docs/measurements.md): per byte of activations, per
# byte of parameters in each chunk, and per byte of parameters in the optimiser.
_ACTIVATION_TRAFFIC, _PARAMETER_TRAFFIC, _OPTIMIZER_TRAFFIC = 7, 8, 7
# Parameters, gradients and two moments, float32.
_STATE_COPIES = 4
# The compiler leaves slightly less than a chip's memory to programs, and formulas are not exact.
_USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to compute a step; devices that `fsdp` and `model` leave are on `data`.

    Attributes:
        fsdp: devices that split batch and parameters.
        model: devices that split parameters and products.
        remat: whether blocks are computed again in the backward pass.
        num_chunks: GradCache's parts of the batch.
    """

    fsdp: int
    model: int
    remat: Remat
    num_chunks: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A candidate by formulas.

    Attributes:
        candidate: what is estimated.
        peak: bytes on one device.
        roofline: the least time of a step.
        fits: whether the chip has the memory.
    """

    candidate: Candidate
    peak: int
    roofline: Roofline
    fits: bool


def candidates(
    num_devices: int, *, shapes: Sequence[BatchShape], num_heads: int
) -> Iterator[Candidate]:
    """Every candidate that divides devices, heads and batches evenly; chunks are powers of two.

    Args:
        num_devices: devices that share a step.
        shapes: the batches of a step.
        num_heads: attention heads, which `model` splits.
    """
    for model in _divisors(num_devices):
        parts = num_devices // model
        if num_heads % model or any(shape.queries % parts for shape in shapes):
            continue
        rows = min(shape.queries for shape in shapes) // parts
        chunks = [
            2**power
            for power in range(rows.bit_length())
            if all(shape.queries // parts % 2**power == 0 for shape in shapes)
        ]
        for fsdp in _divisors(parts):
            for remat in Remat:
                for num_chunks in chunks:
                    yield Candidate(fsdp, model, remat, num_chunks)


def estimate(
    candidate: Candidate,
    topology: Topology,
    *,
    config: ModelConfig,
    shapes: Sequence[BatchShape],
    param_bytes: int,
) -> Estimate:
    """Memory and time of a candidate, without a compiler.

    With P bytes of float32 parameters, A of all activations on a device, f = fsdp, m = model,
    n = devices / m, and k chunks:
        peak    4·P / (f·m) + A / k                      a part of A is split along m
        compute training FLOPs · (1 + 1/3 remat + 1/3 chunks) / devices
        HBM     7·A · (1 + 1/3 remat + 2/3 chunks) + 8·P·k / m + 7·P / (f·m)
        ICI     gradients, 2·(n−1)/n · P/m a chunk; parameters gathered along f, twice a chunk;
                activations of four products a block along m
    Formulas rank candidates; the compiler decides.

    Args:
        candidate: mesh, rematerialisation, chunks.
        topology: the chips.
        config: the model.
        shapes: the batches of a step; tasks are computed one after another.
        param_bytes: bytes of all parameters, float32.
    """
    chip, devices = topology.chip, len(topology.devices)
    fsdp, model, chunks = candidate.fsdp, candidate.model, candidate.num_chunks
    parts = devices // model
    split = (1 + 1 / model) / 2  # half of a block's activations have no axis to split

    def activations(shape: BatchShape, remat: Remat) -> float:
        blocks = config.with_transformer(remat=remat)
        return split * blocks.activation_bytes(shape, batch_devices=parts)

    model_flops = sum(config.training_flops(shape) for shape in shapes) / devices
    again = 1 + (candidate.remat is Remat.BLOCK) / 3 + (chunks > 1) / 3
    passes = 2 + (candidate.remat is Remat.BLOCK) + (chunks > 1)
    # What is computed again is written again; the loop over chunks copies as much once more.
    written = again + (chunks > 1) / 3
    traffic = _ACTIVATION_TRAFFIC * written * sum(activations(each, Remat.NONE) for each in shapes)
    traffic += param_bytes / model * (_PARAMETER_TRAFFIC * chunks + _OPTIMIZER_TRAFFIC / fsdp)

    def seconds(num_bytes: float, group: int) -> float:
        """A ring's one pass: (g − 1)/g of the bytes over the links of a group."""
        return num_bytes * (group - 1) / group / (topology.links(group) * chip.link_bandwidth)

    tokens = sum(shape.tokens for shape in shapes) / parts
    transformer = config.transformer
    block = tokens * transformer.embed_dim * transformer.dtype_bytes
    ici = chunks * seconds(2 * param_bytes / model, parts)
    ici += chunks * passes * seconds(param_bytes / model, fsdp)
    ici += 2 * 2 * passes * transformer.num_layers * seconds(block, model)
    peak = _STATE_COPIES * param_bytes / (fsdp * model)
    peak += max(activations(shape.chunk(chunks), candidate.remat) for shape in shapes)
    return Estimate(
        candidate=candidate,
        peak=int(peak),
        roofline=Roofline(
            compute=again * model_flops / chip.peak_flops,
            hbm=traffic / chip.hbm_bandwidth,
            ici=ici,
            dcn=0.0,
            model_flops=model_flops,
            peak_flops=chip.peak_flops,
        ),
        fits=peak <= _USABLE * chip.hbm_bytes,
    )


def best_first(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that fit, the shortest step first; of equal ones that with the simplest settings."""

    def order(each: Estimate) -> tuple[float, float, int, int, int]:
        time, candidate = each.roofline, each.candidate
        step, alone = round(time.step_seconds, 6), round(time.sequential_seconds, 6)
        return step, alone, candidate.model, candidate.fsdp, candidate.num_chunks

    return sorted((each for each in estimates if each.fits), key=order)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
