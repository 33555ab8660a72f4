"""The place of a parameter in a model, read from its path."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from taser_jax.evaluation.specialty.specialty import LeafCounts, add_up

Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True)
class Place:
    """Stack, layer and module of a parameter.

    Attributes:
        stack: what comes before the layer: a tower, an encoder, a decoder.
        layer: its number; None for embeddings and final norms.
        module: attention, feed-forward, norm, ... inside the layer or stack.
    """

    stack: str
    layer: int | None
    module: str

    @property
    def kind(self) -> str:
        """Stack and module, whatever the layer."""
        return f"{self.stack}/{self.module}" if self.stack else self.module


def place_of(path: str) -> Place:
    """Reads a path such as T5X writes it.

    Example:
        "encoder/layers_3/attention/query/kernel" -> stack "encoder", layer 3, module "attention";
        "encoder/token_embedder/embedding" -> stack "encoder", no layer, module "token_embedder".
    """
    parts = path.split("/")
    for number, part in enumerate(parts[:-1]):
        layer = re.fullmatch(r"layers_(\d+)", part)
        if layer:
            return Place("/".join(parts[:number]), int(layer.group(1)), parts[number + 1])
    return Place("/".join(parts[:-2]), None, parts[-2] if len(parts) > 1 else path)


def grouped(leaves: Mapping[str, LeafCounts], key: Callable[[Place], Key]) -> dict[Key, LeafCounts]:
    """Counts added up over the leaves of each key, in the order in which keys are met."""
    groups: dict[Key, list[LeafCounts]] = {}
    for path, counts in leaves.items():
        groups.setdefault(key(place_of(path)), []).append(counts)
    return {name: add_up(members) for name, members in groups.items()}


def by_module(leaves: Mapping[str, LeafCounts]) -> dict[str, LeafCounts]:
    """Counts by kind of module, layers together."""
    return grouped(leaves, lambda place: place.kind)


def by_layer(leaves: Mapping[str, LeafCounts]) -> dict[str, LeafCounts]:
    """Counts by stack and layer; parameters of no layer count under "outside layers"."""

    def key(place: Place) -> tuple[str, int]:
        return ("", -1) if place.layer is None else (place.stack, place.layer)

    return {
        f"{stack} layer {layer}".strip() if layer >= 0 else "outside layers": counts
        for (stack, layer), counts in sorted(grouped(leaves, key).items())
    }
