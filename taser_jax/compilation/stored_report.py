"""Estimates from a report.json: measurements are kept, peaks and links may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from taser_jax.compilation.chips import CHIPS
from taser_jax.compilation.collectives import Collective, CollectiveKind, Network
from taser_jax.compilation.products import MatrixProduct
from taser_jax.compilation.roofline import Roofline, roofline
from taser_jax.compilation.topologies import Topology


def stored_roofline(step: Mapping[str, Any]) -> Roofline:
    """The least time of a step, computed anew from what the compiler said of it.

    Args:
        step: one entry of report.json, of this version or an older one.
    """
    generation, _, shape = step["topology"].partition(":")
    flops = step["flops"]
    return roofline(
        Topology(
            name=step["topology"],
            chip=CHIPS[generation],
            shape=tuple(int(size) for size in shape.split("x")),
            num_slices=step["num_slices"],
            devices=(),
        ),
        flops=flops.get("matrix_passes") or _passes(step),
        model_flops=flops["model"],
        num_bytes=step["bytes_accessed"] * flops["loop_factor"],
        collectives=stored_collectives(step),
    )


def stored_collectives(step: Mapping[str, Any]) -> list[Collective]:
    """The collectives of an entry of report.json."""
    return [_collective(each) for each in step["collectives"]]


def _passes(step: Mapping[str, Any]) -> float:
    products = [MatrixProduct(**each) for each in step["float32_products"]]
    more = sum(each.flops * (each.passes - 1) for each in products)
    return step["flops"]["matrix_products"] + more / math.prod(step["mesh"].values())


def _collective(stored: Mapping[str, Any]) -> Collective:
    extent = stored.get("extent")
    return Collective(
        kind=CollectiveKind(stored["kind"]),
        num_bytes=stored["num_bytes"],
        group_size=stored["group_size"],
        times=stored["times"],
        operation=stored["operation"],
        network=Network(stored["network"]) if "network" in stored else Network.ICI,
        extent=None if extent is None else tuple(extent),
    )
