"""Peaks of TPU chips, as Google publishes them."""

from __future__ import annotations

import dataclasses

import jax

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU chip, or what JAX sees as a device of it.

    v4 and v5p have two cores that JAX sees as one device (megacore). TPU7x has two chiplets, each a
    device with half of the chip's memory and bandwidths.

    Attributes:
        name: generation, the first part of a topology's name.
        device_kind: JAX's name of its devices.
        hbm_bytes: memory.
        peak_flops: dense bfloat16 FLOP/s.
        hbm_bandwidth: bytes/s between memory and core.
        link_bandwidth: bytes/s out of one inter-chip link.
        num_links: inter-chip links.
        network_bandwidth: bytes/s of a chip's share of its host's connection to the data centre.
        source: page with the figures.
    """

    name: str
    device_kind: str
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    num_links: int
    network_bandwidth: float
    source: str


_DOCS = "https://cloud.google.com/tpu/docs"

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        # Network: 50 Gbit/s a v5p chip; 6.4 and 25.6 Tbit/s a pod of 256 v5e and v6e chips. Nothing
        # is published for v4: v5p's is taken.
        # Links: all-reduce bandwidth of a pod, 1.1 PB/s, over 4,096 chips of six links.
        Chip("v4", "TPU v4", 32 * _GIB, 275e12, 1.2e12, 45e9, 6, 6.25e9, f"{_DOCS}/v4"),
        # Links: 400 GB/s a chip, both directions, over four; v5p: 1,200 GB/s over six. v6e:
        # the page has had 3,200 and 3,584 Gbit/s a chip, one direction, over four; the lower agrees
        # with its all-reduce bandwidth of a pod, 102.4 TB/s over 256 chips.
        Chip("v5e", "TPU v5 lite", 16 * _GIB, 197e12, 819e9, 50e9, 4, 3.125e9, f"{_DOCS}/v5e"),
        Chip("v5p", "TPU v5", 95 * _GIB, 459e12, 2.765e12, 100e9, 6, 6.25e9, f"{_DOCS}/v5p"),
        # TPU7x: half a chip's 192 GiB, 2,307 TFLOP/s, 7,380 GB/s, 1,200 GB/s over six links and
        # 100 Gbit/s.
        Chip("v6e", "TPU v6 lite", 32 * _GIB, 918e12, 1.638e12, 100e9, 4, 12.5e9, f"{_DOCS}/v6e"),
        Chip("tpu7x", "TPU7x", 96 * _GIB, 1153.5e12, 3.69e12, 50e9, 6, 6.25e9, f"{_DOCS}/tpu7x"),
    )
}
# Dense bfloat16 FLOP/s of one device, by the vendors' data sheets; a prefix of device_kind.
PEAK_FLOPS = {
    **{chip.device_kind: chip.peak_flops for chip in CHIPS.values()},
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops() -> float | None:
    """Peak of all devices together; None if the table lacks this kind of device."""
    kind = jax.devices()[0].device_kind
    matches = [prefix for prefix in PEAK_FLOPS if kind.startswith(prefix)]
    if not matches:
        return None
    return PEAK_FLOPS[max(matches, key=len)] * jax.device_count()
