"""Peak matrix throughput of known accelerators, for model FLOPs utilisation."""

from __future__ import annotations

import jax

from taser_jax.compilation.chips import CHIPS

# Dense bfloat16 FLOP/s of one device, by the vendors' data sheets; a prefix of device_kind.
PEAK_FLOPS = {
    **{chip.device_kind: chip.peak_flops for chip in CHIPS.values()},
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak_flops() -> float | None:
    """Peak of all devices together; None where the kind of device is not in the table."""
    kind = jax.devices()[0].device_kind
    matches = [prefix for prefix in PEAK_FLOPS if kind.startswith(prefix)]
    if not matches:
        return None
    return PEAK_FLOPS[max(matches, key=len)] * jax.device_count()
